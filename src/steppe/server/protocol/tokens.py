"""``/tokenize`` and ``/detokenize``: the requests."""

from __future__ import annotations

from typing import Any

from steppe.errors import InvalidRequestError
from steppe.server.protocol.chat import ChatMessage, Tool
from steppe.server.protocol.common import Strict

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


class TokenizeRequest(Strict):
    """A text or a conversation. Exactly one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    parse_special: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raise InvalidRequestError unless exactly one of the two is given."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt", "give exactly one of prompt and messages")


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
