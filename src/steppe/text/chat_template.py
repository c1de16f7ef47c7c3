"""From a conversation to the prompt its model was trained on.

The rendering is the model's own jinja2 template; see ``template_sandbox``. The tokenising keeps two
promises. What a user typed never becomes a control token, even where the template puts it next to
real ones. And the template alone decides about BOS: its text is tokenised with nothing added, so a
template that writes BOS does not get a second one and a template that does not gets none, which is
what the reference implementation (``apply_chat_template`` of ``transformers``) does.
"""

from __future__ import annotations

import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any

from steppe.errors import ChatTemplateError, InvalidRequestError
from steppe.text.hf_tokenizer import read_json_object
from steppe.text.messages import JSONValue, checked_messages, plain_json
from steppe.text.user_text import UserTextGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from steppe.text.template_sandbox import CompiledTemplate
    from steppe.text.tokenizer import Tokenizer, TokenizerSource

__all__ = ["MAX_RENDERED_CHARS", "ChatTemplate", "encode_chat"]

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})

MAX_RENDERED_CHARS = 16_000_000
"""Bound on one rendering: far beyond any context, far below what would hurt."""


def _local_now() -> datetime:
    return datetime.now().astimezone()


class ChatTemplate:
    """A model's chat template, or its several named ones. Safe from any thread.

    ``source`` is the default template; ``named`` holds others by name, of which ``tool_use`` is
    taken when a conversation comes with tools. ``clock`` feeds ``strftime_now``. Nothing is
    compiled before the first use; a template that does not compile raises ``ChatTemplateError``
    then.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        named: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = _local_now,
        max_output_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        self.sources: Mapping[str, str] = {**(named or {}), "default": source}
        named_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # Templates test whether a token is defined, so one that is missing must be absent.
        self._special = {name: text for name, text in named_tokens.items() if text is not None}
        self._clock = clock
        self._max_output_chars = max_output_chars
        self._compiled: dict[str, CompiledTemplate] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: TokenizerSource,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], datetime] = _local_now,
    ) -> ChatTemplate:
        """The checkpoint's template; ``ChatTemplateError`` if it has none."""
        if checkpoint.kind == "gguf":
            sources = _gguf_sources(checkpoint.config)
        else:
            sources = _directory_sources(checkpoint.path)
        default = sources.pop("default", None)
        if default is None:
            others = f"; it only has {', '.join(sorted(sources))}" if sources else ""
            raise ChatTemplateError(f"{checkpoint.path} has no chat template{others}")
        return cls(
            default,
            bos_token=_spelled(tokenizer, tokenizer.bos_id),
            eos_token=_spelled(tokenizer, tokenizer.eos_id),
            named=sources,
            clock=clock,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, with the users' words exactly as they are.

        ``variables`` are handed to the template (``enable_thinking`` and the like). Raises
        ``InvalidRequestError`` for a malformed conversation or variable, ``ChatTemplateError`` if
        the template refuses it or fails.
        """
        return self._render(
            messages,
            None,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        guard: UserTextGuard | None,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        template = self._template("tool_use" if tools else "default")
        given: dict[str, JSONValue] = {}
        for name, value in (variables or {}).items():
            if name in _RESERVED:
                raise InvalidRequestError(name, "is not for a template variable to set")
            given[name] = plain_json(value, name)
        given["messages"] = [_fit(message, template) for message in checked_messages(messages)]
        if tools:
            given["tools"] = plain_json(list(tools), "tools")
        if guard is not None:
            given = guard.protect(given)
        return template.render(
            {
                **self._special,
                "tools": None,
                "documents": None,
                **given,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _template(self, name: str) -> CompiledTemplate:
        if name not in self.sources:
            name = "default"
        with self._lock:
            compiled = self._compiled.get(name)
            if compiled is None:
                from steppe.text.template_sandbox import CompiledTemplate

                compiled = self._compiled[name] = CompiledTemplate(
                    self.sources[name],
                    clock=self._clock,
                    max_output_chars=self._max_output_chars,
                )
        return compiled


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    parse_special: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The prompt as ids: the template's control tokens are control tokens, the users' are letters.

    "Users'" means every string handed in: messages (roles too), tools, variables. With
    ``parse_special`` they are trusted like the template. No BOS or EOS is added to what the
    template writes. Raises as ``ChatTemplate.render`` does, and ``InvalidRequestError``
    (``messages``) if the result is empty.
    """
    guard = None if parse_special else UserTextGuard(tokenizer.splitter)
    text = template._render(
        messages,
        guard,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        variables=variables,
    )
    parts = tokenizer.splitter.split(text)
    if guard is not None:
        parts = [guard.reveal(part) if isinstance(part, str) else part for part in parts]
    ids = tokenizer.encode_parts(parts)
    if not ids:
        raise InvalidRequestError("messages", "the chat template rendered an empty prompt")
    return ids


def _fit(message: dict[str, JSONValue], template: CompiledTemplate) -> dict[str, JSONValue]:
    """The message with its content in a form that the template reads: one string, or parts."""
    content = message.get("content")
    if isinstance(content, list) and not template.reads_parts:
        texts = [part["text"] for part in content if isinstance(part, dict)]
        return {**message, "content": "\n".join(text for text in texts if isinstance(text, str))}
    if isinstance(content, str) and not template.reads_text:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def _spelled(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)


def _gguf_sources(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    sources = {"default": metadata.get(key)}
    for name in metadata.get("tokenizer.chat_templates", ()):
        sources[name] = metadata.get(f"{key}.{name}")
    return {name: text for name, text in sources.items() if isinstance(text, str)}


def _directory_sources(path: Path) -> dict[str, str]:
    """Of the places a template may be, the later ones here are the newer, and win."""
    sources: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        sources.update(_listed(read_json_object(path / name).get("chat_template"), path / name))
    files = [path / "chat_template.jinja", *sorted(path.glob("additional_chat_templates/*.jinja"))]
    for file in files:
        name = "default" if file.parent == path else file.stem
        try:
            sources[name] = file.read_text("utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{file}: {error}") from error
    return sources


def _listed(value: object, where: Path) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list() if all(
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
            for entry in value
        ):
            return {entry["name"]: entry["template"] for entry in value}
        case _:
            raise ChatTemplateError(f"{where}: chat_template is neither text nor a list of them")
