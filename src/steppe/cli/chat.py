"""``steppe chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from steppe.cli.common import add_model_arguments, add_sampling_arguments, load, sampling_params
from steppe.cli.generate import Answer
from steppe.errors import ChatTemplateError, InvalidRequestError

if TYPE_CHECKING:
    import argparse

    from steppe.llm import LLM
    from steppe.request import SamplingParams

__all__ = ["add_arguments", "run"]

HELP = (
    "/reset forgets the conversation, /system TEXT sets a system message and resets, /exit leaves"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model_arguments(parser)
    parser.add_argument("--system", help="a system message")
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the input ends. Ctrl-C stops an answer and keeps the conversation."""
    with load(arguments) as llm:
        if llm.chat_template is None:
            raise ChatTemplateError(f"{llm.name} has no chat template: use steppe generate --raw")
        conversation = Conversation(llm, sampling_params(llm, arguments), arguments.system)
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  (line editing and history for input())

            print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "")
            except EOFError:
                break
            except KeyboardInterrupt:
                # At the prompt there is nothing to stop: a second thought, like an empty line.
                print(file=sys.stderr)
                continue
            if line.strip() == "/exit":
                break
            if line.strip():
                conversation.take(line)
    return 0


class Conversation:
    """The turns so far, and how the next answer is made."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self.messages: list[dict[str, Any]] = []
        self._reset()

    def take(self, line: str) -> None:
        """Obey a command or answer a turn."""
        word, _, rest = line.strip().partition(" ")
        if word == "/reset":
            self._reset()
        elif word == "/system":
            self._system = rest or None
            self._reset()
        elif word.startswith("/"):
            print(f"unknown command {word}: {HELP}", file=sys.stderr)
        else:
            self._answer(line)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _answer(self, line: str) -> None:
        turn = {"role": "user", "content": line}
        answer = Answer()
        try:
            stream = self._llm.stream_chat([*self.messages, turn], self._params)
        except (InvalidRequestError, ChatTemplateError) as error:
            # A turn that cannot be asked costs the turn, not the conversation.
            print(f"steppe: {error}", file=sys.stderr)
            return
        try:
            for chunk in stream:
                answer.add(chunk)
                print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()
            print(" [stopped]", end="", flush=True)
        print()
        if sys.stderr.isatty():
            print(answer.summary(), file=sys.stderr)
        self.messages += [turn, {"role": "assistant", "content": answer.text}]
