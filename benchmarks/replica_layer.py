"""What the replica layer costs, and how its policies place requests over a large fleet.

    python benchmarks/replica_layer.py [--only layer|engine|fleet] [--repeats N]

``layer``: an engine that answers at once, read directly and through a replica and a coordinator:
what they add to a request and to each of its chunks. ``engine``: round trips of one-token requests
to a scripted engine with its own thread, in this process and in a child. ``fleet``: 1,000 replicas
of two seats in virtual time, at nine tenths of what they can serve, and 4,000 conversations.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from random import Random
from typing import TYPE_CHECKING, Any

from steppe import EngineConfig, RequestEngine
from steppe.client import LocalClient, ModelCard
from steppe.errors import BackpressureError
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.policies import POLICIES, policy_named
from steppe.replicas.runners.local import LocalRunner
from steppe.replicas.runners.process import ChildSpec, ProcessRunner
from steppe.replicas.runners.scripted import Play, ScriptedRunner
from steppe.replicas.vocabulary import ExecuteBatch, TokenChunk
from steppe.request import FinishReason, LLMGenerationRequest, SamplingParams, Usage
from steppe.testing import Script, ScriptedRuntime, VirtualLoop, virtually
from steppe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence


PROMPT = list(range(1, 65))
CHUNK = TokenChunk(0, " word", (7,))
END = TokenChunk(0, "", (), None, True, FinishReason.LENGTH, None, Usage(64, 256))


class IdsOnly:
    """A text service where there is no text."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: requests here are token ids")


def ask(tokens: int) -> LLMGenerationRequest:
    return LLMGenerationRequest(PROMPT, params=SamplingParams(max_tokens=tokens))


# ---- the layer alone -----------------------------------------------------------------------------


class InstantRunner(ScriptedRunner):
    """Answers at once, a chunk in each turn of the event loop."""

    async def execute(self, batch: ExecuteBatch) -> AsyncGenerator[TokenChunk, None]:
        return self._answer(batch.request.params.max_tokens or 1)

    async def _answer(self, tokens: int) -> AsyncGenerator[TokenChunk, None]:
        for _ in range(tokens):
            yield CHUNK
            await asyncio.sleep(0)
        yield END


async def seconds_each(call: Callable[[], Awaitable[None]], count: int) -> float:
    """Seconds of one call, of ``count`` one after the other."""
    began = time.perf_counter()
    for _ in range(count):
        await call()
    return (time.perf_counter() - began) / count


async def layer(repeats: int) -> None:
    runner = InstantRunner()
    await runner.start()

    def actors() -> list[EngineCoreActor]:
        return [EngineCoreActor(InstantRunner(), text=IdsOnly(), name=str(n)) for n in range(2)]

    actor = actors()[0]
    await actor.start()
    coordinator = DpCoordinator(actors(), text=IdsOnly())
    await coordinator.start()

    async def direct(tokens: int) -> None:
        async for _ in await runner.execute(ExecuteBatch(1, ask(tokens))):
            pass

    async def through(client: EngineCoreActor | DpCoordinator, tokens: int) -> None:
        async for _ in await client.submit(ask(tokens)):
            pass

    ways: dict[str, Callable[[int], Awaitable[None]]] = {
        "the runner, read directly": direct,
        "one replica": lambda tokens: through(actor, tokens),
        "a coordinator over two": lambda tokens: through(coordinator, tokens),
    }
    few, many = 1, 257
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            short = await seconds_each(lambda way=way: way(few), 300)
            long = await seconds_each(lambda way=way: way(many), 12)
            times[name].append((short, (long - short) / (many - few)))
    base: tuple[float, float] | None = None
    print(f"{'layer':28}{'us/request':>12}{'added':>8}{'us/chunk':>10}{'added':>8}")
    for name, found in times.items():
        short = statistics.median(one for one, _ in found) * 1e6
        chunk = statistics.median(one for _, one in found) * 1e6
        base = base or (short, chunk)
        print(f"{name:28}{short:12.0f}{short - base[0]:8.0f}{chunk:10.1f}{chunk - base[1]:8.1f}")
    await actor.drain(0)
    await coordinator.drain(0)


# ---- an engine -----------------------------------------------------------------------------------


def scripted_client() -> LocalClient:
    """A scripted engine with a thread of its own; also what child processes load."""
    import tokenizers

    engine = RequestEngine(
        ScriptedRuntime(Script(capacity=32)),
        EngineConfig(max_batch_size=32, command_queue_capacity=256, max_pending_requests=256),
    )
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    words.decoder = tokenizers.decoders.ByteLevel()
    card = ModelCard("scripted", 4096, 1, 32, 256, False)
    return LocalClient(engine, tokenizer=Tokenizer(words), card=card)


async def engine(repeats: int) -> None:
    local = LocalRunner(scripted_client)
    await local.start()
    here = EngineCoreActor(LocalRunner(scripted_client), text=IdsOnly())
    spec = ChildSpec(factory="benchmarks.replica_layer:scripted_client")
    config = LocalEngineConfig(max_concurrent=128)
    beside = EngineCoreActor(ProcessRunner(spec), config, text=IdsOnly())
    several = DpCoordinator(
        [
            EngineCoreActor(ProcessRunner(spec), config, text=IdsOnly(), name=str(n))
            for n in range(2)
        ],
        text=IdsOnly(),
    )
    ways: dict[str, Any] = {"engine, called directly": local.client}
    for name, client in (
        ("replica in this process", here),
        ("replica in a child", beside),
        ("coordinator, two children", several),
    ):
        await client.start()
        ways[name] = client

    async def one(client: Any) -> None:
        await (await client.submit(ask(1))).result()

    async def crowd(client: Any, each: int) -> None:
        await asyncio.gather(*(seconds_each(lambda: one(client), each) for _ in range(32)))

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, client in ways.items():
            alone = await seconds_each(lambda client=client: one(client), 200)
            rate = 32 * 20 / await seconds_each(lambda client=client: crowd(client, 20), 1)
            times[name].append((alone, rate))
    base = statistics.median(alone for alone, _ in next(iter(times.values()))) * 1e6
    print(f"{'engine':28}{'us/request':>12}{'added':>8}{'requests/s, 32 at once':>25}")
    for name, found in times.items():
        alone = statistics.median(one for one, _ in found) * 1e6
        rate = statistics.median(one for _, one in found)
        print(f"{name:28}{alone:12.0f}{alone - base:8.0f}{rate:25.0f}")
    await local.close()
    for client in (here, beside, several):
        await client.drain(5)


# ---- a fleet -------------------------------------------------------------------------------------

REPLICAS, SEATS, SECONDS, LOAD = 1000, 2, 4.0, 0.9
PLACES, CONVERSATIONS = 8, 4000


def fleet(policy: str) -> None:
    """One policy over the fleet; service times are exponential with a mean of one second."""
    rng = Random(5)
    service: dict[int, float] = {}
    waits: list[float] = []

    def play(batch: ExecuteBatch) -> Play:
        seconds = service.setdefault(batch.request_id, rng.expovariate(1.0))
        return Play(tokens=1, first=seconds)

    async def main(loop: VirtualLoop) -> Sequence[int]:
        actors = [
            EngineCoreActor(
                ScriptedRunner(play, seats=SEATS),
                LocalEngineConfig(max_concurrent=PLACES, probe_interval=5.0),
                text=IdsOnly(),
                name=str(n),
            )
            for n in range(REPLICAS)
        ]
        coordinator = DpCoordinator(
            actors, text=IdsOnly(), policy=policy_named(policy), rng=Random(7)
        )
        await coordinator.start()

        async def one() -> None:
            began = loop.time()
            prompt = [rng.randrange(CONVERSATIONS)] * 64
            params = SamplingParams(max_tokens=1)
            try:
                handle = await coordinator.submit(LLMGenerationRequest(prompt, params=params))
            except BackpressureError:
                return
            await handle.result()
            waits.append(loop.time() - began - service[handle.id])

        async with asyncio.TaskGroup() as group:
            while loop.time() < SECONDS:
                group.create_task(one())
                await asyncio.sleep(rng.expovariate(LOAD * REPLICAS * SEATS))
        await coordinator.drain(None)
        return [actor.account.completed for actor in actors]

    began = time.perf_counter()
    counts = virtually(main)
    real = time.perf_counter() - began
    cuts = statistics.quantiles(waits, n=100)
    print(
        f"{policy:28}{len(waits):10}{len(waits) / real:12.0f}{1e3 * cuts[49]:10.0f}"
        f"{1e3 * cuts[98]:10.0f}{max(counts) / statistics.mean(counts):12.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("layer", "engine", "fleet"))
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.only in (None, "layer"):
        asyncio.run(layer(arguments.repeats))
    if arguments.only in (None, "engine"):
        asyncio.run(engine(arguments.repeats))
    if arguments.only in (None, "fleet"):
        print(
            f"{f'{REPLICAS:,} replicas':28}{'requests':>10}{'placed/s':>12}"
            f"{'wait p50':>10}{'p99, ms':>10}{'most/mean':>12}"
        )
        for policy in POLICIES:
            fleet(policy)


if __name__ == "__main__":
    main()
