"""A soak: very many requests of random sizes through a tiny pool, on the simulated execution.

    python -m tests.engine.soak [--requests N] [--seed N]

At the end the engine is idle and clean, and every request was counted as one outcome.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from typing import TYPE_CHECKING

from steppe.engine import EngineConfig, RequestEngine
from steppe.errors import RequestCancelledError
from steppe.request import LLMGenerationRequest, SamplingParams
from steppe.testing import Script, ScriptedRuntime, assert_idle_clean, scripted_token

if TYPE_CHECKING:
    from steppe.engine import EngineMetrics, RequestHandle

PAGES, PAGE_SIZE, SEATS = 24, 4, 12


def soak(requests: int, seed: int, *, most_waiting: int = 48) -> EngineMetrics:
    """Serve that many requests, some cancelled on their way; the engine's counters."""
    rng = random.Random(seed)
    script = Script(capacity=SEATS, pages=PAGES, page_size=PAGE_SIZE, overcommit=True)
    runtime = ScriptedRuntime(script, keep_log=False)
    config = EngineConfig(max_batch_size=SEATS, max_step_tokens=40, max_pending_requests=64)
    engine = RequestEngine.from_factory(runtime.begin_stepped, config, manual=True)
    prompt = list(range(1, 41))
    waiting: deque[tuple[RequestHandle, int, bool]] = deque()
    asked = 0
    while asked < requests or waiting:
        while asked < requests and len(waiting) < most_waiting:
            asked += 1
            count = rng.randint(1, 9)
            request = LLMGenerationRequest(
                prompt[: rng.randint(1, 40)], params=SamplingParams(max_tokens=count)
            )
            waiting.append((engine.submit(request), count, rng.random() < 0.02))
        engine.tick()
        if rng.random() < 0.3:
            for handle, _, doomed in waiting:
                if doomed:
                    handle.cancel()
        while waiting and waiting[0][0].ready:
            check(*waiting.popleft())
    while engine.tick():
        pass
    assert_idle_clean(engine)
    metrics = engine.metrics()
    engine.shutdown()
    assert metrics.submitted == requests == metrics.completed + metrics.cancelled
    assert (metrics.failed, metrics.refused) == (0, 0)
    # Whoever gives way has been given something first: no thrashing.
    assert metrics.preemptions <= metrics.tokens
    return metrics


def check(handle: RequestHandle, count: int, doomed: bool) -> None:
    """What one request got is what it gets alone."""
    try:
        response = handle.get(timeout=0)
    except RequestCancelledError:
        assert doomed
        return
    expected = tuple(scripted_token(handle.id, position) for position in range(count))
    assert response.token_ids == expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    arguments = parser.parse_args()
    print(f"{arguments.requests} requests, --seed {arguments.seed}", flush=True)
    began = time.perf_counter()
    metrics = soak(arguments.requests, arguments.seed)
    print(f"idle and clean after {time.perf_counter() - began:.0f} s")
    print(
        f"{metrics.completed} completed, {metrics.cancelled} cancelled, {metrics.steps} steps, "
        f"{metrics.tokens} tokens, {metrics.preemptions} preemptions"
    )


if __name__ == "__main__":
    main()
