"""The forms that an answer can be held to, under the names that clients have for them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from steppe.errors import InvalidRequestError
from steppe.request import Guided

__all__ = ["FormFields", "ResponseFormat"]


class Strict(BaseModel):
    """A schema that converts nothing and lets no unknown field pass."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonSchema(Strict):
    """A schema and its name. Every schema is followed to the letter, whatever ``strict`` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GuidedForm(Strict):
    """The fields of ``Guided``."""

    json_object: bool = False
    json_schema: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    after: str | None = None


class StructuredOutputs(Strict):
    """The same, as vLLM names it."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


class FormFields(Strict):
    """At most one of these is given: a second form has no place in one answer."""

    response_format: ResponseFormat | None = None
    guided: GuidedForm | None = Field(None, description="The fields of Guided.")
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def form_field(self) -> str | None:
        """The field that says which form. Raises InvalidRequestError if several do."""
        given = [
            name
            for name in FormFields.model_fields
            if getattr(self, name) is not None
            and not (name == "response_format" and self._free_format())
        ]
        if len(given) > 1:
            raise InvalidRequestError(given[1], f"asks for a form beside {given[0]}")
        return given[0] if given else None

    def form(self) -> Guided | None:
        """The form itself. Raises InvalidRequestError (``guided``)."""
        field = self.form_field()
        if field is None:
            return None
        if self.response_format is not None and field == "response_format":
            if self.response_format.type == "json_object":
                return Guided(json_object=True)
            wrapped = self.response_format.json_schema
            if wrapped is None or wrapped.schema_ is None:
                raise InvalidRequestError("guided", "json_schema needs a schema")
            return Guided(json_schema=wrapped.schema_)
        if self.guided is not None:
            return Guided(**self.guided.model_dump())
        if self.structured_outputs is not None:
            asked = self.structured_outputs
            return Guided(
                json_object=bool(asked.json_object),
                json_schema=asked.json_,
                regex=asked.regex,
                grammar=asked.grammar,
                choice=asked.choice,
            )
        return Guided(
            json_schema=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )

    def _free_format(self) -> bool:
        return self.response_format is not None and self.response_format.type == "text"
