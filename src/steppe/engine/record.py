"""A request as the engine knows it, and its one outcome.

Three kinds of threads meet here: callers (cancel, wait), the actor (commit) and the deadline thread
(expiry). The record's lock orders them. Whoever *claims* a record first decides its outcome; a
cancellation that came before the claim wins over whatever the claimant wanted.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from steppe.errors import RequestCancelledError
from steppe.stepping.types import TokenDelta
from steppe.streaming import Wakeups

if TYPE_CHECKING:
    from steppe.engine.channel import EngineChannel
    from steppe.engine.waiting import Account
    from steppe.errors import SteppeError
    from steppe.request import LLMGenerationRequest, LLMGenerationResponse
    from steppe.stepping.types import BatchResult, RequestId, ResidentRef, SlotSeed
    from steppe.streaming import StreamChannel

__all__ = ["Outcome", "RequestRecord", "SequenceRecord", "TerminalStatus", "prompt_tokens"]


class TerminalStatus(Enum):
    """How a request ended. Values name the counters."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXECUTION_ERROR = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's end: a response if COMPLETED, else the exception that ``get()`` raises."""

    status: TerminalStatus
    response: LLMGenerationResponse | None = None
    error: SteppeError | None = None


class RequestRecord:
    """One accepted request, until its last handle is gone.

    ``id`` is its first sequence's; its others have the ids that follow.
    """

    __slots__ = (
        "_cancelled",
        "_claimed",
        "_futures",
        "_lock",
        "_outcome",
        "_released",
        "admitted",
        "channel",
        "first_token",
        "id",
        "places",
        "prompt_tokens",
        "request",
        "responses",
        "sequences",
        "shared",
        "stopped",
        "submitted_at",
    )

    def __init__(
        self,
        request_id: RequestId,
        request: LLMGenerationRequest,
        channel: StreamChannel,
        shared: EngineChannel,
        submitted_at: float,
    ) -> None:
        self.id = request_id
        self.request = request
        self.channel = channel
        self.shared = shared
        self.submitted_at = submitted_at
        self.places = request.params.n
        self.prompt_tokens = prompt_tokens(request)
        """What the backlog counts of it. ``take_prompt_tokens`` changes it."""
        self.stopped = False
        """Cancelled or terminal. Set before ``shared.changed``; never unset."""
        self.admitted = False
        self.first_token = False
        self.responses: dict[int, LLMGenerationResponse] = {}
        self.sequences = tuple(
            SequenceRecord(self, request_id + index, one)
            for index, one in enumerate(request.sequences())
        )
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._futures: list[asyncio.Future[None]] = []
        self._outcome: Outcome | None = None
        self._cancelled = False
        self._claimed = False

    # ---- callers ---------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether there is an outcome."""
        return self._outcome is not None

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for an end before there was one."""
        return self._cancelled

    @property
    def live(self) -> bool:
        """Whether nobody has decided its outcome yet."""
        return not self._claimed

    def cancel(self) -> bool:
        """Any thread: plant the flag and release everyone who waits; never blocks for long.

        False when it had been planted before or the outcome was decided already.
        """
        with self._lock:
            if self._claimed or self._cancelled:
                return False
            self._cancelled = True
            self.stopped = True
            futures = self._wake_locked()
        # The channel calls back into this method, which then has nothing left to do.
        self.channel.cancel()
        _release(futures, None)
        self.shared.notice()
        return True

    def wait(self, timeout: float | None) -> Outcome:
        """Block until the outcome is known, or a cancel makes waiting for it pointless.

        Raises TimeoutError after ``timeout`` seconds.
        """
        with self._released:
            if not self._released.wait_for(self._waitless, timeout):
                raise TimeoutError(f"request {self.id} has not ended within {timeout} s")
            return self._known()

    async def wait_async(self) -> Outcome:
        """``wait`` for a coroutine."""
        with self._lock:
            if self._waitless():
                return self._known()
            future = asyncio.get_running_loop().create_future()
            self._futures.append(future)
        try:
            await future
        finally:
            with self._lock:
                if future in self._futures:
                    self._futures.remove(future)
        with self._lock:
            return self._known()

    # ---- whoever ends it -------------------------------------------------------------------------

    def claim(self, wanted: Outcome) -> Outcome | None:
        """Decide the outcome, once: None if somebody did already. A planted cancel flag wins."""
        with self._lock:
            if self._claimed:
                return None
            self._claimed = True
            self.stopped = True
            if self._cancelled and wanted.status is not TerminalStatus.CANCELLED:
                return self.cancelled_outcome()
            return wanted

    def note_token(self) -> None:
        """Actor: a token is about to be delivered; with the first its prompt has been read."""
        if not self.first_token:
            self.first_token = True
            self.shared.release(0, self.take_prompt_tokens())

    def take_prompt_tokens(self) -> int:
        """What the backlog still counts of its prompt, for the one who gives it back; then 0.

        Any thread: the actor takes it with the first token, or whoever ends the request.
        """
        with self._lock:
            taken, self.prompt_tokens = self.prompt_tokens, 0
        return taken

    def publish(self, outcome: Outcome, wakeups: Wakeups | None = None) -> None:
        """After a claim: let everyone see the outcome."""
        with self._lock:
            self._outcome = outcome
            futures = self._wake_locked()
        _release(futures, wakeups)

    def cancelled_outcome(self) -> Outcome:
        """What a cancelled request ends with."""
        error = RequestCancelledError(f"request {self.id} was cancelled")
        return Outcome(TerminalStatus.CANCELLED, error=error)

    # ---- inside ----------------------------------------------------------------------------------

    def _waitless(self) -> bool:
        return self._outcome is not None or self._cancelled

    def _known(self) -> Outcome:
        return self._outcome or self.cancelled_outcome()

    def _wake_locked(self) -> list[asyncio.Future[None]]:
        self._released.notify_all()
        futures, self._futures = self._futures, []
        return futures


def prompt_tokens(request: LLMGenerationRequest) -> int:
    """Tokens of the prompts of all its sequences; 0 while the prompt is text."""
    prompt = request.prompt
    return 0 if prompt is None or isinstance(prompt, str) else len(prompt) * request.params.n


def _release(futures: list[asyncio.Future[None]], wakeups: Wakeups | None) -> None:
    if not futures:
        return
    mine = Wakeups() if wakeups is None else wakeups
    for future in futures:
        mine.add(future)
    if wakeups is None:
        mine.flush()


class SequenceRecord:
    """One sequence of a request on its way through the engine. The actor's alone.

    ``ref`` is its seat while it has one. ``rank`` orders residents by when they were first seated,
    and survives preemption, as do the counts of what was delivered.
    """

    __slots__ = (
        "account",
        "id",
        "index",
        "preemptions",
        "rank",
        "record",
        "ref",
        "request",
        "resume",
        "sent_chars",
        "sent_ids",
        "skips",
    )

    def __init__(
        self, record: RequestRecord, request_id: RequestId, request: LLMGenerationRequest
    ) -> None:
        self.record = record
        self.id = request_id
        self.request = request
        self.index = request.sequence_index
        self.ref: ResidentRef | None = None
        self.rank = 0
        self.resume: SlotSeed | None = None
        self.preemptions = 0
        self.skips = 0
        self.sent_ids = 0
        self.sent_chars = 0
        self.account: Account | None = None

    def tail(self, delta: TokenDelta | None, result: BatchResult) -> TokenDelta | None:
        """What its stream still lacks of a finished sequence.

        An execution that lists the last delta beside the snapshot has nothing to add; the seed's
        leave what the last step produced in the snapshot alone.
        """
        ids = self.sent_ids + (len(delta.token_ids) if delta else 0)
        chars = self.sent_chars + (len(delta.text) if delta else 0)
        if ids >= len(result.token_ids) and chars >= len(result.text):
            return delta
        logprobs = result.logprobs
        return TokenDelta(
            result.token_ids[self.sent_ids :],
            result.text[self.sent_chars :],
            None if logprobs is None else logprobs[self.sent_ids :],
        )
