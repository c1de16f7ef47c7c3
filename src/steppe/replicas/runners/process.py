"""A runner whose engine has a process of its own, at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

from steppe.replicas.runners.peer import CHILD, ChildSpec, Peer, PeerRunner

__all__ = ["ChildSpec", "ProcessRunner"]


class ProcessRunner(PeerRunner):
    """A ``ModelRunner`` in a child process: its crash is a loss and no more, and nothing that this
    process is busy with delays a step of its engine. The child dies with this process.
    """

    _process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return None if self._process is None else self._process.pid

    async def _connect(self) -> Peer:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                # A fork and an exec: a few milliseconds.
                process = subprocess.Popen(  # noqa: ASYNC220
                    [sys.executable, "-m", CHILD, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **self._spec.environment},
                )
            peer = Peer(f"process {process.pid}")
            ours.setblocking(False)
            await loop.create_unix_connection(lambda: peer.frames, sock=ours)
        except BaseException:
            ours.close()
            if process is not None:
                process.kill()
                process.wait()
            raise
        self._process = process
        return peer

    async def _end(self, peer: Peer) -> None:
        process, self._process = self._process, None
        peer.frames.abort("it was ended")
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
