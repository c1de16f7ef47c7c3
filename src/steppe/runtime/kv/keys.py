"""What a cached page is found by: a chained hash of everything its keys and values depend on.

The hash is keyed with a secret of this process. Somebody who chooses prompts can therefore neither
find two that collide nor tell from a key what it stands for; what is kept across processes
(``system_prompts``) is kept with its tokens, and gets its keys anew.
"""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PageChain", "PageKeys", "PrefixIdentity"]

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixIdentity:
    """What a prefix depends on besides its tokens.

    ``adapter_generation`` 0 is the bare model; ``media`` is a digest of all media and their places;
    requests of different ``salt`` never share a page.
    """

    salt: str = ""
    adapter_generation: int = 0
    media: bytes = b""


class PageKeys:
    """Makes the chains of one pool, all under one secret. Any thread."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._secret = secrets.token_bytes(32)

    def chain(self, identity: PrefixIdentity) -> PageChain:
        """An empty chain for one sequence."""
        root = blake2b(key=self._secret, digest_size=KEY_BYTES, person=b"steppe-root")
        salt = identity.salt.encode("utf-8", "surrogatepass")
        # Every part behind its length, so that no two identities are the same bytes.
        for part in (salt, identity.adapter_generation.to_bytes(8), identity.media):
            root.update(len(part).to_bytes(8))
            root.update(part)
        return PageChain(root.digest(), self._secret, self._page_size)


class PageChain:
    """The keys of one sequence's full pages, made as they are asked for. One thread.

    Key i stands for the first (i + 1) * page_size tokens.
    """

    __slots__ = ("_last", "_page_size", "_secret", "keys")

    def __init__(self, root: bytes, secret: bytes, page_size: int) -> None:
        self._last = root
        self._secret = secret
        self._page_size = page_size
        self.keys: list[bytes] = []
        """Keys made so far. Not to be changed."""

    def extend(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The first ``count`` keys at least, of a sequence that begins with ``tokens``.

        The same sequence must be named every time.
        """
        keys, size = self.keys, self._page_size
        while len(keys) < count:
            first = len(keys) * size
            page = array("i", tokens[first : first + size])
            self._last = blake2b(
                self._last + page.tobytes(),
                key=self._secret,
                digest_size=KEY_BYTES,
                person=b"steppe-page",
            ).digest()
            keys.append(self._last)
        return keys
