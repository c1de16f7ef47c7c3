"""What Python costs around a native step: all of an engine's boundary but the C++ inside it.

    python benchmarks/around_steps.py [--model smollm2-135m] [--residents 1 8 32] [--steps 100]

Decodes of so many requests at contexts from 200 tokens on, driven tick by tick, whose readers keep
up. Microseconds a step: the whole tick, less what the program's own clock says of the C++. The
steps are real ones, since the weights that pass through the processor's caches are most of what
Python has to wait for. Medians, least and most of the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from native_kernels import state

from steppe.backends.native import NativeBackend
from steppe.engine import EngineConfig, RequestEngine, ShutdownMode
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.runtime.artifacts import load_artifacts
from steppe.runtime.config import RuntimeConfig
from steppe.runtime.rank_runtime import LLMRankRuntime
from steppe.runtime.stepped.request import SteppedRequest

CONTEXT = 200


def around(
    runtime: LLMRankRuntime, backend: NativeBackend, residents: int, steps: int, repeats: int
) -> list[float]:
    """Seconds outside the C++ of a step, the mean of each repeat."""
    engine = RequestEngine.from_factory(
        lambda request, number: SteppedRequest.begin(runtime, request, number),
        EngineConfig(max_batch_size=residents, max_pending_requests=max(256, residents)),
        manual=True,
    )
    rng = np.random.default_rng(0)
    tokens = (repeats + 1) * steps + 2 * residents
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    streams = []
    for index in range(residents):
        prompt = rng.integers(100, 20_000, CONTEXT + 5 * index).tolist()
        streams.append(engine.submit(LLMGenerationRequest(prompt, params=params)).stream)
    while not all(stream.try_pop() for stream in streams):
        engine.tick()
    means = []
    for _ in range(repeats):
        took = 0.0
        with backend.timing() as timing:
            for _ in range(steps):
                began = time.perf_counter()
                engine.tick()
                took += time.perf_counter() - began
                for stream in streams:
                    stream.try_pop()
        means.append((took - timing.wall) / steps)
    engine.shutdown(ShutdownMode.CANCEL)
    return means


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--residents", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    backend = NativeBackend(threads=args.threads)
    config = RuntimeConfig(max_batch_size=max(args.residents), kv_memory=1 << 30)
    runtime = LLMRankRuntime(artifacts=load_artifacts(args.model), backend=backend, config=config)
    state(backend.isa, backend.threads)
    print("residents  us/step    least     most")
    for residents in args.residents:
        means = around(runtime, backend, residents, args.steps, args.repeats)
        cells = (statistics.median(means), min(means), max(means))
        print(f"{residents:9}" + "".join(f"{1e6 * one:9.0f}" for one in cells))
    state(backend.isa, backend.threads)


if __name__ == "__main__":
    main()
