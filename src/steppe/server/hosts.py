"""The names that a server answers to.

A web page may point a name of its own at this machine once the browser has loaded it (DNS
rebinding): its requests then count as coming from the server's own pages, whatever CORS says. They
still carry that name in ``Host``, which no page can change, so other names are refused.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from steppe.server.errors import Problem, ProblemError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.datastructures import Headers

__all__ = ["ANY_HOST", "Hosts", "is_host", "is_name"]

ANY_HOST = "*"
"""Instead of a name: every name is answered to."""
HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(:[0-9]*)?")


class Hosts:
    """Answers to ``localhost`` and names under it, to every IP address, and to the ``allowed``
    names. ``ANY_HOST`` among them switches the check off.

    An address is no name: nobody can point it elsewhere.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = frozenset(name.lower().rstrip(".") for name in allowed)

    def check(self, headers: Headers) -> None:
        """Raise ProblemError (421) for a request to another name, or to several. One without any
        is of no browser.
        """
        given = headers.getlist("host")
        if ANY_HOST in self._allowed or not given:
            return
        name = given[0]
        if len(given) == 1 and (parts := HOST.fullmatch(name)):
            name = parts["name"].strip("[]").lower().rstrip(".")
            if name in self._allowed or _is_here(name):
                return
        raise ProblemError(
            Problem(
                421,
                f"this server does not answer to {name[:200]!r}: see --allowed-host",
                code="unknown_host",
            )
        )


def is_host(text: str) -> bool:
    """Whether ``text`` is a name without a port, or ``ANY_HOST``."""
    return text == ANY_HOST or (bool(text) and text.isascii() and not set(text) & set("/:@ *"))


def is_name(host: str) -> bool:
    """Whether an address to listen at is given by a name: not by numbers, and not left out."""
    return is_host(host) and not _is_here(host)


def _is_here(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
