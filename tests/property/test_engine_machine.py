"""Random interleavings of everything a caller can do and everything that can go wrong.

The machine drives manual engines over scripted executions and keeps its own book of what must come
of every request. At rest: one outcome each, nothing held, no order broken, no token changed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from steppe.engine import EngineConfig, RequestEngine, RequestHandle, ShutdownMode
from steppe.errors import (
    DeadlineExceededError,
    RequestCancelledError,
    RequestFailedError,
    SubmitError,
)
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.stepping.types import AdmissionResult, AdmissionStatus
from steppe.testing import (
    FakeClock,
    LinearCost,
    Script,
    ScriptedRuntime,
    assert_idle_clean,
    scripted_token,
)

FULL = AdmissionResult(AdmissionStatus.NO_CAPACITY, reason="scripted")
NEVER = AdmissionResult(AdmissionStatus.REJECTED, reason="scripted")


class Book:
    """What the machine knows of one accepted request."""

    def __init__(self, handle: RequestHandle, request: LLMGenerationRequest) -> None:
        self.handle = handle
        self.request = request
        self.ids = {index: [] for index in range(request.params.n)}  # type: ignore[var-annotated]
        self.text = dict.fromkeys(self.ids, "")
        self.ends: list[int] = []
        self.cancelled = False
        self.reads = True


class EngineMachine(RuleBasedStateMachine):
    """One engine's life."""

    fair = False

    @initialize(
        mixed=st.booleans(),
        capacity=st.integers(1, 5),
        pages=st.sampled_from([None, 12, 30]),
        step_tokens=st.sampled_from([None, 1, 7, 64]),
        bursts=st.integers(1, 4),
        overcommit=st.booleans(),
        bad=st.dictionaries(st.integers(1, 80), st.booleans(), max_size=3),
        queue=st.sampled_from([2, 8, 64]),
        waiting_tokens=st.sampled_from([None, 1, 30]),
    )
    def build(
        self,
        mixed: bool,
        capacity: int,
        pages: int | None,
        step_tokens: int | None,
        bursts: int,
        overcommit: bool,
        bad: dict[int, bool],
        queue: int,
        waiting_tokens: int | None,
    ) -> None:
        self.clock = FakeClock()
        self.refuse: dict[int, AdmissionResult] = {}
        self.doomed: dict[int, int] = {}
        self.no_founder: set[int] = set()
        self.runtime = ScriptedRuntime(
            Script(
                mixed=mixed,
                capacity=capacity,
                context=120,
                page_size=4,
                # Without preemption a burst has no pages of its own to grow into.
                pages=pages if mixed else None,
                overcommit=overcommit and mixed,
                burst=lambda one, turn: (one * 7 + turn) % (bursts + 1),
                refuse=self._refuse,
                found=lambda one: one not in self.no_founder,
                fail_requests=self.doomed,
                fail_steps={step: RuntimeError("scripted") for step, kind in bad.items() if kind},
                bad_steps=frozenset(step for step, kind in bad.items() if not kind),
                cost=LinearCost(self.clock, per_step=0.01),
            )
        )
        self.engine = RequestEngine.from_factory(
            self.runtime.begin_stepped,
            EngineConfig(
                max_batch_size=capacity,
                max_pending_requests=24,
                max_pending_tokens=waiting_tokens,
                command_queue_capacity=queue,
                max_step_tokens=step_tokens,
                scheduling="fair" if self.fair else "fcfs",
                max_head_skips=2,
                clock=self.clock,
            ),
            manual=True,
        )
        self.pages = pages if mixed else None
        self.waiting_tokens = waiting_tokens
        self.books: list[Book] = []
        self.over = False

    def _refuse(self, request_id: int, attempt: int) -> AdmissionResult | None:
        answer = self.refuse.get(request_id)
        if answer is FULL and attempt > 3:
            return None
        return answer

    # ---- what callers do ---------------------------------------------------------------------

    @rule(
        prompt=st.integers(1, 20),
        tokens=st.one_of(st.none(), st.integers(1, 20)),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        limits=st.sampled_from(
            [{}, {}, {}, {"timeout": 0.05}, {"queue_timeout": 0.02}, {"first_token_timeout": 0.03}]
        ),
        caller=st.sampled_from(["a", "b"]),
        priority=st.integers(-2, 2),
        reads=st.booleans(),
        fate=st.sampled_from(["", "", "", "", "full", "rejected", "doomed", "no founder"]),
        task=st.sampled_from(["generate"] * 5 + ["embed"]),
    )
    def submit(
        self,
        prompt: int,
        tokens: int | None,
        n: int,
        limits: dict[str, Any],
        caller: str,
        priority: int,
        reads: bool,
        fate: str,
        task: Any,
    ) -> None:
        params = SamplingParams(max_tokens=tokens, n=1 if task == "embed" else n)
        if self.pages is not None and prompt + (tokens or 1) > self.pages * 4:
            return  # what never fits is refused before it gets here
        request = LLMGenerationRequest(
            list(range(1, prompt + 1)),
            params=params,
            caller=caller,
            priority=priority,
            task=task,
            **limits,
        )
        before = self.engine.metrics()
        try:
            handle = self.engine.submit(request)
        except SubmitError:
            assert self.engine.metrics().refused == before.refused + 1
            assert self.engine.metrics().submitted == before.submitted
            return
        assert not self.over
        if fate == "full":
            self.refuse[handle.id] = FULL
        elif fate == "rejected":
            self.refuse[handle.id] = NEVER
        elif fate == "doomed":
            self.doomed[handle.id] = prompt % 3
        elif fate == "no founder":
            self.no_founder.add(handle.id)
        book = Book(handle, request)
        book.reads = reads
        self.books.append(book)

    @precondition(lambda self: self.books)
    @rule(which=st.integers(0, 1000), how=st.sampled_from(["handle", "id", "channel"]))
    def cancel(self, which: int, how: str) -> None:
        book = self.books[which % len(self.books)]
        if not book.handle.ready:
            book.cancelled = True
        if how == "handle":
            book.handle.cancel()
        elif how == "id":
            self.engine.cancel(book.handle.id)
        else:
            book.handle.stream.cancel()

    @rule()
    def consume(self) -> None:
        for book in self.books:
            if book.reads:
                self._read(book)

    @rule(seconds=st.sampled_from([0.01, 0.05, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(count=st.integers(1, 6))
    def tick(self, count: int) -> None:
        for _ in range(count):
            self.engine.tick()

    @precondition(lambda self: len(self.books) > 12 and not self.over)
    @rule(mode=st.sampled_from(list(ShutdownMode)))
    def shutdown(self, mode: ShutdownMode) -> None:
        self.engine.shutdown(mode)
        self.over = True

    # ---- what must hold ----------------------------------------------------------------------

    @invariant()
    def the_backlog_is_bounded(self) -> None:
        if not hasattr(self, "engine"):
            return
        shared = self.engine._shared
        live = sum(book.request.params.n for book in self.books if not book.handle.ready)
        assert shared.pending == live <= 24
        unread = [
            len(book.request.prompt or ()) * book.request.params.n
            for book in self.books
            if not book.handle.ready and not book.handle._record.first_token
        ]
        assert shared.pending_tokens == sum(unread)
        if self.waiting_tokens is not None:
            # One that came when nobody waited may have any length.
            assert shared.pending_tokens <= max(self.waiting_tokens, *unread, 0)
        assert self.engine.resident <= self.runtime.script.capacity

    def _read(self, book: Book) -> None:
        while (chunk := book.handle.stream.try_pop()) is not None:
            assert chunk.index not in book.ends
            book.ids[chunk.index] += chunk.token_ids
            book.text[chunk.index] += chunk.text
            if chunk.finished:
                book.ends.append(chunk.index)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.tick():
                break
        else:
            raise AssertionError("the engine never came to rest")
        assert_idle_clean(self.engine)
        outcomes = {"completed": 0, "cancelled": 0, "failed": 0}
        for book in self.books:
            outcomes[self._settle(book)] += 1
        metrics = self.engine.metrics()
        assert metrics.submitted == len(self.books)
        for name, count in outcomes.items():
            assert getattr(metrics, name) == count
        self._check_order()
        self.engine.shutdown()

    def _settle(self, book: Book) -> str:
        handle = book.handle
        assert handle.ready
        self._read(book)
        assert handle.stream.finished
        assert sorted(book.ends) == list(range(book.request.params.n)), "each sequence ends once"
        for index, ids in book.ids.items():
            assert ids == [scripted_token(handle.id + index, at) for at in range(len(ids))]
        try:
            response = handle.get()
        except RequestCancelledError:
            assert book.cancelled or self.over
            return "cancelled"
        except DeadlineExceededError:
            assert not book.cancelled
            return "failed"
        except RequestFailedError:
            assert not book.cancelled
            return "failed"
        assert not book.cancelled, "a cancel that came first wins"
        for output in response.outputs:
            assert tuple(book.ids[output.index]) == output.token_ids
            assert book.text[output.index] == output.text
        return "completed"

    def _check_order(self) -> None:
        if self.fair:
            return
        seated = [line[1] for line in self.runtime.log if line[0] in ("found", "admit")]
        assert seated == sorted(seated), "nobody overtakes"  # type: ignore[type-var]


class FairMachine(EngineMachine):
    """The same, in fair order."""

    fair = True


@pytest.mark.parametrize("machine", [EngineMachine, FairMachine])
def test_random_lives(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [EngineMachine, FairMachine])
def test_many_long_random_lives(machine: type[EngineMachine]) -> None:
    count = int(os.environ.get("STEPPE_EXAMPLES", "300"))
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=count, stateful_step_count=150, deadline=None)
    )
