"""Frames: whole messages, however the bytes come; bounded; nonsense ends the connection."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import NetworkError
from steppe.replicas.runners import frames
from steppe.replicas.runners.frames import FrameProtocol, frame


class Peer:
    """A protocol without a transport, and what it heard."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.ends: list[str] = []
        self.protocol = FrameProtocol(self.hear, self.ends.append)

    def hear(self, message: list[Any]) -> None:
        if message[0] == "bad":
            raise ValueError("no such kind")
        self.messages.append(message)


@given(
    messages=st.lists(st.lists(st.integers() | st.text(), min_size=1, max_size=3), max_size=5),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_messages_are_whole_however_their_bytes_come(
    messages: list[list[Any]], cuts: list[int]
) -> None:
    messages = [one for one in messages if one[0] != "bad"]
    data = b"".join(map(frame, messages))
    peer = Peer()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        peer.protocol.data_received(data[start:end])
    assert peer.messages == messages
    assert peer.ends == []


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", frames.MAX_FRAME + 1),
        struct.pack(">I", 3) + b"\xff{]",
        struct.pack(">I", 2) + b"{}",
        struct.pack(">I", 2) + b"[]",
        frame(["bad", 1]),
        struct.pack(">I", 200_000) + b"[" * 200_000,
    ],
    ids=["endless", "not json", "no list", "no kind", "unknown", "too deep"],
)
def test_nonsense_ends_the_connection_once(data: bytes) -> None:
    peer = Peer()
    peer.protocol.data_received(frame(["good"]) + data + frame(["never"]))
    assert peer.messages == [["good"]]
    peer.protocol.connection_lost(None)
    assert len(peer.ends) == 1


def test_nothing_is_sent_that_would_not_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 10)
    with pytest.raises(NetworkError, match="at most 10"):
        frame(["x" * 20])
    assert json.loads(frame(["é"])[4:]) == ["é"]
