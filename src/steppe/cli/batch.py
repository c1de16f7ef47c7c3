"""``steppe generate --input FILE --output FILE``: offline batches that survive an interruption."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from steppe.cli.common import given_params, load
from steppe.errors import InvalidRequestError, SteppeError, SubmitError
from steppe.request import LLMGenerationRequest, LLMGenerationResponse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from steppe.engine.handle import RequestHandle
    from steppe.llm import LLM

__all__ = ["run_batch"]

IN_FLIGHT = 64
"""Requests submitted ahead of the one whose answer is written next."""
MAX_LINE = 16 * 2**20
"""Longest input line, in characters."""


def run_batch(arguments: argparse.Namespace) -> int:
    """Answer every line of ``--input`` in ``--output``, in order, skipping lines answered before.

    A line that cannot be answered gets an error object and costs the others nothing. Returns 1 if
    any line failed, else 0.
    """
    if arguments.input is None or arguments.output is None or arguments.prompt is not None:
        raise InvalidRequestError("input", "give --input and --output, and no PROMPT")
    source, target = Path(arguments.input), Path(arguments.output)
    if not source.is_file():
        raise InvalidRequestError("input", f"there is no file {source}")
    with target.open("a+b") as output:
        done = _answered(output)
        with load(arguments, max_batch_size=32) as llm:
            batch = _Batch(llm, given_params(arguments), raw=arguments.raw, output=output)
            return 1 if batch.run(source, done) else 0


def _answered(output: IO[bytes]) -> int:
    """Lines answered by an earlier run; a line that it was interrupted in is cut off.

    Raises InvalidRequestError for a file that is not such an output.
    """
    output.seek(0)
    done = 0
    end = 0
    for line in output:
        if not line.endswith(b"\n"):
            break
        try:
            number = json.loads(line)["line"]
        except (ValueError, KeyError, TypeError):
            number = None
        if number != done + 1:
            raise InvalidRequestError("output", f"{output.name} is not the output of such a run")
        done = number
        end += len(line)
    output.truncate(end)
    output.seek(0, os.SEEK_END)
    return done


class _Batch:
    """One run over one input file."""

    def __init__(self, llm: LLM, given: Mapping[str, Any], *, raw: bool, output: IO[bytes]) -> None:
        self._llm = llm
        self._given = given
        self._raw = raw
        self._output = output
        self._waiting: deque[tuple[int, Any, RequestHandle | SteppeError]] = deque()
        self._failed = 0

    def run(self, source: Path, done: int) -> int:
        """Answer the lines after the first ``done``; how many failed."""
        from rich.console import Console
        from rich.progress import Progress

        with source.open(encoding="utf-8", errors="replace") as lines:
            total = sum(1 for line in lines if line.strip())
        with (
            source.open(encoding="utf-8", errors="replace") as lines,
            Progress(console=Console(stderr=True)) as bar,
        ):
            task = bar.add_task(source.name, total=total, completed=done)
            numbered = enumerate((line for line in lines if line.strip()), start=1)
            for number, line in numbered:
                if number <= done:
                    continue
                while len(self._waiting) >= IN_FLIGHT:
                    self._write_oldest()
                    bar.advance(task)
                self._submit(number, line)
            while self._waiting:
                self._write_oldest()
                bar.advance(task)
        return self._failed

    def _submit(self, number: int, line: str) -> None:
        label: Any = None
        try:
            job = _parse(line)
            label = job.get("id")
            request = self._request(job)
            while True:
                try:
                    handle = self._llm.engine.submit(request)
                    break
                except SubmitError as refusal:
                    if refusal.reason not in ("queue_full", "backlog_full") or not self._waiting:
                        raise
                    self._write_oldest()
        except SteppeError as error:
            self._waiting.append((number, label, error))
        else:
            self._waiting.append((number, label, handle))

    def _request(self, job: Mapping[str, Any]) -> LLMGenerationRequest:
        given = job.get("params", {})
        if not isinstance(given, dict):
            raise InvalidRequestError("params", "must be an object")
        try:
            params = self._llm.sampling_params(**{**self._given, **given})
        except TypeError:
            raise InvalidRequestError("params", f"unknown field among {sorted(given)}") from None
        prompt, messages = job.get("prompt"), job.get("messages")
        if isinstance(prompt, str) and messages is None:
            if not prompt.strip():
                raise InvalidRequestError("prompt", "is empty")
            if not self._raw and self._llm.chat_template is not None:
                prompt, messages = None, [{"role": "user", "content": prompt}]
        return LLMGenerationRequest(prompt, messages=messages, params=params)

    def _write_oldest(self) -> None:
        number, label, outcome = self._waiting.popleft()
        if not isinstance(outcome, SteppeError):
            try:
                result = _answer(outcome.get())
            except SteppeError as error:
                outcome = error
        if isinstance(outcome, SteppeError):
            self._failed += 1
            result = {"error": {"type": type(outcome).__name__, "message": str(outcome)}}
            if isinstance(outcome, InvalidRequestError):
                result["error"]["field"] = outcome.field
        record = {"line": number, **({} if label is None else {"id": label}), **result}
        self._output.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._output.flush()


def _parse(line: str) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise InvalidRequestError("input", f"the line is longer than {MAX_LINE} characters")
    try:
        job = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("input", f"the line is not JSON: {error}") from error
    if not isinstance(job, dict):
        raise InvalidRequestError("input", "the line must be an object")
    unknown = sorted(set(job) - {"prompt", "messages", "params", "id"})
    if unknown:
        raise InvalidRequestError(unknown[0], "unknown; a line has prompt or messages, params, id")
    return job


def _answer(response: LLMGenerationResponse) -> dict[str, Any]:
    outputs = [
        {
            "text": one.text,
            "token_ids": one.token_ids,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        for one in response.outputs
    ]
    usage = response.usage
    return {
        **(outputs[0] if len(outputs) == 1 else {"outputs": outputs}),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
    }
