"""What is put under load: something that answers a prompt, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from steppe.errors import InvalidRequestError, RequestFailedError, SteppeError, SubmitError
from steppe.request import LLMGenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from steppe.client import EngineClient

__all__ = ["AnswerError", "Counts", "LocalTarget", "Target"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts of one answer; None where the target does not say."""

    prompt: int | None = None
    output: int | None = None


class AnswerError(SteppeError):
    """A request had no whole answer. ``kind`` is a short name, by which errors are counted."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind


class Target(Protocol):
    """Something that answers. For one event loop; any number of answers at once."""

    @property
    def name(self) -> str:
        """What a report calls it."""

    async def answer(self, prompt: str, output_tokens: int, on_text: Callable[[], None]) -> Counts:
        """One greedy answer of that many tokens; ``on_text`` is called as each chunk comes.

        Cancelling the task cancels the request. Raises AnswerError.
        """


class LocalTarget:
    """An engine in this process, without HTTP in between."""

    def __init__(self, client: EngineClient, *, ignore_eos: bool = True) -> None:
        self._client = client
        self._ignore_eos = ignore_eos

    @property
    def name(self) -> str:
        return f"{self._client.card.name}, in process"

    async def answer(self, prompt: str, output_tokens: int, on_text: Callable[[], None]) -> Counts:
        params = SamplingParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=self._ignore_eos
        )
        counts = Counts()
        try:
            handle = await self._client.submit(LLMGenerationRequest(prompt, params=params))
            async for chunk in handle:
                if chunk.token_ids:
                    on_text()
                if chunk.usage is not None:
                    counts = Counts(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        except SubmitError as error:
            raise AnswerError(f"refused_{error.reason}", str(error)) from error
        except InvalidRequestError as error:
            raise AnswerError("invalid_request", str(error)) from error
        except RequestFailedError as error:
            raise AnswerError("request_failed", str(error)) from error
        return counts
