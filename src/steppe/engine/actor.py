"""The one thread that touches the runtime: take in, admit, step, commit.

The actor refers to what callers share with it, never to the engine in front of it, so an engine
that nobody holds any more is collected although its actor still runs.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from steppe.engine.activity import StepLog, summary
from steppe.engine.admission import Admission
from steppe.engine.commit import publish
from steppe.engine.config import ShutdownMode
from steppe.engine.planner import PlannerSnapshot, StepBudget, plan
from steppe.engine.terminate import fail_engine, terminate
from steppe.errors import ExecutionError, ExecutionLostError
from steppe.stepping.types import ImmutableDecodeBatch, ImmutablePrefillBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.engine.channel import EngineChannel
    from steppe.engine.config import EngineConfig
    from steppe.engine.deadlines import Deadlines
    from steppe.engine.recording import Recorder
    from steppe.engine.session import Session
    from steppe.request import LLMGenerationRequest
    from steppe.stepping.execution import SteppedExecution
    from steppe.stepping.types import ImmutableStepBatch, RequestId, StepResult

    AnyBatch = ImmutableStepBatch | ImmutablePrefillBatch | ImmutableDecodeBatch
    SteppedFactory = Callable[[LLMGenerationRequest, RequestId], SteppedExecution | None]

__all__ = ["Actor", "abandon"]

logger = logging.getLogger("steppe.engine")

FINALIZER_PATIENCE = 2.0
"""Seconds that a dropped engine waits for its actor before it lets it end by itself."""


class Actor:
    """Serves requests one boundary at a time. Everything here runs on one thread.

    A boundary (``tick``) takes in at most a queue's worth of commands, ends what was stopped,
    admits, and runs one step. ``run`` is the thread's loop; ``tick`` alone is a manual engine.
    """

    def __init__(
        self,
        shared: EngineChannel,
        config: EngineConfig,
        deadlines: Deadlines,
        begin_stepped: SteppedFactory,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._shared = shared
        self._config = config
        self._deadlines = deadlines
        self._admission = Admission(shared, config, begin_stepped)
        self._waiting = self._admission.waiting
        self._close = close
        self._clock = config.clock
        self._counters = shared.counters
        self._budget = StepBudget(config.max_step_tokens)
        self._session: Session | None = None
        self._done = False
        self.steps = StepLog()
        """The last steps, for any thread that watches."""
        self.thread_id: int | None = None
        """The thread inside the actor at this moment."""

    @property
    def done(self) -> bool:
        """Whether the actor has left for good."""
        return self._done

    def record(self, recorder: Recorder) -> Recorder | None:
        """Any thread: write admissions and steps there from now on; returns the recorder before."""
        before, self._admission.recorder = self._admission.recorder, recorder
        return before

    @property
    def idle(self) -> bool:
        """Whether no batch is open and nobody waits. Any thread; true for this instant only."""
        return self._session is None and not len(self._waiting)

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's life: until a shutdown has nothing left to do, or the engine has failed."""
        try:
            while not self._done:
                if not self.tick() and not self._done:
                    self._shared.bell.wait(self._config.idle_wait)
        except BaseException:
            # A boundary on purpose: everyone has an outcome, and there is nobody to raise it to.
            logger.exception("the actor died")

    def tick(self) -> bool:
        """One boundary. False only when nothing was left to do.

        Raises what ends the program (KeyboardInterrupt and its like), and what should not have been
        possible; the engine has failed then.
        """
        if self._done:
            return False
        self.thread_id = threading.get_ident()
        try:
            return self._boundary()
        except BaseException as error:
            # Whatever it was, the state of this boundary is lost, and nobody may wait for it.
            fail_engine(self._shared, error)
            self._leave()
            raise
        finally:
            self._shared.queued = len(self._waiting)
            self._shared.resident = 0 if self._session is None else len(self._session.seats)
            self.thread_id = None

    def _boundary(self) -> bool:
        shared = self._shared
        if shared.failure is not None:
            self._leave()
            return False
        worked = self._take_in()
        if self._deadlines.watching:
            self._deadlines.poll()
        if shared.stop is ShutdownMode.CANCEL:
            for record in shared.live():
                record.cancel()
        if shared.changed:
            # Down before looking: whoever stops a record after this look raises it again.
            shared.changed = False
            worked |= self._end_stopped_waiters()
            if self._session is not None:
                self._session.stopped = True
        if self._session is None:
            if not len(self._waiting):
                if shared.stop is not None and not shared.has_pending:
                    self._leave()
                return worked
            self._session = self._admission.found()
        session = self._session
        if session is not None and shared.failure is None:
            try:
                if session.execution.mixed_steps:
                    self._mixed_step(session)
                else:
                    self._seed_step(session)
            except ExecutionLostError as error:
                fail_engine(shared, error)
            except Exception as error:
                # The boundary of a batch: whatever a step, a plan or a commit raises ends it alone.
                self._lose(session, error)
            self._conclude(session)
        return True

    def _take_in(self) -> bool:
        shared = self._shared
        took = 0
        # Bounded, so that a storm of submits cannot hold up a step.
        while took < shared.capacity and (record := shared.pop()) is not None:
            took += 1
            for sequence in record.sequences:
                self._waiting.append(sequence)
            if record.stopped:
                shared.changed = True
        return took > 0

    def _end_stopped_waiters(self) -> bool:
        gone = self._waiting.remove_stopped()
        for sequence in gone:
            self._waiting.left(sequence)
            terminate(sequence.record, sequence.record.cancelled_outcome())
        return bool(gone)

    # ---- one step --------------------------------------------------------------------------------

    def _mixed_step(self, session: Session) -> None:
        self._admission.admit(session, self._config.max_batch_size)
        if self._shared.failure is not None or not len(session.seats):
            return
        execution = session.execution
        known = execution.snapshot()
        if known is None:
            raise ExecutionError("an execution that mixes steps must give a snapshot")
        before = PlannerSnapshot(
            self._budget.tokens,
            known.page_size,
            known.free_pages,
            session.by_age(known.residents),
            session.to_retire(),
            self._budget.measured,
        )
        chosen = plan(before, session.entries)
        batch = chosen.batch
        if not (batch.decodes or batch.prefills or batch.retire or batch.preempt):
            raise ExecutionError("residents that need nothing: no step could ever end them")
        self._counters.stalls_pages += len(chosen.waiting)
        self._counters.preemptions += len(batch.preempt)
        session.short_of_pages = bool(chosen.waiting or batch.preempt)
        result, seconds = self._run(session, lambda: execution.step(batch), before, batch)
        self._budget.observe(chosen.tokens, seconds)
        if self._admission.fair:
            for prompt in batch.prefills:
                self._waiting.served(session.seats.at(prompt.ref), prompt.num_tokens)
        self._commit(session, result, batch)

    def _seed_step(self, session: Session) -> None:
        """The seed's order: the prefill of who was just seated, else one decode of everybody."""
        execution = session.execution
        if session.stopped:
            session.plant_flags()
        if session.founder is None:
            self._admission.admit(session, 1)
            if self._shared.failure is not None:
                return
        target, session.founder = session.founder or session.joiner, None
        session.joiner = None
        if target is not None:
            prompt = ImmutablePrefillBatch(target)
            result, _ = self._run(session, lambda: execution.prefill(prompt), None, prompt)
        else:
            everybody = ImmutableDecodeBatch(tuple(execution.residents()))
            result, _ = self._run(session, lambda: execution.decode(everybody), None, everybody)
        self._commit(session, result, None)

    def _run(
        self,
        session: Session,
        operation: Callable[[], StepResult],
        before: PlannerSnapshot | None,
        batch: AnyBatch,
    ) -> tuple[StepResult, float]:
        """Run one step under the watchdog's eyes, and write it down if somebody wants it."""
        result: StepResult | None = None
        began = self._shared.began(self._clock())
        try:
            result = operation()
            seconds = self._clock() - began
        finally:
            self._shared.busy_since = None
            if (recorder := self._admission.recorder) is not None:
                recorder.step(began, self._clock(), before, batch, result)
        if self.steps.watched:
            number, queued = self._counters.steps + 1, len(self._waiting)
            self.steps.add(
                summary(number, began, seconds, session.seats, before, batch, result, queued)
            )
        return result, seconds

    def _commit(
        self, session: Session, result: StepResult, batch: ImmutableStepBatch | None
    ) -> None:
        if self._shared.failure is not None:
            return  # the watchdog was faster, and everyone has an outcome
        self._counters.steps += 1
        commit = session.seats.commit(result, session.execution, batch)
        publish(commit, self._counters, self._waiting if self._admission.fair else None)
        for finished in commit.finished:
            self._waiting.left(finished.sequence)
        for sequence, _ in commit.preempted:
            sequence.preemptions += 1
            self._waiting.put_back(sequence)
        if commit.preempted:
            session.preempted.update(sequence for sequence, _ in commit.preempted)
        if not result.ok:
            raise ExecutionError("a step failed")

    # ---- ends ------------------------------------------------------------------------------------

    def _lose(self, session: Session, error: Exception) -> None:
        """The batch is dead: everyone in it, seated or preempted, fails with the reason."""
        logger.warning("a batch was lost: %s", error)
        for sequence in session.seats.clear():
            self._admission.refuse(sequence, error)
        for sequence in session.preempted:
            if sequence.resume is not None:
                self._admission.refuse(sequence, error)
        self._end_stopped_waiters()
        session.lost = True

    def _conclude(self, session: Session) -> None:
        """Close the batch if nobody is left in it and nobody will come back to it."""
        if self._shared.failure is not None:
            self._leave()
            return
        if session.preempted:
            session.preempted = {
                one
                for one in session.preempted
                if one.resume is not None and one.record.live and not one.record.stopped
            }
        if len(session.seats) or session.preempted:
            return
        try:
            if session.lost:
                session.execution.abort()
            else:
                session.execution.finish()
        except ExecutionLostError as error:
            fail_engine(self._shared, error)
        except Exception:
            # Every outcome is out already; nobody is left to tell.
            logger.exception("finishing a batch failed")
        finally:
            # Only now is the engine idle: whoever looks then finds the runtime as it stays.
            self._session = None

    def _leave(self) -> None:
        """The actor's last act: whatever is left ends, and the runtime is let go."""
        if self._done:
            return
        self._done = True
        shared = self._shared
        # Whoever was accepted is in one of these places. The registry also knows a request whose
        # submit is being refused at this moment, and that one never was.
        left = {sequence.record for sequence in self._waiting.clear()}
        session, self._session = self._session, None
        if session is not None:
            left |= {sequence.record for sequence in session.seats.clear()}
            session.execution.abort()
        while (record := shared.pop()) is not None:
            left.add(record)
        unfinished = sum(record.live for record in left)
        if unfinished and shared.failure is None:
            logger.warning("%d requests were still under way", unfinished)
        for record in left:
            terminate(record, record.cancelled_outcome())
        self._deadlines.stop()
        if (recorder := self._admission.recorder) is not None:
            recorder.close()
        self._admission.let_go()
        close, self._close = self._close, None
        if close is not None:
            close()


def abandon(
    shared: EngineChannel, actor: Actor, deadlines: Deadlines, thread: threading.Thread | None
) -> None:
    """What becomes of an engine that nobody shut down.

    The collector may call this on any thread and in the midst of anything, so no lock is taken that
    might be held, and the wait is short: should this thread hold what the actor needs, the actor
    ends after it.
    """
    shared.slam()
    if shared.stop is None:
        shared.stop = ShutdownMode.CANCEL
    shared.bell.ring()
    deadlines.stop()
    if thread is None:
        while actor.tick():
            pass
    elif thread is not threading.current_thread():
        thread.join(FINALIZER_PATIENCE)
