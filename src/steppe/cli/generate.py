"""``steppe generate``: one prompt, one answer, streamed."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from steppe.cli.common import (
    add_model_arguments,
    add_sampling_arguments,
    applied_params,
    load,
    read_prompt,
    sampling_params,
)
from steppe.errors import InvalidRequestError

if TYPE_CHECKING:
    import argparse

    from steppe.llm import LLM
    from steppe.request import SamplingParams, TokenLogprob, Usage
    from steppe.streaming import StreamChunk

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt, - reads stdin")
    parser.add_argument("--system", help="a system message")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt as it is, without a chat template"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    files = parser.add_argument_group("answering a file")
    files.add_argument("--input", metavar="FILE", help="JSON lines with prompt or messages")
    files.add_argument("--output", metavar="FILE", help="JSON lines, one per input line")
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer, or answer a file."""
    if arguments.input is not None or arguments.output is not None:
        from steppe.cli.batch import run_batch

        return run_batch(arguments)
    if arguments.prompt is None:
        raise InvalidRequestError("prompt", "give PROMPT, or --input and --output")
    prompt = read_prompt(arguments.prompt)
    with load(arguments) as llm:
        params = sampling_params(llm, arguments)
        chats = llm.chat_template is not None and not arguments.raw
        if arguments.system is not None and not chats:
            raise InvalidRequestError("system", "needs a chat template")
        if chats:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            stream = llm.stream_chat([*system, {"role": "user", "content": prompt}], params)
        else:
            stream = llm.stream(prompt, params)
        answer = Answer()
        for chunk in stream:
            answer.add(chunk)
            if not arguments.json:
                print(chunk.text, end="", flush=True)
        if arguments.json:
            report = answer.report(llm, applied_params(llm, arguments, params), params)
            print(json.dumps(report, ensure_ascii=False))
        else:
            print()
            if sys.stderr.isatty():
                print(answer.summary(), file=sys.stderr)
    return 0


class Answer:
    """A streamed answer as it comes in, with its times."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_token: float | None = None
        self.ended = self.started
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.last: StreamChunk | None = None

    def add(self, chunk: StreamChunk) -> None:
        """Take one chunk."""
        self.ended = time.perf_counter()
        if self.first_token is None and chunk.token_ids:
            self.first_token = self.ended
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or ()
        self.last = chunk

    @property
    def usage(self) -> Usage | None:
        """Token counts, once the answer has ended."""
        return self.last.usage if self.last else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, over the time they took."""
        if self.first_token is None or self.ended <= self.first_token:
            return None
        return (len(self.token_ids) - 1) / (self.ended - self.first_token)

    def summary(self) -> str:
        """One line about the answer's length and speed."""
        words = [f"{len(self.token_ids)} tokens"]
        if self.first_token is not None:
            words.append(f"first after {self.first_token - self.started:.2f} s")
        if self.tokens_per_second is not None:
            words.append(f"{self.tokens_per_second:.1f} tokens/s")
        return ", ".join(words)

    def report(
        self, llm: LLM, applied: dict[str, dict[str, Any]], params: SamplingParams
    ) -> dict[str, Any]:
        """The answer as one JSON object."""
        last = self.last
        usage = self.usage
        report: dict[str, Any] = {
            "model": llm.name,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": last.finish_reason if last else None,
            "stop_reason": last.stop_reason if last else None,
            "usage": None
            if usage is None
            else {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
            },
            "sampling": applied,
            "seconds_to_first_token": None
            if self.first_token is None
            else self.first_token - self.started,
            "tokens_per_second": self.tokens_per_second,
        }
        if params.logprobs is not None:
            report["logprobs"] = [_logprob(llm, one) for one in self.logprobs]
        return report


def _logprob(llm: LLM, one: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": one.token_id,
        "token": llm.tokenizer.token_text(one.token_id),
        "logprob": one.logprob,
        "top": [
            {"token_id": id_, "token": llm.tokenizer.token_text(id_), "logprob": logprob}
            for id_, logprob in one.top
        ],
    }
