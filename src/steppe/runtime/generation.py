"""What one request owns between ``begin_generation`` and ``finish_generation`` (seed 002)."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn, Self

from steppe.request import FinishReason
from steppe.streaming import Finish, deliver

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from steppe.request import LLMGenerationRequest
    from steppe.runtime.context import DecodingInferenceContext
    from steppe.runtime.decoding.strategy import DecodingKvHeadroom, DecodingStrategy
    from steppe.runtime.kv.managed import ManagedKVCacheRequest
    from steppe.runtime.session import GenerationSession
    from steppe.streaming import StreamChannel

__all__ = ["ActiveLatch", "InProgressGuard", "SteppedGeneration", "StreamChannelFinalizer"]


class ActiveLatch:
    """Set while a generation is open. Taking it is atomic, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> bool:
        """True for the one caller that now holds it."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Let the next generation begin."""
        self._lock.release()

    @property
    def taken(self) -> bool:
        """Whether a generation is open."""
        return self._lock.locked()


class InProgressGuard:
    """Releases a latch that its maker has taken, once, whatever path retires the request (seed
    002).
    """

    def __init__(self, latch: ActiveLatch) -> None:
        self._latch: ActiveLatch | None = latch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        latch, self._latch = self._latch, None
        if latch is not None:
            latch.release()


class StreamChannelFinalizer:
    """Ends with an error every channel still open when a generation goes away (seed 002)."""

    def __init__(self, channels: Iterable[StreamChannel]) -> None:
        self._channels = list(channels)

    def add(self, channel: StreamChannel) -> None:
        """Watch over a joiner's channel as well."""
        self._channels.append(channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for channel in self._channels:
            if not channel.finished:
                deliver(channel, None, Finish(FinishReason.ERROR))


class SteppedGeneration:
    """One request held open across steps: latch, seats, leases, channels and the session over them.

    Actor thread only. A context manager; ``close`` is idempotent. Things are given back in the
    order channels, session, leases, latch: the next generation cannot begin before the pages are
    free.
    """

    def __init__(
        self,
        *,
        guard: InProgressGuard,
        request: LLMGenerationRequest,
        context: DecodingInferenceContext,
        strategy: DecodingStrategy,
        managed_request: ManagedKVCacheRequest,
        kv_headroom: DecodingKvHeadroom,
        session: GenerationSession,
        stream_finalizer: StreamChannelFinalizer | None,
        founder_request_id: int = 0,
    ) -> None:
        self.guard = guard
        self.request = request
        self.context = context
        self.strategy = strategy
        self.managed_request = managed_request
        self.kv_headroom = kv_headroom
        self.session = session
        self.stream_finalizer = stream_finalizer
        self.founder_request_id = founder_request_id
        self.enable_spec_decode = strategy.is_speculative
        self.has_action_request = False
        self._exits = ExitStack()
        self._exits.enter_context(guard)
        self._exits.enter_context(managed_request)
        self._exits.callback(session.close)
        if stream_finalizer is not None:
            self._exits.enter_context(stream_finalizer)

    def close(self) -> None:
        """Give everything back."""
        self._exits.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stepped generation can be neither copied nor pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
