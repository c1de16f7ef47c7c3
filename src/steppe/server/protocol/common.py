"""Fields that several APIs share, and how they become ``SamplingParams``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from steppe.errors import InvalidRequestError
from steppe.request import SamplingParams
from steppe.server.protocol.forms import FormFields, Strict

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SamplingFields", "StreamOptions", "Strict"]

MAX_STOP = 64


class StreamOptions(Strict):
    """What a stream carries besides text. Obfuscation is padding that this server never adds."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(FormFields):
    """Every field of ``SamplingParams`` under its own name, except ``logprobs``, which each API
    spells its own way, and ``priority``, as vLLM has it. Absent and null both mean the model's own
    default.
    """

    temperature: float | None = Field(None, description="0 is greedy.")
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 or -1: off.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id to bias.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    include_stop: bool | None = None
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = Field(
        None, description="Lower is sooner; needs a server with fair scheduling."
    )

    def sampling(self, defaults: Mapping[str, int | float], **more: Any) -> SamplingParams:
        """What was asked, and ``more`` of it, over the model's ``defaults``.

        Raises InvalidRequestError naming the field.
        """
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in SamplingFields.model_fields.keys() - FormFields.model_fields.keys()
            if name != "priority" and getattr(self, name) is not None
        }
        if "logit_bias" in given:
            given["logit_bias"] = _token_ids(given["logit_bias"])
        if "seed" in given:
            given["seed"] %= 2**64
        given |= {name: value for name, value in more.items() if value is not None}
        merged = {**defaults, **given}
        if "max_tokens" in defaults and "max_tokens" not in given:
            # The model's own limit is a habit, not a wish: it makes no request invalid.
            merged["max_tokens"] = max(merged["max_tokens"], given.get("min_tokens", 0))
        return SamplingParams(**merged)


def _token_ids(bias: Mapping[str, float]) -> dict[int, float]:
    ids: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError("logit_bias", f"{key[:40]!r} is no token id")
        ids[int(key)] = value
    return ids
