"""Asking a runtime for things, and reading what it said on a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steppe.request import FinishReason, LLMGenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.request import TokenLogprob, Usage
    from steppe.streaming import StreamChannel


def ask(
    prompt: str | Sequence[int] = "hello",
    max_tokens: int | None = 6,
    *,
    channel: StreamChannel | None = None,
    sequence_index: int = 0,
    **params: Any,
) -> LLMGenerationRequest:
    """A greedy request that the model's own stops do not end, unless ``params`` say otherwise."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | params
    return LLMGenerationRequest(
        prompt,
        params=SamplingParams(**params),
        stream_channel=channel,
        sequence_index=sequence_index,
    )


class Heard:
    """All that a channel said about one sequence, joined."""

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] = ()
        self.text = ""
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.usage: Usage | None = None


def heard(channel: StreamChannel) -> dict[int, Heard]:
    """Drain a channel; what it said, by sequence. Fails if anything follows a sequence's end."""
    sequences: dict[int, Heard] = {}
    while (chunk := channel.try_pop()) is not None:
        one = sequences.setdefault(chunk.index, Heard())
        assert one.finish_reason is None, "a chunk after the last one"
        one.token_ids += chunk.token_ids
        one.text += chunk.text
        one.logprobs += chunk.logprobs or ()
        assert chunk.finished == (chunk.finish_reason is not None)
        one.finish_reason, one.stop_reason = chunk.finish_reason, chunk.stop_reason
        one.usage = chunk.usage
    return sequences
