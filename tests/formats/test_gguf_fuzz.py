"""Damaged GGUF headers: always a typed error or a sound file, never more memory than the file."""

from __future__ import annotations

import functools
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import CheckpointError, UnsupportedModelError
from steppe.formats.gguf import read_gguf
from tests.formats.build import (
    SUPPORTED,
    pair,
    random_blocks,
    raw_gguf,
    tensor_info,
    text,
    write_gguf,
)

# The interpreter's own share of an open: objects per key and per tensor, messages, tracebacks.
SLACK = 128 << 10


@functools.cache
def sound_file() -> tuple[bytes, int]:
    """A file with every tensor type and kind of metadata, and where its tensor data begins."""
    rng = np.random.default_rng(1)
    tensors = {kind: (kind, (4, 512), random_blocks(rng, kind, (4, 512))) for kind in SUPPORTED}
    tensors["padding"] = ("F32", (1024, 128), np.zeros((1024, 512), dtype=np.uint8))
    metadata = {
        "t.u8": ("uint8", 1),
        "t.u64": ("uint64", 1),
        "t.f32": ("float32", 1.0),
        "t.bool": ("bool", True),
        "t.string": ("string", "a string"),
        "t.tokens": ("array", [f"token {i}" for i in range(64)]),
        "t.scores": ("array", [float(i) for i in range(64)]),
        "general.alignment": ("uint32", 32),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_gguf(path, tensors, metadata)
        content = path.read_bytes()
        first = read_gguf(path).tensors["F32"].data
        start = content.index(first.tobytes())
    return content, start


def open_and_use(content: bytes, slack: int = SLACK) -> bool:
    """Open ``content`` as a file and look at all of it; whether it is sound.

    Bounds the memory of a refusal by the file's size and ``slack``. A sound file may hold one long
    string, which in Python takes up to four times its bytes (and more while it is made).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(content)
        limit = len(content) + slack
        tracemalloc.start()
        try:
            try:
                file = read_gguf(path)
                limit = 8 * len(content) + slack
            except (CheckpointError, UnsupportedModelError):
                return False
            finally:
                peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            assert peak < limit
        total = sum(tensor.nbytes for tensor in file.tensors.values())
        assert total <= len(content)
        for tensor in file.tensors.values():
            assert tensor.data[:1].size == min(1, tensor.nbytes)
            assert tensor.dequantize().shape == tensor.shape
        for value in file.metadata.values():
            if not isinstance(value, str | int | float):
                assert len(list(value)) == len(value)
        return True


def test_the_sound_file_is_sound() -> None:
    content, start = sound_file()
    assert start < 8192
    assert len(content) > 1 << 19
    assert open_and_use(content)


INTERESTING = (0, 1, 7, 8, 9, 0x7F, 0xFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40)
BIG = (*INTERESTING, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, (1 << 64) - 8)


@settings(max_examples=300)
@given(data=st.data())
def test_mutated_headers(data: st.DataObject) -> None:
    content, start = sound_file()
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4), label="mutations")):
        offset = data.draw(st.integers(0, start - 1), label="offset")
        kind = data.draw(st.sampled_from(["byte", "u32", "u64", "cut", "delete", "insert"]))
        if kind == "byte":
            damaged[offset : offset + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "u32":
            value = data.draw(st.sampled_from(INTERESTING)) & 0xFFFFFFFF
            damaged[offset : offset + 4] = struct.pack("<I", value)
        elif kind == "u64":
            damaged[offset : offset + 8] = struct.pack("<Q", data.draw(st.sampled_from(BIG)))
        elif kind == "cut":
            del damaged[data.draw(st.integers(0, len(damaged)), label="length") :]
        elif kind == "delete":
            del damaged[offset : offset + data.draw(st.integers(1, 16))]
        else:
            damaged[offset:offset] = data.draw(st.binary(min_size=1, max_size=16))
    open_and_use(bytes(damaged))


@settings(max_examples=300)
@given(st.binary(max_size=512))
def test_bytes_after_the_magic(tail: bytes) -> None:
    open_and_use(b"GGUF\x03\x00\x00\x00" + tail)


lengths = st.one_of(st.integers(0, 64), st.sampled_from(BIG))


@settings(max_examples=200)
@given(
    count=lengths,
    kind=st.integers(0, 14),
    string_lengths=st.lists(lengths, max_size=8),
    pairs=lengths,
    infos=lengths,
    shape=st.lists(lengths, max_size=6),
    tensor_kind=st.integers(0, 45),
    offset=lengths,
)
def test_counts_that_lie(
    count: int,
    kind: int,
    string_lengths: list[int],
    pairs: int,
    infos: int,
    shape: list[int],
    tensor_kind: int,
    offset: int,
) -> None:
    body = b"".join(struct.pack("<Q", n) + b"x" * min(n, 16) for n in string_lengths)
    array = struct.pack("<IQ", kind, count) + body
    content = raw_gguf(
        [pair("a", 9, array), pair("s", 8, text("x"))],
        [tensor_info("t", shape, tensor_kind, offset)],
        bytes(4096),
        pair_count=min(pairs, (1 << 64) - 1),
        tensor_count=infos,
    )
    open_and_use(content)


@pytest.mark.parametrize(("keys", "tensors"), [(4096, 0), (0, 16384), (4097, 0), (0, 16385)])
def test_dense_headers_cost_a_bounded_amount(keys: int, tensors: int) -> None:
    """The smallest keys and tensors there can be, as many as we take and one more."""
    alignment = pair("general.alignment", 4, struct.pack("<I", 8))
    content = raw_gguf(
        [alignment] * bool(tensors) + [pair(f"{i:x}", 0, b"\0") for i in range(keys)],
        [tensor_info(f"{i:x}", (), 0, 8 * i) for i in range(tensors)],
        bytes(8 * tensors),
    )
    assert open_and_use(content, slack=8 << 20) == (keys in (0, 4096) and tensors in (0, 16384))


def test_a_long_string_costs_nothing_before_the_file_is_sound() -> None:
    long = pair("s", 8, text(b"\xff" * (1 << 20)))
    assert not open_and_use(raw_gguf([long], [tensor_info("t", (1 << 40,))]))
    assert open_and_use(raw_gguf([long]))


def test_a_megabyte_of_empty_strings_costs_a_megabyte() -> None:
    """The densest legal header: eight bytes a string, of which eight are kept."""
    count = 1 << 17
    array = struct.pack("<IQ", 8, count) + bytes(8 * count)
    assert open_and_use(raw_gguf([pair("a", 9, array)]))
