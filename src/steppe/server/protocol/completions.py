"""``/v1/completions``: the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from steppe.errors import InvalidRequestError, UnsupportedRequestError
from steppe.server.protocol.common import SamplingFields, StreamOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steppe.request import SamplingParams

__all__ = ["CompletionRequest"]

DEFAULT_MAX_TOKENS = 16
"""What the OpenAI API generates when it is not told how much."""


class CompletionRequest(SamplingFields):
    """A completion of one prompt or of several. ``user`` is accepted and has no effect here."""

    prompt: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=50)
    return_token_ids: bool | None = Field(None, description="Name the ids beside each text.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Spell the tokens of logprobs `token_id:N`."
    )
    best_of: int | None = None
    suffix: str | None = None
    user: str | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Computed prefixes are shared only with requests of the same salt.",
    )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt", "is empty")
        return [prompt] if isinstance(prompt[0], int) else list(prompt)

    def params(self, defaults: Mapping[str, int | float]) -> SamplingParams:
        """The sampling parameters. Raises InvalidRequestError naming the field."""
        if self.suffix:
            raise UnsupportedRequestError("suffix", "text cannot be inserted, only continued")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedRequestError("best_of", "must be n: every sequence is returned")
        if self.echo and self.stream and self.logprobs is not None:
            raise UnsupportedRequestError("echo", "a stream cannot echo with logprobs")
        scored = self.prompt_logprobs
        if self.echo and scored is None:
            if self.logprobs is not None:
                scored = self.logprobs
            elif self.max_tokens == 0:
                scored = 0
        return self.sampling(
            {"max_tokens": max(DEFAULT_MAX_TOKENS, self.min_tokens or 0), **defaults},
            logprobs=self.logprobs,
            prompt_logprobs=scored,
            guided=self.form(),
        )
