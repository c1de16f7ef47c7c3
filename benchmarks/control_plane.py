"""What the control plane costs: the engine over a simulated execution whose steps are free.

    python benchmarks/control_plane.py [--steps N] [--repeats N]

Prints one table. A step here is all that the engine does: draining the queue, planning, commit and
delivery, over an execution whose answers are made beforehand. ``slope`` is what one more resident
adds, between the smallest and the largest batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

from steppe.engine import EngineConfig, RequestEngine, ShutdownMode
from steppe.errors import ExecutionError
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.stepping.execution import SteppedExecution
from steppe.stepping.types import (
    AdmissionResult,
    AdmissionStatus,
    BatchResult,
    ExecutionSnapshot,
    ResidentNeed,
    ResidentRef,
    SequenceWork,
    StepResult,
    TokenDelta,
)
from steppe.testing import Script, ScriptedRuntime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.request import LLMGenerationResponse
    from steppe.stepping.types import (
        ImmutableDecodeBatch,
        ImmutablePrefillBatch,
        ImmutableStepBatch,
        SlotSeed,
    )

BATCHES = (1, 32, 256)


class Free(SteppedExecution):
    """An execution that costs nothing: everybody gains the same token, made beforehand."""

    mixed_steps = True

    def __init__(self) -> None:
        self.refs: list[ResidentRef] = []
        self._known: ExecutionSnapshot | None = None
        self._result = StepResult(ok=True)

    def begin(self, request: LLMGenerationRequest, request_id: int) -> Free:
        """Serve as the factory of its only batch."""
        self.admit(request, 0, request_id)
        return self

    def residents(self) -> list[ResidentRef]:
        return self.refs

    def admit(
        self,
        request: LLMGenerationRequest,
        original_index: int,
        request_id: int,
        *,
        resume: SlotSeed | None = None,
    ) -> AdmissionResult:
        self.refs.append(ResidentRef(len(self.refs), 1))
        self._known = ExecutionSnapshot(
            16, 1 << 30, tuple(ResidentNeed(ref, 0, 1, 1 << 30) for ref in self.refs)
        )
        delta = TokenDelta((1,), "x")
        self._result = StepResult(
            ok=True, work=SequenceWork.DECODE, deltas=tuple((ref, delta) for ref in self.refs)
        )
        return AdmissionResult(AdmissionStatus.ADMITTED, self.refs[-1])

    def snapshot(self) -> ExecutionSnapshot | None:
        return self._known

    def step(self, batch: ImmutableStepBatch) -> StepResult:
        if batch.retire:
            gone = {ref for ref, _ in batch.retire}
            self.refs = [ref for ref in self.refs if ref not in gone]
            return StepResult(
                ok=True,
                finished=tuple(
                    (ref, BatchResult(ref.slot + 1, ref.slot, (), "", reason))
                    for ref, reason in batch.retire
                ),
            )
        return self._result

    def prefill(self, batch: ImmutablePrefillBatch) -> StepResult:
        return self._result

    def decode(self, batch: ImmutableDecodeBatch) -> StepResult:
        return self._result

    def materialize(
        self, result: BatchResult, stop_strings: Sequence[str]
    ) -> LLMGenerationResponse:
        raise ExecutionError("nobody ever finishes")

    def finish(self) -> None: ...

    def abort(self) -> None: ...


def step_seconds(residents: int, steps: int, *, readers: bool) -> float:
    """Seconds of one step at so many residents, whose readers keep up or do not read at all."""
    config = EngineConfig(
        max_batch_size=residents,
        max_pending_requests=max(256, residents),
        command_queue_capacity=max(64, residents),
        max_step_tokens=8192,
    )
    engine = RequestEngine.from_factory(Free().begin, config, manual=True)
    handles = [engine.submit(LLMGenerationRequest([1])) for _ in range(residents)]
    while engine.resident < residents:
        engine.tick()
    streams = [handle.stream for handle in handles]
    took = 0.0
    for _ in range(steps):
        began = time.perf_counter()
        engine.tick()
        took += time.perf_counter() - began
        if readers:
            for stream in streams:
                stream.try_pop()
    engine.shutdown(ShutdownMode.CANCEL)
    return took / steps


def submit_seconds(count: int) -> float:
    """Seconds of one ``submit``, on the caller's side, with the engine's thread parked."""
    runtime = ScriptedRuntime(Script(capacity=1), keep_log=False)
    config = EngineConfig(command_queue_capacity=count, max_pending_requests=count)
    engine = RequestEngine.from_factory(runtime.begin_stepped, config, manual=True)
    request = LLMGenerationRequest([1], params=SamplingParams(max_tokens=1))
    began = time.perf_counter()
    for _ in range(count):
        engine.submit(request)
    took = (time.perf_counter() - began) / count
    engine.shutdown(ShutdownMode.CANCEL)
    return took


def round_trip_seconds(count: int) -> float:
    """Seconds from ``submit`` to ``get()`` of a one-token request on an idle engine."""
    runtime = ScriptedRuntime(Script(capacity=1), keep_log=False)
    with RequestEngine(runtime) as engine:
        request = LLMGenerationRequest([1], params=SamplingParams(max_tokens=1))
        began = time.perf_counter()
        for _ in range(count):
            engine.submit(request).get()
        return (time.perf_counter() - began) / count


def idle_seconds(seconds: float) -> float:
    """Processor seconds that an idle engine takes per second."""
    runtime = ScriptedRuntime(Script(capacity=1), keep_log=False)
    with RequestEngine(runtime) as engine:
        engine.submit(LLMGenerationRequest([1], params=SamplingParams(max_tokens=1))).get()
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="steps per measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements; the median is shown")
    parser.add_argument("--idle", type=float, default=2.0, help="seconds of idleness to watch")
    options = parser.parse_args()

    print("           readers keep up          nobody reads")
    print("residents  us/step  us/resident  us/step  us/resident")
    steps: dict[int, list[float]] = {}
    for residents in BATCHES:
        steps[residents] = [
            1e6
            * statistics.median(
                step_seconds(residents, options.steps, readers=readers)
                for _ in range(options.repeats)
            )
            for readers in (True, False)
        ]
        cells = [f"{one:9.1f}{one / residents:13.2f}" for one in steps[residents]]
        print(f"{residents:9}{''.join(cells)}")
    least, most = BATCHES[0], BATCHES[-1]
    slope = max(
        (high - low) / (most - least) for low, high in zip(steps[least], steps[most], strict=True)
    )
    print(f"\nper resident (slope)      {slope:10.2f} us   (goal: at most 3)")
    submit = statistics.median(submit_seconds(4096) for _ in range(options.repeats))
    print(f"submit                    {submit * 1e6:10.2f} us   ({1 / submit:,.0f} per second)")
    trip = statistics.median(round_trip_seconds(300) for _ in range(options.repeats))
    print(f"submit to get, idle       {trip * 1e6:10.1f} us")
    idle = idle_seconds(options.idle)
    print(
        f"idle                      {idle * 1e3:10.2f} ms of processor a second   (goal: under 10)"
    )


if __name__ == "__main__":
    main()
