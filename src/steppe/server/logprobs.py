"""Log-probabilities in the two shapes that clients know."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steppe.client import EngineClient
    from steppe.request import TokenLogprob

__all__ = ["CompletionLogprobs", "chat_logprobs"]

FLOOR = -9999.0
"""What stands for minus infinity, which JSON cannot say."""


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def chat_logprobs(
    client: EngineClient, entries: Sequence[TokenLogprob], top: int
) -> list[dict[str, Any]]:
    """The ``content`` of a chat choice's logprobs, with ``top`` alternatives for each token.

    A token that is only part of a character shows U+FFFD; its ``bytes`` are exact.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = client.token_bytes(token_id)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }

    return [
        {
            **entry(one.token_id, one.logprob),
            "top_logprobs": [entry(*alternative) for alternative in one.top[:top]],
        }
        for one in entries
    ]


class CompletionLogprobs:
    """The logprobs of one completion choice, whose text offsets run on from chunk to chunk.

    ``as_ids`` spells every token ``token_id:N``, as vLLM does: texts of tokens are not unique.
    """

    def __init__(self, client: EngineClient, top: int, *, as_ids: bool = False) -> None:
        self._client = client
        self._top = top
        self._as_ids = as_ids
        self._offset = 0

    def part(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> dict[str, Any]:
        """The next tokens. The first token of a prompt has no logprob: nothing predicts it."""
        part: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, entry in zip(token_ids, entries, strict=False):
            data = self._client.token_bytes(token_id)
            part["tokens"].append(self._name(token_id))
            part["text_offset"].append(self._offset)
            self._offset += len(data.decode("utf-8", "ignore"))
            if entry is None:
                part["token_logprobs"].append(None)
                part["top_logprobs"].append(None)
                continue
            part["token_logprobs"].append(_finite(entry.logprob))
            likeliest: dict[str, float] = {}
            for alternative, logprob in entry.top[: self._top] or ():
                likeliest.setdefault(self._name(alternative), _finite(logprob))
            likeliest.setdefault(self._name(token_id), _finite(entry.logprob))
            part["top_logprobs"].append(likeliest)
        return part

    def _name(self, token_id: int) -> str:
        return (
            f"token_id:{token_id}" if self._as_ids else _spelled(self._client.token_bytes(token_id))
        )


def _spelled(data: bytes) -> str:
    """A token as text; one that is no text by itself as ``bytes:\\xNN``, as the OpenAI API does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
