"""The promises with real threads: storms of submits and cancels, slow readers, sudden ends."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from steppe.engine import EngineConfig, RequestEngine, RequestHandle, ShutdownMode
from steppe.errors import RequestCancelledError, RequestFailedError, SubmitError
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.testing import Script, ScriptedRuntime, assert_idle_clean, scripted_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 30


@pytest.fixture(autouse=True)
def eager_threads() -> Iterator[None]:
    """Threads that take turns far more often than they usually do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def ask(rng: random.Random) -> LLMGenerationRequest:
    params = SamplingParams(max_tokens=rng.randint(1, 6), n=rng.choice((1, 1, 1, 2)))
    return LLMGenerationRequest([1] * rng.randint(1, 4), params=params)


def outcome(handle: RequestHandle) -> str:
    """How it ended, with its tokens checked."""
    try:
        response = handle.get(PATIENCE)
    except RequestCancelledError:
        return "cancelled"
    except RequestFailedError:
        return "failed"
    for output in response.outputs:
        one = handle.id + output.index
        assert output.token_ids == tuple(
            scripted_token(one, at) for at in range(len(output.token_ids))
        )
    return "completed"


def together(count: int, work: Callable[[int], None]) -> None:
    """Run ``work(index)`` on that many threads at once; whatever one raises is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def guarded(index: int) -> None:
        start.wait()
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def storm(seed: int, *, submitters: int, each: int, end: ShutdownMode | None) -> None:
    """Many threads submit, cancel and read; maybe somebody shuts down in the middle."""
    rng = random.Random(seed)
    runtime = ScriptedRuntime(
        Script(
            mixed=rng.random() < 0.7,
            capacity=rng.randint(1, 8),
            fail_steps={rng.randint(1, 60): RuntimeError("scripted")},
        ),
        keep_log=False,
    )
    engine = RequestEngine(
        runtime,
        EngineConfig(
            max_batch_size=runtime.script.capacity,
            max_pending_requests=rng.choice((16, 256)),
            command_queue_capacity=rng.choice((2, 64)),
        ),
    )
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()
    accepted: list[RequestHandle] = []

    def work(index: int) -> None:
        mine = random.Random(f"{seed}-{index}")
        if end is not None and index == 0:
            for _ in range(mine.randint(0, 50)):
                engine.health()
            engine.shutdown(end)
            return
        for _ in range(each):
            try:
                handle = engine.submit(ask(mine))
            except SubmitError:
                continue
            how = mine.random()
            if how < 0.2:
                handle.cancel()
            elif how < 0.3:
                engine.cancel(handle.id)
            elif how < 0.4:
                handle.stream.cancel()
            elif how < 0.6:
                handle.stream.consume(lambda chunk: None)
            with lock:
                accepted.append(handle)
            if how < 0.8:
                ended = outcome(handle)
                with lock:
                    outcomes[ended] += 1
                    accepted.remove(handle)

    together(submitters, work)
    for handle in accepted:
        outcomes[outcome(handle)] += 1
    assert_idle_clean(engine)
    engine.shutdown()
    metrics = engine.metrics()
    assert metrics.submitted == sum(outcomes.values())
    for name in ("completed", "failed", "cancelled"):
        assert getattr(metrics, name) == outcomes[name]


def test_sixty_four_submitters_and_cancel_storms(seed: int) -> None:
    storm(seed, submitters=64, each=8, end=None)


@pytest.mark.parametrize("mode", list(ShutdownMode))
def test_shutdown_in_the_middle(seed: int, mode: ShutdownMode) -> None:
    for repetition in range(10):
        storm(seed + repetition, submitters=8, each=10, end=mode)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", [None, *ShutdownMode])
def test_two_hundred_storms(seed: int, mode: ShutdownMode | None) -> None:
    for repetition in range(200):
        storm(seed + repetition, submitters=64, each=4, end=mode)


def test_closing_admission_is_atomic(seed: int) -> None:
    """Submits racing a shutdown are refused or served: 200 rounds, none stranded or lost."""
    for repetition in range(200):
        engine = RequestEngine(ScriptedRuntime(Script(capacity=4), keep_log=False))
        handles: list[RequestHandle] = []

        def work(
            index: int,
            engine: RequestEngine = engine,
            handles: list[RequestHandle] = handles,
            repetition: int = repetition,
        ) -> None:
            if index == 0:
                engine.shutdown(ShutdownMode.DRAIN)
                return
            rng = random.Random(seed + repetition)
            try:
                while True:
                    handles.append(engine.submit(ask(rng)))
            except SubmitError:
                return

        together(3, work)
        assert [outcome(handle) for handle in handles] == ["completed"] * len(handles)


def test_ids_do_not_repeat_under_contention() -> None:
    engine = RequestEngine(
        ScriptedRuntime(keep_log=False),
        EngineConfig(command_queue_capacity=1024, max_pending_requests=1024),
    )
    ids: list[int] = []
    together(
        8,
        lambda _: ids.extend(engine.submit(ask(random.Random(number))).id for number in range(25)),
    )
    assert len(set(ids)) == len(ids) == 200
    engine.shutdown()
    assert engine.metrics().completed == 200
    assert_idle_clean(engine)


def test_coroutines_await_iterate_and_leave_early() -> None:
    """A few hundred coroutines on one loop, over one engine with its own thread."""

    async def caller(engine: RequestEngine, number: int) -> str:
        handle = engine.submit(
            LLMGenerationRequest([1, 2], params=SamplingParams(max_tokens=5 if number % 4 else 500))
        )
        if number % 4 == 0:
            async for chunk in handle:
                if chunk.token_ids:
                    break
            # Leaving the loop cancels, though the generator is closed a moment later.
            try:
                await handle
            except RequestCancelledError:
                return "cancelled"
            return "completed"
        if number % 4 == 1:
            ids: tuple[int, ...] = ()
            async for chunk in handle:
                ids += chunk.token_ids
            assert ids == (await handle).token_ids
        else:
            assert len((await handle).token_ids) == 5
        return "completed"

    async def everyone(engine: RequestEngine) -> Counter[str]:
        return Counter(await asyncio.gather(*(caller(engine, number) for number in range(200))))

    runtime = ScriptedRuntime(Script(capacity=8), keep_log=False)
    config = EngineConfig(max_batch_size=8, command_queue_capacity=256)
    with RequestEngine(runtime, config) as engine:
        ends = asyncio.run(everyone(engine))
        assert_idle_clean(engine)
    assert ends["completed"] >= 150
    assert engine.metrics().cancelled == ends["cancelled"]


def test_a_cancelled_task_cancels_its_request() -> None:
    async def main(engine: RequestEngine) -> RequestHandle:
        handle = engine.submit(LLMGenerationRequest([1], params=SamplingParams(max_tokens=1 << 39)))

        async def read() -> None:
            async for _ in handle:
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RequestCancelledError):
            await handle
        return handle

    runtime = ScriptedRuntime(Script(context=1 << 40), keep_log=False)
    with RequestEngine(runtime) as engine:
        asyncio.run(main(engine))
        assert_idle_clean(engine)
        assert engine.metrics().cancelled == 1
