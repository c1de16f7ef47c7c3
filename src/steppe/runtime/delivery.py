"""Streaming for the blocking loop: which sequence writes to which channel, and when it closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.request import Usage
from steppe.streaming import Finish, Wakeups, deliver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.request import LLMGenerationRequest
    from steppe.runtime.boundary import SessionStep
    from steppe.stepping.types import BatchResult, SlotSeed, TokenDelta
    from steppe.streaming import StreamChannel

__all__ = ["BlockingDelivery"]


class _Open:
    """A channel's sequences that have not ended, and what its request has cost."""

    def __init__(self, left: int = 0) -> None:
        self.left = left
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0

    def end(self, result: BatchResult) -> Finish:
        self.left -= 1
        self.prompt_tokens = result.prompt_tokens
        self.completion_tokens += len(result.token_ids)
        self.cached_tokens += result.cached_tokens
        last = self.left == 0
        usage = Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        return Finish(
            result.finish_reason, result.stop_reason, usage if last else None, closes_channel=last
        )


class BlockingDelivery:
    """Writes a blocking generation's steps to its channels. The generating thread only.

    Sequences of one request share its channel; the last to end closes it, with the usage.
    """

    def __init__(self, sequences: Sequence[LLMGenerationRequest]) -> None:
        self._open: dict[StreamChannel, _Open] = {}
        for sequence in sequences:
            if sequence.stream_channel is not None:
                self._open.setdefault(sequence.stream_channel, _Open()).left += 1

    @property
    def channels(self) -> tuple[StreamChannel, ...]:
        """Every channel that is written."""
        return tuple(self._open)

    def step(self, step: SessionStep) -> None:
        """Deliver what one step did."""
        wakeups = Wakeups()
        ended = {seed.original_index: (seed, result) for _, seed, result in step.finished}
        for _, seed, delta in step.deltas:
            _, result = ended.pop(seed.original_index, (seed, None))
            self._deliver(seed, delta, result, wakeups)
        for seed, result in ended.values():
            self._deliver(seed, None, result, wakeups)
        wakeups.flush()

    def _deliver(
        self,
        seed: SlotSeed,
        delta: TokenDelta | None,
        result: BatchResult | None,
        wakeups: Wakeups,
    ) -> None:
        channel = seed.stream_channel
        if channel is None:
            return
        finish = None
        if result is not None:
            # A joiner admitted by a boundary hook is not among the founders: it is one sequence.
            finish = self._open.get(channel, _Open(left=1)).end(result)
        deliver(channel, delta, finish, index=seed.sequence_index, wakeups=wakeups)
