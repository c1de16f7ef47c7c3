"""``steppe serve``: a model behind HTTP."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.cli.common import add_model_arguments, load, size
from steppe.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    import socket

    from steppe.client import ModelCard
    from steppe.llm import LLM
    from steppe.server.settings import ServerSettings

__all__ = ["add_arguments", "run"]

API_KEY_VARIABLE = "STEPPE_API_KEY"
REPLICA_KEY_VARIABLE = "STEPPE_REPLICA_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model_arguments(parser)
    http = parser.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    http.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    http.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what requests call the model (default: its own name); may be repeated",
    )
    http.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"ask for this key (default: {API_KEY_VARIABLE}, or none); may be repeated",
    )
    http.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let pages of this web origin use the server (default: none); may be repeated",
    )
    http.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="answer to this name too, beside localhost, addresses and --host; * answers to any,"
        " which lets web pages in; may be repeated",
    )
    http.add_argument(
        "--max-body-size",
        type=int,
        default=8 * 2**20,
        metavar="BYTES",
        help="largest request body (default: 8 MiB)",
    )
    http.add_argument(
        "--resume-buffer",
        type=int,
        default=256 * 2**10,
        metavar="BYTES",
        help="kept of a stream that can be resumed (default: 256 KiB)",
    )
    http.add_argument("--max-prompt-tokens", type=int, help="longest prompt (default: the context)")
    http.add_argument(
        "--log-level",
        default="warning",
        choices=("debug", "info", "warning"),
        help="what to log (default: warning)",
    )

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-batch-size", type=int, default=32, help="sequences that run at once (default: 32)"
    )
    engine.add_argument(
        "--max-step-tokens",
        type=int,
        help="most tokens of one step (default: measured, for steps of about 50 ms)",
    )
    engine.add_argument(
        "--max-pending",
        type=int,
        default=256,
        help="sequences that may run or wait; more are refused with 429 (default: 256)",
    )
    engine.add_argument(
        "--max-pending-tokens",
        type=int,
        help="prompt tokens of those without a token yet; a prompt that would wait beside more is"
        " refused with 429 (default: a context for each seat, and 16 at least)",
    )
    engine.add_argument(
        "--scheduling",
        default="fcfs",
        choices=("fcfs", "fair"),
        help="who is next: whoever came first, or by priority and fairly among API keys"
        " (default: fcfs)",
    )

    engine.add_argument(
        "--no-context-cache",
        dest="context_cache",
        action="store_false",
        help="compute every prompt anew, also what was computed before",
    )
    engine.add_argument(
        "--spill-memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="keep prefixes that the cache must drop in so much more memory, such as 2G",
    )
    engine.add_argument(
        "--spill-folder", type=Path, metavar="DIR", help="keep them in a file there instead"
    )
    engine.add_argument(
        "--system-prompt-file",
        type=Path,
        metavar="FILE",
        help="a text whose conversations are to begin computed: it is kept for good",
    )

    replicas = parser.add_argument_group("replicas")
    replicas.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="engines in processes of their own, which share the threads, the memory and what may "
        "be pending (default: 1, in this process; none with --replica). SIGHUP replaces them one by"
        " one, without losing a request",
    )
    replicas.add_argument(
        "--gpus",
        type=lambda text: text.split(","),
        metavar="ID,...",
        help="deal these GPUs out to the engines of --replicas, as many to each: it sees no others"
        " (CUDA_VISIBLE_DEVICES)",
    )
    replicas.add_argument(
        "--replica",
        action="append",
        metavar="URL",
        help="a server elsewhere that serves the same model; repeatable. MODEL is opened here for"
        f" its tokenizer and template; its key is in {REPLICA_KEY_VARIABLE}",
    )
    replicas.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="put the engines of --replicas into actors of a Ray cluster, the one that this machine"
        " belongs to unless an address is given",
    )
    replicas.add_argument(
        "--ray-cpus", type=float, default=1.0, help="processors of each actor (default: 1)"
    )
    replicas.add_argument(
        "--ray-gpus", type=float, default=0.0, help="GPUs of each actor (default: 0)"
    )
    replicas.add_argument(
        "--policy",
        default="least-loaded",
        help="which replica a request goes to: least-loaded, power-of-two, round-robin or "
        "prefix-affinity (default: least-loaded)",
    )

    times = parser.add_argument_group("time limits, in seconds")
    times.add_argument(
        "--queue-timeout", type=float, help="longest wait for a seat (default: none)"
    )
    times.add_argument("--request-timeout", type=float, help="longest answer (default: none)")
    times.add_argument(
        "--write-timeout",
        type=float,
        default=60.0,
        help="give up a client that reads nothing for so long (default: 60)",
    )
    times.add_argument(
        "--max-resume",
        type=float,
        default=300.0,
        help="longest time that a stream may outlive its connection, if its client asks for that;"
        " 0: none (default: 300)",
    )
    times.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        help="finish what runs for so long when asked to stop (default: 30)",
    )
    times.add_argument(
        "--load-timeout",
        type=float,
        default=600.0,
        help="an engine of --replicas that takes longer to load is ended and started again, at most"
        " three times a minute (default: 600)",
    )
    times.add_argument(
        "--hang-limit",
        type=float,
        default=120.0,
        help="a step that takes longer fails the engine (default: 120)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    for needed in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(needed) is None:
            raise ConfigError("serve", f"needs {needed}: install the extra `steppe[server]`")
    from steppe.server.lifecycle import bind

    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    several = engines(arguments) != 1 or arguments.replica or arguments.ray is not None
    if arguments.gpus and not several:
        raise ConfigError("gpus", "are dealt out to several --replicas, and there is one engine")
    settings = server_settings(arguments)
    prompt = read_system_prompt(arguments.system_prompt_file)
    with bind(arguments.host, arguments.port) as sock, ThreadPoolExecutor(1) as beside:
        # The server's schemas take as long to build as a small model takes to load.
        imported = beside.submit(importlib.import_module, "steppe.server.app")
        if several:
            from steppe.cli.serve_replicas import serve_replicas

            serve_replicas(sock, arguments, settings)
            return 0
        with load(
            arguments,
            max_batch_size=arguments.max_batch_size,
            max_step_tokens=arguments.max_step_tokens,
            max_pending=arguments.max_pending,
            max_pending_tokens=arguments.max_pending_tokens,
            scheduling=arguments.scheduling,
            hang_limit=arguments.hang_limit,
            context_cache=arguments.context_cache,
            spill_memory=arguments.spill_memory,
            spill_folder=arguments.spill_folder,
            system_prompt=prompt,
        ) as llm:
            imported.result()
            serve(llm, sock, arguments, settings)
    return 0


def read_system_prompt(path: Path | None) -> str | None:
    """The text of ``--system-prompt-file``, without blank lines at its end. Raises ConfigError."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("system-prompt-file", f"cannot be read: {error}") from error
    if not text:
        raise ConfigError("system-prompt-file", f"{path} is empty")
    return text


def engines(arguments: argparse.Namespace) -> int:
    """How many engines are started from here."""
    if arguments.replicas is not None:
        return int(arguments.replicas)
    return 0 if arguments.replica else 1


def serve(
    llm: LLM, sock: socket.socket, arguments: argparse.Namespace, settings: ServerSettings
) -> None:
    """Serve a loaded model on a bound socket until told to stop."""
    from steppe.client import LocalClient
    from steppe.server.app import create_app
    from steppe.server.lifecycle import listen, server_for

    client = LocalClient.of(llm)
    server = server_for(
        create_app(client, settings),
        client,
        drain_timeout=settings.drain_timeout,
        log_level=arguments.log_level,
    )
    host, port = listen(sock)
    line = startup_line(client.card, arguments, settings, host, port)
    if llm.pinned_tokens:
        line += f"; {llm.pinned_tokens} tokens of a system prompt kept computed"
    print(line, file=sys.stderr, flush=True)
    server.run(sockets=[sock])


def server_settings(arguments: argparse.Namespace) -> ServerSettings:
    """The settings that a command line asks for. Raises ConfigError."""
    from steppe.server.hosts import is_name
    from steppe.server.settings import ServerSettings

    keys = arguments.api_key or [os.environ.get(API_KEY_VARIABLE, "")]
    if arguments.api_key is None and not keys[0]:
        keys = []
    hosts = [
        *(arguments.allowed_host or ()),
        *([arguments.host] if is_name(arguments.host) else []),
    ]
    return ServerSettings(
        served_names=tuple(arguments.served_model_name or ()),
        api_keys=tuple(keys),
        cors_origins=tuple(arguments.cors_origin or ()),
        allowed_hosts=tuple(hosts),
        max_body_bytes=arguments.max_body_size,
        max_prompt_tokens=arguments.max_prompt_tokens,
        resume_buffer=arguments.resume_buffer,
        write_timeout=arguments.write_timeout,
        max_resume=arguments.max_resume,
        queue_timeout=arguments.queue_timeout,
        request_timeout=arguments.request_timeout,
        drain_timeout=arguments.drain_timeout,
    )


def startup_line(
    card: ModelCard, arguments: argparse.Namespace, settings: ServerSettings, host: str, port: int
) -> str:
    """What is served where, what was decided and why."""

    def because(name: str, otherwise: str) -> str:
        return f"--{name}" if getattr(arguments, name.replace("-", "_")) is not None else otherwise

    names: Any = settings.served_names or (card.name,)
    shown = f"[{host}]" if ":" in host else host
    step = arguments.max_step_tokens
    most = card.max_pending_tokens
    waiting = "" if most is None else f" with {most} prompt tokens"
    given = len(settings.api_keys)
    keys = f"{given} API key{'s' if given > 1 else ''}" if given else "no API key"
    facts = [
        f"context {card.context_length} ({because('max-model-len', 'the model')})",
        f"cache for {card.cache_tokens} tokens ({because('kv-memory', 'from free memory')})",
        f"{card.max_batch_size} sequences at once, {card.max_pending} pending at most{waiting}",
        f"steps of {step} tokens" if step else "steps sized to about 50 ms",
        *([f"{arguments.scheduling} scheduling"] if arguments.scheduling != "fcfs" else []),
        keys,
    ]
    count = engines(arguments) + len(arguments.replica or ())
    if count > 1:
        facts.insert(0, f"{count} replicas, {arguments.policy}")
    return f"serving {', '.join(names)} at http://{shown}:{port}: {'; '.join(facts)}"
