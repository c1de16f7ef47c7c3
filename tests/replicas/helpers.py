"""Short words for tests of replicas."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import GetLoad, LocalEngineConfig
from steppe.replicas.runners.scripted import ScriptedRunner
from steppe.replicas.vocabulary import ExecuteBatch, ReplicaState
from steppe.request import LLMGenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from steppe.replicas.runner import ModelRunner
    from steppe.replicas.vocabulary import TokenChunk


def ask(prompt: int = 3, **fields: Any) -> LLMGenerationRequest:
    """A request with a prompt of that many tokens; further fields of its parameters."""
    own = {name: fields.pop(name) for name in ("timeout", "queue_timeout") if name in fields}
    return LLMGenerationRequest(
        list(range(1, prompt + 1)), params=SamplingParams(**{"max_tokens": 4} | fields), **own
    )


def batch(request_id: int = 1, **fields: Any) -> ExecuteBatch:
    """A request as a runner gets it."""
    return ExecuteBatch(request_id, ask(**fields))


async def collect(runner: ModelRunner, one: ExecuteBatch) -> list[TokenChunk]:
    """Every chunk of a request."""
    return [chunk async for chunk in await runner.execute(one)]


async def settle(turns: int = 30) -> None:
    """Let everything that can run now run."""
    for _ in range(turns):
        await asyncio.sleep(0)


class NoText:
    """A text service that nobody may ask."""

    async def encode_chat(self, messages: Any, **how: Any) -> list[int]:
        raise AssertionError("no conversation was expected")

    async def tokenize(self, text: str, **how: Any) -> list[int]:
        return list(text.encode())

    async def detokenize(self, ids: Any, **how: Any) -> str:
        return bytes(ids).decode()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def check_account(actor: EngineCoreActor) -> None:
    """What holds at every instant (spec 8.2)."""
    account = actor.account
    assert account.submitted == account.ended + account.live
    assert 0 <= actor.in_flight <= actor.config.max_concurrent
    assert account.live <= actor.in_flight
    assert 0.0 <= actor.load <= 1.0


def check_idle(actor: EngineCoreActor) -> None:
    """What holds when everything has ended."""
    check_account(actor)
    assert actor.in_flight == actor.account.live == 0
    assert actor.load == 0.0
    runner = actor.runner
    if isinstance(runner, ScriptedRunner):
        assert runner.live == runner.resident == 0


@asynccontextmanager
async def replica(
    runner: ScriptedRunner | None = None, **config: Any
) -> AsyncIterator[tuple[EngineCoreActor, ScriptedRunner]]:
    """A replica that is ready; it must hold nothing in the end."""
    runner = runner or ScriptedRunner()
    actor = EngineCoreActor(runner, LocalEngineConfig(**config), text=NoText())
    await actor.start()
    yield actor, runner
    await settle()
    check_idle(actor)
    await actor.drain(0)
    check_idle(actor)
    assert actor.state is ReplicaState.STOPPED


async def load_of(actor: EngineCoreActor) -> float:
    """Its answer to a poll."""
    reply: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    actor.tell(GetLoad(reply))
    return await reply
