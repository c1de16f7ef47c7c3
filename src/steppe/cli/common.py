"""What subcommands share: model and sampling arguments, loading with a status line."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from steppe.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.llm import LLM
    from steppe.request import SamplingParams

__all__ = [
    "add_model_arguments",
    "add_running_arguments",
    "add_sampling_arguments",
    "applied_params",
    "given_params",
    "load",
    "read_prompt",
    "sampling_params",
    "size",
]

SAMPLING_FLAGS: tuple[tuple[str, Callable[[str], Any], str], ...] = (
    ("max_tokens", int, "most tokens to generate (default: up to the context)"),
    ("min_tokens", int, "tokens to generate before an end is allowed"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "keep the likeliest tokens of this total probability"),
    ("top_k", int, "keep this many likeliest tokens, 0 keeps all"),
    ("min_p", float, "drop tokens below this fraction of the likeliest"),
    ("repetition_penalty", float, "above 1 discourages tokens that occurred"),
    ("presence_penalty", float, "from -2 to 2, for tokens in the answer"),
    ("frequency_penalty", float, "from -2 to 2, per occurrence in the answer"),
    ("seed", int, "makes sampling repeatable"),
    ("logprobs", int, "report this many alternatives per token (with --json)"),
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL and how it is run."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a directory, a .gguf file, a hub id (org/repo, org/repo:Q4_K_M) or a packaged name",
    )
    add_running_arguments(parser)


def add_running_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is run, wherever it is named."""
    group = parser.add_argument_group("running the model")
    group.add_argument("--backend", default="auto", help="auto, native or torch (default: auto)")
    group.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    group.add_argument(
        "--quantize",
        choices=("q8", "q4"),
        help="load a float checkpoint's matrices in 8 or 4 bits (default: as they are stored)",
    )
    group.add_argument("--threads", type=int, help="CPU threads")
    group.add_argument("--max-model-len", type=int, help="shorten the context to this many tokens")
    group.add_argument("--kv-memory", type=size, help="memory for the cache, such as 512M or 2G")
    group.add_argument(
        "--kv-dtype",
        default="auto",
        help="what keys and values are kept as: auto, bfloat16, float16 or int8 (default: auto)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per sampling field; a flag that is absent leaves the model's own default."""
    group = parser.add_argument_group("sampling")
    for name, kind, what in SAMPLING_FLAGS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=what)
    group.add_argument("--stop", action="append", help="end at this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past an end")


def size(text: str) -> int:
    """``512M``, ``2G`` or plain bytes, for argparse."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in units else (text, "")
    try:
        return int(float(number) * units.get(unit, 1))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2G") from None


def load(arguments: argparse.Namespace, *, max_batch_size: int = 8, **engine: Any) -> LLM:
    """Load the model of a command line, saying on a terminal's stderr what it waits for.

    ``engine`` are further arguments of ``LLM``.
    """
    from rich.console import Console

    console = Console(stderr=True)
    started = time.perf_counter()
    with console.status(f"loading {arguments.model}") as status:

        def tell(stage: str) -> None:
            status.update(f"loading {arguments.model}: {stage}")

        tell("code")
        from steppe.llm import LLM

        llm = LLM(
            arguments.model,
            backend=arguments.backend,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            threads=arguments.threads,
            max_model_len=arguments.max_model_len,
            kv_memory=arguments.kv_memory,
            kv_dtype=arguments.kv_dtype,
            max_batch_size=max_batch_size,
            on_progress=tell,
            **engine,
        )
    if console.is_terminal:
        seconds = time.perf_counter() - started
        print(f"{llm.name}: loaded in {seconds:.1f} s", file=sys.stderr)
    return llm


def given_params(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that flags were given for."""
    names = [*(name for name, _, _ in SAMPLING_FLAGS), "stop", "ignore_eos"]
    return {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }


def sampling_params(llm: LLM, arguments: argparse.Namespace) -> SamplingParams:
    """The flags given, over the model's generation_config, over the defaults."""
    return llm.sampling_params(**given_params(arguments))


def applied_params(
    llm: LLM, arguments: argparse.Namespace, params: SamplingParams
) -> dict[str, dict[str, Any]]:
    """Every sampling field with its value and where that came from."""
    given = given_params(arguments)
    applied = {}
    for name in params.__slots__:
        source = "default"
        if name in given:
            source = "flag"
        elif name in llm.generation_defaults:
            source = "generation_config"
        applied[name] = {"value": getattr(params, name), "from": source}
    return applied


def read_prompt(word: str) -> str:
    """The prompt argument; ``-`` reads standard input. Raises InvalidRequestError when empty."""
    prompt = sys.stdin.read() if word == "-" else word
    if not prompt.strip():
        raise InvalidRequestError("prompt", "is empty")
    return prompt
