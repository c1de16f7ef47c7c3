"""A server without a network, for load in virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from steppe.bench.target import Counts

if TYPE_CHECKING:
    from collections.abc import Callable


class QueueTarget:
    """A server that answers one request at a time, in order, each in ``service`` seconds.

    Its text comes in ``output_tokens`` equal steps, so a queue is all that can make it slow.
    """

    name = "queue"

    def __init__(self, service: float) -> None:
        self.service = service
        self.busy = asyncio.Lock()
        self.prompts: deque[str] = deque()

    async def answer(self, prompt: str, output_tokens: int, on_text: Callable[[], None]) -> Counts:
        self.prompts.append(prompt)
        async with self.busy:
            for _ in range(output_tokens):
                await asyncio.sleep(self.service / output_tokens)
                on_text()
        return Counts(len(prompt.split()), output_tokens)
