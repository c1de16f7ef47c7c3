"""The one way a request ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from steppe.engine.record import Outcome, TerminalStatus
from steppe.errors import RequestFailedError
from steppe.request import FinishReason
from steppe.streaming import Finish, Wakeups, deliver

if TYPE_CHECKING:
    from steppe.engine.channel import EngineChannel
    from steppe.engine.record import RequestRecord, SequenceRecord
    from steppe.request import LLMGenerationResponse
    from steppe.stepping.types import TokenDelta

__all__ = ["completed", "fail", "fail_engine", "terminate"]

logger = logging.getLogger("steppe.engine")

_REASONS = {
    TerminalStatus.CANCELLED: FinishReason.CANCELLED,
    TerminalStatus.EXECUTION_ERROR: FinishReason.ERROR,
}


def terminate(
    record: RequestRecord,
    outcome: Outcome,
    wakeups: Wakeups | None = None,
    last: tuple[SequenceRecord, TokenDelta | None, Finish] | None = None,
) -> bool:
    """Make ``record`` terminal, once; False if it was. Any thread.

    ``last`` is the end of a completed stream. The order is part of the contract: the terminal
    chunk, the backlog places, one counter, the registry, the outcome, and the channel, which is
    closed by then for everyone who reads. A cancel flag that was planted before makes the outcome
    CANCELLED, whatever was wanted.
    """
    effective = record.claim(outcome)
    if effective is None:
        return False
    mine = Wakeups() if wakeups is None else wakeups
    shared = record.shared
    if last is not None and effective.status is TerminalStatus.COMPLETED:
        sequence, delta, finish = last
        deliver(record.channel, delta, finish, index=sequence.index, wakeups=mine)
        reason = finish.reason
    else:
        reason = _REASONS[effective.status]
        unfinished = [
            one.index for one in record.sequences if one.index not in record.responses
        ] or [record.sequences[-1].index]
        for index in unfinished:
            finish = Finish(reason, closes_channel=index == unfinished[-1])
            deliver(record.channel, None, finish, index=index, wakeups=mine)
    shared.release(record.places, record.take_prompt_tokens())
    shared.counters.add(effective.status.value)
    shared.forget(record.id)
    record.publish(effective, mine)
    record.channel.finish(reason, mine)
    if wakeups is None:
        mine.flush()
    if record.places > 1 and effective.status is not TerminalStatus.COMPLETED:
        # Its other sequences are seated or waiting somewhere.
        shared.notice()
    return True


def completed(response: LLMGenerationResponse) -> Outcome:
    """The outcome of a request that ran to its end."""
    return Outcome(TerminalStatus.COMPLETED, response)


def fail(
    record: RequestRecord,
    message: str,
    cause: BaseException | None = None,
    wakeups: Wakeups | None = None,
) -> bool:
    """Terminate ``record`` with a RequestFailedError that says ``message`` and has that cause."""
    error = RequestFailedError(f"request {record.id}: {message}")
    error.__cause__ = cause
    return terminate(record, Outcome(TerminalStatus.EXECUTION_ERROR, error=error), wakeups)


def fail_engine(shared: EngineChannel, cause: BaseException) -> None:
    """Put the engine in its failed state, for good, and give everyone an outcome. Any thread.

    The actor may be stuck in a runtime call at this moment; it leaves when that returns.
    """
    if shared.failure is None:
        shared.failure = cause
        logger.error("the engine has failed: %s", cause)
    shared.close_admission()
    for record in shared.live():
        fail(record, f"the engine has failed: {cause}", cause)
    shared.notice()
