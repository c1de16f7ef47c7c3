"""From what a caller said to what a rank can seat: templating, tokenization, limits (seed 002)."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.errors import (
    ChatTemplateError,
    ContextLengthError,
    InvalidRequestError,
)
from steppe.runtime.guided.compiler import GrammarCompiler
from steppe.runtime.kv.keys import PageKeys, PrefixIdentity
from steppe.runtime.kv.pool import pages_for
from steppe.stepping.types import SlotSeed
from steppe.text.chat_template import encode_chat

if TYPE_CHECKING:
    from steppe.request import LLMGenerationRequest, SamplingParams
    from steppe.runtime.artifacts import ModelArtifacts

__all__ = ["OPEN_ENDED_RESERVE", "RequestPreparation"]

OPEN_ENDED_RESERVE = 256
"""Tokens reserved beyond the prompt when a request names no ``max_tokens``; it grows from there."""


class RequestPreparation:
    """Turns requests into seeds. Any thread: it reads nothing that changes but its limits.

    ``context_length`` is what one sequence may grow to: the model's, or the page pool's if smaller.
    """

    def __init__(
        self, artifacts: ModelArtifacts, context_length: int, page_size: int, pool_pages: int
    ) -> None:
        self._artifacts = artifacts
        self.context_length = context_length
        self._page_size = page_size
        self._pool_pages = pool_pages
        self.page_keys = PageKeys(page_size)
        """Makes the keys of every sequence's pages."""
        self._grammars = GrammarCompiler(
            artifacts.tokenizer, artifacts.program.vocab_size, artifacts.stop_token_ids
        )

    def set_aside(self, pages: int) -> None:
        """So many pages of every group are no longer for requests."""
        self._pool_pages -= pages
        self.context_length = min(self.context_length, self._pool_pages * self._page_size)

    def tokenize(self, request: LLMGenerationRequest) -> tuple[int, ...]:
        """The prompt's token ids; never empty.

        Raises InvalidRequestError, ChatTemplateError.
        """
        artifacts = self._artifacts
        if request.messages is not None:
            if artifacts.chat_template is None:
                raise ChatTemplateError(
                    f"{artifacts.name} has no chat template: give a prompt, not messages"
                )
            ids = encode_chat(artifacts.tokenizer, artifacts.chat_template, request.messages)
        elif isinstance(request.prompt, str):
            ids = artifacts.tokenizer.encode(request.prompt)
        else:
            ids = list(request.prompt or ())
            vocab_size = artifacts.program.vocab_size
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidRequestError(
                        "prompt", f"no token {token_id}, the vocabulary has {vocab_size}"
                    )
        if not ids:
            field = "prompt" if request.messages is None else "messages"
            raise InvalidRequestError(field, "is empty: it has no tokens")
        return tuple(ids)

    def validate(self, request: LLMGenerationRequest) -> LLMGenerationRequest:
        """Check all that can be checked before seating; the request with its prompt as token ids
        and its grammar compiled.

        Raises InvalidRequestError, ContextLengthError, ChatTemplateError; SubmitError when too many
        grammars are being compiled.
        """
        if request.requests:
            return replace(request, requests=tuple(self.validate(one) for one in request.requests))
        request.params.check_vocabulary(self._artifacts.program.vocab_size)
        ids = self.tokenize(request)
        self.max_tokens(request, len(ids))
        params = self._compiled(request.params)
        return replace(request, prompt=ids, messages=None, params=params)

    def _compiled(self, params: SamplingParams) -> SamplingParams:
        if params.guided is None:
            return params
        return replace(params, guided=self._grammars.prepare(params.guided))

    def max_tokens(self, request: LLMGenerationRequest, num_prompt: int) -> int:
        """The resolved limit of generated tokens. Raises ContextLengthError with the arithmetic."""
        field = "prompt" if request.messages is None else "messages"
        limit = self.context_length
        asked = 0 if request.task == "embed" else request.params.max_tokens
        if num_prompt + (asked != 0) > limit:
            raise ContextLengthError(
                field,
                f"has {num_prompt} tokens, the context has room for {limit} including the answer",
                needed=num_prompt + (asked != 0),
                available=limit,
            )
        if asked is None:
            return limit - num_prompt
        if num_prompt + asked > limit:
            raise ContextLengthError(
                "max_tokens",
                f"{num_prompt} prompt tokens and {asked} to generate are {num_prompt + asked}, "
                f"the context has {limit}",
                needed=num_prompt + asked,
                available=limit,
            )
        pages = pages_for(num_prompt + asked, self._page_size)
        if pages > self._pool_pages:
            raise ContextLengthError(
                "max_tokens",
                f"{num_prompt} + {asked} tokens need {pages} pages of {self._page_size}, "
                f"the pool has {self._pool_pages}",
                needed=num_prompt + asked,
                available=self._pool_pages * self._page_size,
            )
        return asked

    def seed(self, request: LLMGenerationRequest, original_index: int, request_id: int) -> SlotSeed:
        """Everything a rank needs to seat one single-sequence request.

        An unseeded request gets a fresh random seed here, once. Raises as ``validate`` does.
        """
        params = request.params
        params.check_vocabulary(self._artifacts.program.vocab_size)
        ids = self.tokenize(request)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._artifacts.stop_token_ids
        return SlotSeed(
            request_id=request_id,
            original_index=original_index,
            prompt_token_ids=ids,
            params=self._compiled(params),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_tokens=self.max_tokens(request, len(ids)),
            stop_token_ids=stops,
            sequence_index=request.sequence_index,
            stream_channel=request.stream_channel,
            embed=request.task == "embed",
            cache_lookup=request.cache_lookup,
            cache_commit=request.cache_commit,
            cache_salt=request.cache_salt,
            page_chain=self.page_keys.chain(PrefixIdentity(request.cache_salt)),
        )

    def reservation(self, seed: SlotSeed, *, overcommit: bool = False) -> int:
        """Tokens to hold room for when ``seed`` is seated (DESIGN section 4).

        With an explicit ``max_tokens``, all it may grow to. Without one, or with ``overcommit``,
        less: it then grows page by page.
        """
        known = len(seed.prompt_token_ids) + len(seed.generated)
        most = len(seed.prompt_token_ids) + seed.max_tokens
        if overcommit:
            return min(most, known + 1)
        if seed.params.max_tokens is None:
            return min(most, known + OPEN_ENDED_RESERVE)
        return most
