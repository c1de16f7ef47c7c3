"""``steppe serve`` with several engines behind it: in processes of their own, in Ray actors, or
behind servers elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from steppe.cli.serve import REPLICA_KEY_VARIABLE, engines, read_system_prompt, startup_line
from steppe.client import LocalText, ModelCard
from steppe.errors import ConfigError
from steppe.replicas.coordinator import DpCoordinator
from steppe.replicas.engine_core import EngineCoreActor
from steppe.replicas.messages import LocalEngineConfig
from steppe.replicas.policies import policy_named
from steppe.replicas.remote.config import RemoteConfig
from steppe.replicas.remote.runner import RemoteRunner
from steppe.replicas.rolling import RollingReplacement
from steppe.replicas.runners.peer import PeerRunner
from steppe.replicas.runners.process import ChildSpec, ProcessRunner
from steppe.replicas.sharing import child_specs, shares
from steppe.replicas.vocabulary import TransportKind
from steppe.runtime.artifacts import load_artifacts
from steppe.text.reasoning.families import reasoning_format
from steppe.text.tools.families import tool_format

if TYPE_CHECKING:
    import argparse
    import socket

    from steppe.replicas.ray import RayRunner
    from steppe.replicas.runner import ModelRunner
    from steppe.runtime.artifacts import ModelArtifacts
    from steppe.server.settings import ServerSettings
    from steppe.text.reasoning.families import ReasoningFormat
    from steppe.text.tools.parser import ToolFormat

__all__ = ["coordinator_of", "serve_replicas", "successor_of"]


def coordinator_of(arguments: argparse.Namespace) -> DpCoordinator:
    """A coordinator over what the command line says, not started yet: child processes or Ray
    actors, and servers elsewhere.

    The text side of the model is loaded here: replicas are only handed token ids. Raises
    ModelError, ConfigError.
    """
    policy = policy_named(arguments.policy)
    urls = arguments.replica or ()
    count = engines(arguments)
    if not count + len(urls):
        raise ConfigError("replicas", "must be at least 1 without --replica")
    artifacts = load_artifacts(
        arguments.model, max_model_len=arguments.max_model_len, quantize=arguments.quantize
    )
    sources = {} if artifacts.chat_template is None else artifacts.chat_template.sources
    formats = Formats(reasoning_format(sources), tool_format(sources))
    # What may be pending is shared by all; engines here and there are taken to be alike.
    pending = -(-arguments.max_pending // (count + len(urls)))
    if arguments.gpus and (arguments.ray is not None or not count):
        raise ConfigError("gpus", "are for processes of --replicas: --ray-gpus says it for actors")
    runners: list[ModelRunner] = []
    if count and arguments.ray is not None:
        runners += _ray_runners(count, pending, arguments, formats)
    elif count:
        runners += _process_runners(count, pending * count, arguments, formats)
    if urls:
        card = _card(artifacts, pending, arguments, formats)
        key = os.environ.get(REPLICA_KEY_VARIABLE) or None
        runners += [RemoteRunner(RemoteConfig(url, api_key=key), card) for url in urls]
    text = LocalText(artifacts.tokenizer, artifacts.chat_template, name=artifacts.name)
    config = LocalEngineConfig(max_concurrent=pending, max_loading=arguments.load_timeout)
    actors = [
        EngineCoreActor(runner, config, text=text, name=str(number))
        for number, runner in enumerate(runners)
    ]
    return DpCoordinator(actors, text=text, policy=policy)


class Formats(NamedTuple):
    """How the model marks what it thinks and what it calls."""

    reasoning: ReasoningFormat | None
    tools: ToolFormat | None


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What every engine is loaded with."""
    names = (
        "model", "backend", "dtype", "quantize", "kv_dtype", "max_model_len", "max_batch_size",
        "max_step_tokens", "scheduling", "hang_limit", "context_cache", "spill_folder",
    )  # fmt: skip
    options = {name: getattr(arguments, name) for name in names}
    tokens, several = arguments.max_pending_tokens, engines(arguments)
    return {
        **options,
        "max_pending_tokens": None if tokens is None else -(-tokens // several),
        "spill_memory": arguments.spill_memory // several,
        "system_prompt": read_system_prompt(arguments.system_prompt_file),
    }


def _process_runners(
    count: int, pending: int, arguments: argparse.Namespace, formats: Formats
) -> list[ProcessRunner]:
    several = shares(
        count,
        cores=sorted(os.sched_getaffinity(0)),
        threads=arguments.threads,
        kv_memory=arguments.kv_memory,
        free_memory=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        max_pending=pending,
        gpus=arguments.gpus or (),
    )
    specs = child_specs(several, _options(arguments))
    kind = TransportKind.LOCAL_GPU if arguments.gpus else TransportKind.LOCAL_CPU
    return [ProcessRunner(spec, transport_kind=kind, **formats._asdict()) for spec in specs]


def _ray_runners(
    count: int, pending: int, arguments: argparse.Namespace, formats: Formats
) -> list[RayRunner]:
    """Actors, each with threads for its processors, and as much memory as its machine has free."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("ray", "is not installed: install the extra `steppe[ray]`")
    from steppe.replicas.ray import RayResources, RayRunner, join_cluster

    place = RayResources(num_cpus=arguments.ray_cpus, num_gpus=arguments.ray_gpus)
    join_cluster(arguments.ray)
    threads = max(1, int(arguments.ray_cpus)) if arguments.threads is None else arguments.threads
    options = {
        **_options(arguments),
        "threads": threads,
        "kv_memory": arguments.kv_memory,
        # As in a child process: who was cancelled holds a place until the next step boundary.
        "max_pending": 2 * pending,
    }
    return [RayRunner(ChildSpec(options=options), place, **formats._asdict()) for _ in range(count)]


def _card(
    artifacts: ModelArtifacts, pending: int, arguments: argparse.Namespace, formats: Formats
) -> ModelCard:
    """The model as a server elsewhere is expected to have it."""
    length = artifacts.program.max_positions
    return ModelCard(
        name=artifacts.name,
        context_length=min(length, arguments.max_model_len or length),
        vocab_size=artifacts.tokenizer.vocab_size,
        max_batch_size=arguments.max_batch_size,
        max_pending=pending,
        has_chat_template=artifacts.chat_template is not None,
        generation_defaults=artifacts.generation_defaults,
        reasoning=formats.reasoning,
        tools=formats.tools,
    )


def serve_replicas(
    sock: socket.socket, arguments: argparse.Namespace, settings: ServerSettings
) -> None:
    """Start the replicas and serve them on a bound socket until told to stop."""
    asyncio.run(_serve(sock, arguments, settings))


async def _serve(
    sock: socket.socket, arguments: argparse.Namespace, settings: ServerSettings
) -> None:
    from steppe.server.app import create_app
    from steppe.server.lifecycle import listen, server_for

    coordinator = coordinator_of(arguments)
    rolling = RollingReplacement(coordinator, successor_of)
    try:
        await coordinator.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, rolling.begin)
        server = server_for(
            create_app(coordinator, settings),
            coordinator,
            drain_timeout=settings.drain_timeout,
            log_level=arguments.log_level,
        )
        host, port = listen(sock)
        line = startup_line(coordinator.card, arguments, settings, host, port)
        print(line, file=sys.stderr, flush=True)
        await server.serve(sockets=[sock])
    finally:
        await rolling.stop()
        await coordinator.drain(0.0)


def successor_of(replica: EngineCoreActor, name: str) -> EngineCoreActor | None:
    """What takes a replica's place when it is replaced: an engine that is loaded anew. None for a
    server elsewhere, which whoever runs it replaces.
    """
    if not isinstance(replica.runner, PeerRunner):
        return None
    return replica.successor(replica.runner.another(), name)
