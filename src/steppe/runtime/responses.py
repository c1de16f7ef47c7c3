"""From finished sequences to the response a caller gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.request import LLMGenerationResponse, SequenceOutput, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.stepping.types import BatchResult

__all__ = ["to_response"]


def to_response(
    results: Sequence[BatchResult], prompt_tokens: int | None = None
) -> LLMGenerationResponse:
    """One output per result, in the order given.

    ``prompt_tokens`` is what the prompts count for (sequences of one request share theirs); None
    adds up every result's own.
    """
    outputs = tuple(
        SequenceOutput(
            index=index,
            text=result.text,
            token_ids=result.token_ids,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            logprobs=result.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            embedding=result.embedding,
        )
        for index, result in enumerate(results)
    )
    if prompt_tokens is None:
        prompt_tokens = sum(result.prompt_tokens for result in results)
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(len(result.token_ids) for result in results),
        cached_tokens=sum(result.cached_tokens for result in results),
    )
    return LLMGenerationResponse(outputs, usage)
