"""Who gets in: batches are founded, and joined by whoever is next and fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.engine.metrics import StallReason
from steppe.engine.session import Session
from steppe.engine.terminate import fail, fail_engine, terminate
from steppe.engine.waiting import FairWaiting, FcfsWaiting
from steppe.errors import ExecutionError, ExecutionLostError
from steppe.stepping.types import AdmissionStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.engine.channel import EngineChannel
    from steppe.engine.config import EngineConfig
    from steppe.engine.record import SequenceRecord
    from steppe.engine.recording import Recorder
    from steppe.engine.waiting import Waiting
    from steppe.request import LLMGenerationRequest
    from steppe.stepping.execution import SteppedExecution
    from steppe.stepping.types import RequestId

    SteppedFactory = Callable[[LLMGenerationRequest, RequestId], SteppedExecution | None]

__all__ = ["Admission"]


class Admission:
    """The door to the batch: the waiting line, and the operations that seat somebody from it.

    The actor's alone. Whatever goes wrong here ends the one request that it went wrong with.
    """

    def __init__(
        self, shared: EngineChannel, config: EngineConfig, begin_stepped: SteppedFactory
    ) -> None:
        self._shared = shared
        self._config = config
        self._begin_stepped: SteppedFactory | None = begin_stepped
        self._clock = config.clock
        self._counters = shared.counters
        self._ranks = 0
        self.fair = config.scheduling == "fair"
        self.waiting: Waiting = FairWaiting(config.max_head_skips) if self.fair else FcfsWaiting()
        self.recorder: Recorder | None = None
        """Where admissions and steps are written, if anywhere. Set by any thread."""

    def found(self) -> Session | None:
        """Open a batch with the next in line; None if that failed and the request has ended."""
        head = self.waiting.head(self._clock())
        self.waiting.end_round()
        assert head is not None
        self.waiting.take(head)
        if head.record.stopped:
            terminate(head.record, head.record.cancelled_outcome())
            self.waiting.left(head)
            return None
        self._shared.resident = 1
        self._rank(head)
        self._serve(head)
        began = self._shared.began(self._clock())
        try:
            assert self._begin_stepped is not None
            execution = self._begin_stepped(head.request, head.id)
            if execution is None:
                raise ExecutionError("the runtime refused the request")
            try:
                founder = execution.residents()[0]
                session = Session(execution, head.request)
                session.seats.add(head, founder)
            except Exception:
                execution.abort()
                raise
        except ExecutionLostError as error:
            self.refuse(head, error)
            fail_engine(self._shared, error)
            return None
        except Exception as error:
            # The boundary of a founding: it fails this request alone.
            self.refuse(head, error)
            return None
        finally:
            self._shared.busy_since = None
        session.founder = founder
        self._note(head, "found", began)
        return session

    def let_go(self) -> None:
        """Nobody is seated any more: forget the runtime."""
        self._begin_stepped = None

    def admit(self, session: Session, most: int) -> None:
        """Seat as many of those in line as fit, ``most`` at most."""
        waiting, seats = self.waiting, session.seats
        room = min(most, self._config.max_batch_size - len(seats))
        if room <= 0 or not len(waiting):
            return
        now = self._clock()
        try:
            while room > 0:
                # Nobody but its own preempted sequences joins a batch that nobody is left in.
                head = waiting.head(now, resumed_only=not len(seats))
                if head is None:
                    break
                verdict = self._seat(session, head)
                if verdict is None:
                    if not waiting.pass_over(head):
                        break
                    continue
                self._counters.head_skips += waiting.take(head)
                room -= verdict
                if not verdict:
                    waiting.left(head)
                    if most == 1:
                        break
        finally:
            waiting.end_round()

    def _seat(self, session: Session, head: SequenceRecord) -> int | None:
        """Try to seat ``head``: 1 seated, 0 it has ended, None it must wait."""
        record = head.record
        if record.stopped:
            terminate(record, record.cancelled_outcome())
            return 0
        if not session.compatibility.trivial:
            obstacle = session.compatibility.obstacle(session.request, head.request)
            if obstacle is not None:
                self._counters.stall(obstacle)
                return None
        resume = head.resume
        if not session.headroom_for(head):
            self._counters.stall(StallReason.NO_CAPACITY)
            return None
        execution = session.execution
        began = self._shared.began(self._clock())
        try:
            if resume is None:
                answer = execution.admit(head.request, session.next_index, head.id)
            else:
                answer = execution.admit(
                    head.request, resume.original_index, head.id, resume=resume
                )
            if answer.status is AdmissionStatus.ADMITTED:
                if answer.ref is None:
                    raise ExecutionError("admitted, but to no seat")
                self._rank(head)
                session.seats.add(head, answer.ref)
        except ExecutionLostError as error:
            self.refuse(head, error)
            fail_engine(self._shared, error)
            return 0
        except Exception as error:
            # The boundary of an admission: it fails this request alone.
            self.refuse(head, error)
            return 0
        finally:
            self._shared.busy_since = None
        if answer.status is AdmissionStatus.NO_CAPACITY:
            if len(session.seats):
                self._counters.stall(StallReason.NO_CAPACITY)
                return None
            # Nothing runs that could make room.
            self.refuse(head, ExecutionError(answer.reason or "no room in an empty batch"))
            return 0
        if answer.status is AdmissionStatus.REJECTED:
            self.refuse(head, ExecutionError(answer.reason or "the batch rejected the request"))
            return 0
        head.resume = None
        session.joiner = answer.ref
        if resume is None:
            session.next_index += 1
            self._serve(head, joins=True)
        self._note(head, "join" if resume is None else "resume", began)
        return 1

    def _rank(self, sequence: SequenceRecord) -> None:
        """Whoever was seated before keeps its rank."""
        if not sequence.rank:
            self._ranks += 1
            sequence.rank = self._ranks

    def _serve(self, sequence: SequenceRecord, *, joins: bool = False) -> None:
        """From now on the request is served: its wait in the queue is over."""
        record = sequence.record
        if not record.admitted:
            record.admitted = True
            self._counters.queue_latency(self._clock() - record.submitted_at)
            if joins:
                self._counters.admitted_mid_flight += 1

    def refuse(self, sequence: SequenceRecord, error: Exception) -> None:
        """End its request with the reason."""
        fail(sequence.record, str(error) or type(error).__name__, error)
        self.waiting.left(sequence)

    def _note(self, sequence: SequenceRecord, how: str, began: float) -> None:
        if (recorder := self.recorder) is not None:
            recorder.admission(sequence, how, began, self._clock())
