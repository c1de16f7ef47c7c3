"""From a committed step to streams and outcomes: the one place where tokens reach their readers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steppe.engine.terminate import completed, fail, terminate
from steppe.request import FinishReason, LLMGenerationResponse, Usage
from steppe.streaming import Finish, Wakeups, deliver

if TYPE_CHECKING:
    from steppe.engine.coordinator import Commit, FinishedSequence
    from steppe.engine.metrics import Counters
    from steppe.engine.record import RequestRecord
    from steppe.engine.waiting import Waiting

__all__ = ["publish"]


def publish(commit: Commit, counters: Counters, fair: Waiting | None = None) -> None:
    """Deliver a commit, and wake every event loop that waits for any of it once.

    Whoever was stopped meanwhile gets nothing more. ``fair`` is told what each was served.
    """
    wakeups = Wakeups()
    tokens = 0
    for sequence, delta in commit.survivors:
        record = sequence.record
        if record.stopped:
            continue
        count = len(delta.token_ids)
        if count:
            tokens += count
            if not sequence.sent_ids:
                record.note_token()
            sequence.sent_ids += count
            if fair is not None:
                fair.served(sequence, count)
        sequence.sent_chars += len(delta.text)
        deliver(record.channel, delta, None, sequence.index, wakeups)
    for finished in commit.finished:
        tokens += _finish(finished, wakeups)
    counters.tokens += tokens
    wakeups.flush()


def _finish(finished: FinishedSequence, wakeups: Wakeups) -> int:
    """End one sequence, and its request with the last; how many tokens that delivered."""
    sequence, result = finished.sequence, finished.result
    record = sequence.record
    sequence.ref = None
    if result.finish_reason is FinishReason.ERROR and record.live:
        fail(record, result.error or "failed during generation", wakeups=wakeups)
        return 0
    if record.stopped or finished.response is None:
        terminate(record, record.cancelled_outcome(), wakeups)
        return 0
    tail = sequence.tail(finished.delta, result)
    count = len(tail.token_ids) if tail is not None else 0
    if count:
        record.note_token()
    record.responses[sequence.index] = finished.response
    last = len(record.responses) == record.places
    response = _assemble(record) if last else None
    end = Finish(
        result.finish_reason, result.stop_reason, response.usage if response else None, last
    )
    if response is None:
        deliver(record.channel, tail, end, index=sequence.index, wakeups=wakeups)
    else:
        terminate(record, completed(response), wakeups, (sequence, tail, end))
    return count


def _assemble(record: RequestRecord) -> LLMGenerationResponse:
    """One response of all sequences: the prompt counted once, completions added up."""
    if record.places == 1:
        return record.responses[record.sequences[0].index]
    parts = [record.responses[one.index] for one in record.sequences]
    outputs = tuple(
        replace(part.outputs[0], index=one.index)
        for one, part in zip(record.sequences, parts, strict=True)
    )
    usage = Usage(
        parts[0].usage.prompt_tokens,
        sum(part.usage.completion_tokens for part in parts),
        parts[0].usage.cached_tokens,
    )
    return LLMGenerationResponse(outputs, usage)
