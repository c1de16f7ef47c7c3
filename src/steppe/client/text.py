"""Tokenizing and templating, off the event loop when they are long: an engine is only ever handed
token ids.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from steppe.errors import ChatTemplateError
from steppe.text.chat_template import encode_chat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from steppe.request import LLMGenerationRequest, Message
    from steppe.text.chat_template import ChatTemplate
    from steppe.text.tokenizer import Tokenizer

__all__ = ["LONG_TEXT", "LocalText", "TextService", "WithText", "with_ids"]

T = TypeVar("T")
S = TypeVar("S", bound="TextService")

LONG_TEXT = 4096
"""Characters from which on a text is tokenized in another thread."""
TEXT_THREADS = 2
"""Threads that tokenize: more would take the cores from the engine."""


class TextService(Protocol):
    """The text side of a model: what its template and its tokenizer make of it."""

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation as the model reads it. Raises InvalidRequestError, ChatTemplateError."""

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """The ids of a text; see ``Tokenizer.encode``."""

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Raises InvalidRequestError (``token_ids``) for an unknown one."""

    def token_bytes(self, token_id: int) -> bytes:
        """What one token spells; nothing for an id that the vocabulary does not name."""


class LocalText:
    """A ``TextService`` over a tokenizer in this process. One event loop."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None, *, name: str
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces(skip_special_tokens=False)
        self._template = chat_template
        self._name = name
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="steppe-text")
        self.preparing = 0
        """Long texts that are being worked on."""

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        template = self._template
        if template is None:
            raise ChatTemplateError(
                f"{self._name} has no chat template: give a prompt, not messages"
            )
        size = sum(_size(message) for message in messages) + _size(tools)
        return await self._work(
            size,
            lambda: encode_chat(
                self._tokenizer,
                template,
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                variables=variables,
            ),
        )

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        return await self._work(
            len(text),
            lambda: self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens, parse_special=parse_special
            ),
        )

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._work(
            len(ids),
            lambda: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
        )

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    async def _work(self, size: int, work: Callable[[], T]) -> T:
        """Run ``work`` here if it is short, else in a thread; it counts as pending meanwhile."""
        if size < LONG_TEXT:
            return work()
        self.preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.preparing -= 1

    def close(self) -> None:
        """Let its threads go; what waits for them is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class WithText(Generic[S]):
    """Has a text service, and answers for it."""

    def __init__(self, text: S) -> None:
        self._text = text

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        return await self._text.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        return await self._text.tokenize(
            text, add_special_tokens=add_special_tokens, parse_special=parse_special
        )

    async def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return await self._text.detokenize(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self._text.token_bytes(token_id)


async def with_ids(request: LLMGenerationRequest, text: TextService) -> LLMGenerationRequest:
    """``request`` with its prompt as token ids. Raises InvalidRequestError, ChatTemplateError."""
    if request.messages is not None:
        ids: Sequence[int] = await text.encode_chat(request.messages)
        return replace(request, prompt=ids, messages=None)
    if isinstance(request.prompt, str):
        ids = await text.tokenize(request.prompt)
        return replace(request, prompt=ids)
    return request


def _size(value: object) -> int:
    """About how many characters there are in a JSON value, however deep it is."""
    size, open_values = 0, [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            open_values.extend(one.values())
        elif isinstance(one, list | tuple):
            open_values.extend(one)
        else:
            size += 1
    return size
