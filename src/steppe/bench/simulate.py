"""A trace on an engine whose steps only cost time: what clients would see, without a model.

The engine is the real one, with its planner, its admission and its page accounting; only the
execution is scripted and the clock virtual, so an hour takes seconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from steppe.bench.cost import StepWork
from steppe.bench.stats import Sample
from steppe.engine.config import EngineConfig
from steppe.engine.request_engine import RequestEngine
from steppe.errors import ConfigError, InvalidRequestError, SubmitError
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.stepping.script import FakeClock, Script
from steppe.stepping.simulated import ScriptedRuntime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from steppe.bench.cost import CostModel
    from steppe.bench.schedule import Arrival
    from steppe.engine.handle import RequestHandle
    from steppe.stepping.script import ScriptedResident

__all__ = ["Deployment", "Occupancy", "Simulated", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """How an engine is set up. ``pages`` of ``page_size`` tokens each; None is memory without end.
    ``max_step_tokens`` None lets the engine choose, as a real one does.
    """

    max_batch_size: int = 32
    max_step_tokens: int | None = None
    max_pending: int = 256
    max_pending_tokens: int | None = None
    scheduling: Literal["fcfs", "fair"] = "fcfs"
    context: int = 4096
    page_size: int = 64
    pages: int | None = None

    @classmethod
    def of(
        cls,
        header: Mapping[str, object],
        *,
        max_batch_size: int | None = None,
        max_step_tokens: int | Literal["auto"] | None = None,
        max_pending: int | None = None,
        scheduling: Literal["fcfs", "fair"] | None = None,
        kv_memory: int | None = None,
    ) -> Deployment:
        """That of a recording's header, but for what is given. ``kv_memory`` in bytes.

        Raises ConfigError for a recording that does not say what is needed, and for memory that
        holds no page.
        """

        def said(name: str) -> int:
            value = header.get(name)
            if not isinstance(value, int):
                raise ConfigError(name, "the recording does not say it: record with LLM.record")
            return value

        pages = said("pages")
        if kv_memory is not None:
            pages = kv_memory // said("page_bytes")
            if pages < 1:
                raise ConfigError("kv_memory", f"{kv_memory} bytes hold no page")
        # Absent from recordings of engines that did not know it.
        pending_tokens = header.get("max_pending_tokens")
        step_tokens = header.get("max_step_tokens")
        if max_step_tokens is not None:
            step_tokens = None if max_step_tokens == "auto" else max_step_tokens
        return cls(
            max_batch_size=max_batch_size or said("max_batch_size"),
            max_step_tokens=step_tokens if isinstance(step_tokens, int) else None,
            max_pending=max_pending or said("max_pending"),
            max_pending_tokens=pending_tokens if isinstance(pending_tokens, int) else None,
            scheduling=scheduling or ("fair" if header.get("scheduling") == "fair" else "fcfs"),
            context=said("context_length"),
            page_size=said("page_size"),
            pages=pages,
        )


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full an engine was. ``busy`` is the share of the run's time in which steps ran; the means
    are over that time, the pages' share among all pages (0 of memory without end).
    """

    steps: int
    busy: float
    mean_batch: float
    most_batch: int
    mean_pages: float
    most_pages: float
    most_step_tokens: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """What became of each arrival, in order, and of the engine."""

    samples: tuple[Sample, ...]
    occupancy: Occupancy


def simulate(
    arrivals: Sequence[Arrival], model: CostModel, deployment: Deployment, seed: int = 0
) -> Simulated:
    """Run a trace in virtual time. The same arguments give the same result.

    A request that the engine refuses is a sample with its error, as ``steppe bench`` counts them.
    """
    return _Simulation(model, deployment, seed).run(arrivals)


def _any_token(request_id: int, position: int) -> int:
    return 0


class _Waiting:
    """One request under way."""

    __slots__ = ("arrival", "chunks", "handle", "tokens")

    def __init__(self, arrival: Arrival, handle: RequestHandle) -> None:
        self.arrival = arrival
        self.handle = handle
        self.chunks: list[float] = []
        self.tokens = 0


class _Simulation:
    """An engine driven by hand, and the meter of what it does."""

    def __init__(self, model: CostModel, deployment: Deployment, seed: int) -> None:
        self._clock = FakeClock()
        self._meter = _Meter(model, self._clock, random.Random(f"spread {seed}"))
        self._runtime = ScriptedRuntime(
            Script(
                capacity=deployment.max_batch_size,
                context=deployment.context,
                page_size=deployment.page_size,
                pages=deployment.pages,
                tokens=_any_token,
                cost=self._meter,
            ),
            keep_log=False,
        )
        self._meter.runtime = self._runtime
        self._engine = RequestEngine.from_factory(
            self._runtime.begin_stepped,
            EngineConfig(
                command_queue_capacity=max(64, deployment.max_pending),
                max_pending_requests=deployment.max_pending,
                max_pending_tokens=deployment.max_pending_tokens,
                max_batch_size=deployment.max_batch_size,
                max_step_tokens=deployment.max_step_tokens,
                scheduling=deployment.scheduling,
                clock=self._clock,
            ),
            manual=True,
        )
        self._under_way: list[_Waiting] = []
        self._samples: dict[int, Sample] = {}

    def run(self, arrivals: Sequence[Arrival]) -> Simulated:
        engine, clock, meter = self._engine, self._clock, self._meter
        coming = sorted(arrivals, key=lambda one: one.at)
        next_one = 0
        while next_one < len(coming) or self._under_way:
            while next_one < len(coming) and coming[next_one].at <= clock():
                self._submit(coming[next_one])
                next_one += 1
            steps = meter.steps
            if not engine.tick():
                if next_one < len(coming):
                    clock.advance(max(0.0, coming[next_one].at - clock()))
                continue
            self._read()
            if meter.steps > steps and engine.resident:
                clock.advance(meter.model.gap_seconds(engine.resident))
        seconds = clock() - coming[0].at if coming else 0.0
        engine.shutdown()
        samples = tuple(self._samples[one.index] for one in arrivals)
        return Simulated(samples, meter.occupancy(seconds))

    def _submit(self, arrival: Arrival) -> None:
        request = LLMGenerationRequest(
            [0] * arrival.prompt_tokens,
            params=SamplingParams(temperature=0, max_tokens=arrival.output_tokens, ignore_eos=True),
        )
        try:
            self._runtime.validate(request)
            handle = self._engine.submit(request)
        except SubmitError as error:
            self._end(arrival, f"refused_{error.reason}")
        except InvalidRequestError:
            self._end(arrival, "invalid_request")
        else:
            self._under_way.append(_Waiting(arrival, handle))

    def _read(self) -> None:
        """Take what came, as clients that are never slow."""
        now = self._clock()
        ended = False
        for one in self._under_way:
            stream = one.handle.stream
            while (chunk := stream.try_pop()) is not None:
                if chunk.token_ids:
                    one.chunks.append(now)
                    one.tokens += len(chunk.token_ids)
                ended |= chunk.finished
        if ended:
            for one in self._under_way:
                if one.handle.ready:
                    # An outcome other than an answer would be a fault of the simulation: raise it.
                    one.handle.get()
                    self._end(one.arrival, None, one)
            self._under_way = [one for one in self._under_way if not one.handle.ready]

    def _end(self, arrival: Arrival, error: str | None, one: _Waiting | None = None) -> None:
        # A client sends when it is due; the engine looks between two steps.
        self._samples[arrival.index] = Sample(
            arrival.index,
            arrival.at,
            arrival.at,
            self._clock(),
            tuple(one.chunks) if one else (),
            one.tokens if one else 0,
            arrival.prompt_tokens if one else 0,
            error,
        )


class _Meter:
    """Makes steps take their time, and adds up how full they were. A ``StepCost``."""

    def __init__(self, model: CostModel, clock: FakeClock, source: random.Random) -> None:
        self.model = model
        self.runtime: ScriptedRuntime | None = None
        self.steps = 0
        self._clock = clock
        self._source = source
        self._busy = 0.0
        self._batch = 0.0
        self._pages = 0.0
        self._most = [0, 0, 0]

    def charge_admission(self, prompt_tokens: int) -> None:
        self._clock.advance(self.model.admission)

    def charge_step(
        self,
        rows: Sequence[tuple[ScriptedResident, int]],
        chunks: Sequence[tuple[ScriptedResident, int]],
    ) -> None:
        work = StepWork.of(
            [(tokens, one.computed) for one, tokens in rows],
            [(tokens, one.computed, tokens == one.to_prefill) for one, tokens in chunks],
        )
        seconds = self.model.step_seconds(work) * self._source.choice(self.model.spread)
        self._clock.advance(seconds)
        assert self.runtime is not None
        pages = self.runtime.total_pages - self.runtime.free_pages
        batch = len(rows) + len(chunks)
        self.steps += 1
        self._busy += seconds
        self._batch += batch * seconds
        self._pages += pages * seconds
        self._most = list(map(max, self._most, (batch, pages, work.tokens)))

    def occupancy(self, seconds: float) -> Occupancy:
        """So far, in a run of so many seconds."""
        assert self.runtime is not None
        busy, all_pages = self._busy or 1.0, self.runtime.total_pages
        batch, pages, tokens = self._most
        return Occupancy(
            self.steps,
            self._busy / seconds if seconds > 0 else 0.0,
            self._batch / busy,
            batch,
            self._pages / busy / all_pages,
            pages / all_pages,
            tokens,
        )
