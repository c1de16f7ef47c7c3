"""``/v1/embeddings``: the request."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from steppe.errors import InvalidRequestError, UnsupportedRequestError
from steppe.server.protocol.forms import Strict

__all__ = ["EmbeddingRequest"]

MAX_INPUTS = 2048


class EmbeddingRequest(Strict):
    """Embeddings of one input or of several, each text or token ids. ``user`` has no effect."""

    input: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None

    def inputs(self) -> list[str | list[int]]:
        """The inputs. Raises InvalidRequestError (``input``) for none and for too many."""
        given: Any = self.input
        if isinstance(given, str):
            return [given]
        if not given:
            raise InvalidRequestError("input", "is empty")
        if isinstance(given[0], int):
            return [given]
        if len(given) > MAX_INPUTS:
            raise InvalidRequestError("input", f"has {len(given)} entries, at most {MAX_INPUTS}")
        return list(given)

    def check_size(self, size: int) -> None:
        """Raise UnsupportedRequestError if other ``dimensions`` were asked for than there are."""
        if self.dimensions is not None and self.dimensions != size:
            raise UnsupportedRequestError(
                "dimensions", f"must be {size}: the model's embeddings cannot be shortened"
            )
