"""The GGUF reader against the ``gguf`` package, and against files that lie."""

from __future__ import annotations

import gc
import os
import struct
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from steppe.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from steppe.formats.gguf import read_gguf, split_files
from tests.formats.build import (
    SUPPORTED,
    pair,
    random_blocks,
    raw_gguf,
    tensor_info,
    text,
    write_gguf,
)

if TYPE_CHECKING:
    from steppe.formats.strings import StringArray

SCALARS: dict[str, Any] = {
    "uint8": 200,
    "int8": -100,
    "uint16": 60000,
    "int16": -30000,
    "uint32": 4_000_000_000,
    "int32": -2_000_000_000,
    "uint64": 1 << 63,
    "int64": -(1 << 62),
    "float32": 0.5,
    "float64": 1e300,
    "bool": True,
    "string": "déjà vu — 世界 😊",
}


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = {f"t.{kind}": (kind, value) for kind, value in SCALARS.items()}
    metadata |= {
        "t.false": ("bool", False),
        "a.ints": ("array", [1, -2, 3]),
        "a.floats": ("array", [0.5, -1.25]),
        "a.bools": ("array", [True, False, True]),
        "a.strings": ("array", ["a", "", "ß", "▁the", "\x00"]),
    }
    write_gguf(path, {}, metadata)
    found = read_gguf(path).metadata
    for kind, value in SCALARS.items():
        assert found[f"t.{kind}"] == value
        assert type(found[f"t.{kind}"]) is type(value)
    assert found["t.false"] is False
    assert found["general.architecture"] == "llama"
    np.testing.assert_array_equal(found["a.ints"], np.array([1, -2, 3], dtype=np.int32))
    assert found["a.ints"].dtype == np.int32
    assert found["a.floats"].dtype == np.float32
    assert found["a.floats"].tolist() == [0.5, -1.25]
    assert found["a.bools"].tolist() == [True, False, True]
    assert list(found["a.strings"]) == ["a", "", "ß", "▁the", "\x00"]


@pytest.mark.parametrize(
    ("code", "letter", "values"),
    [
        (0, "B", [0, 255]),
        (1, "b", [-128, 127]),
        (2, "H", [0, 65535]),
        (3, "h", [-32768, 3]),
        (4, "I", [0, 2**32 - 1]),
        (5, "i", [-(2**31), 5]),
        (6, "f", [0.25, -2.0]),
        (10, "Q", [0, 2**64 - 1]),
        (11, "q", [-(2**63), 1]),
        (12, "d", [1e-300, 3.0]),
    ],
)
def test_every_numeric_array_is_read(
    tmp_path: Path, code: int, letter: str, values: list[Any]
) -> None:
    packed = struct.pack("<IQ", code, len(values)) + struct.pack(f"<{len(values)}{letter}", *values)
    # An odd string before it: the array lies unaligned in the file.
    content = raw_gguf([pair("s", 8, text("xyz")), pair("a", 9, packed)])
    array = read_gguf(write(tmp_path / "m.gguf", content)).metadata["a"]
    assert array.tolist() == values
    assert array.flags.aligned


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_every_tensor_type_is_read(
    tmp_path: Path, rng: np.random.Generator, alignment: int | None
) -> None:
    tensors = {
        f"{kind}.{'x'.join(map(str, shape))}": (kind, shape, random_blocks(rng, kind, shape))
        for kind in SUPPORTED
        for shape in [(256,), (3, 512), (2, 3, 256), (1, 2, 3, 256)]
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors, alignment=alignment)
    ours = read_gguf(path).tensors
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(ours) == list(tensors)
    for name, (kind, shape, raw) in tensors.items():
        tensor = ours[name]
        assert (tensor.name, tensor.dtype, tensor.shape) == (name, kind, shape)
        assert tensor.nbytes == raw.size == theirs[name].n_bytes
        assert tensor.data.dtype == np.uint8
        assert not tensor.data.flags.writeable
        np.testing.assert_array_equal(tensor.data, raw.reshape(-1))
        expected = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
        np.testing.assert_array_equal(tensor.dequantize(), np.reshape(expected, shape))


def test_version_two_is_read(tmp_path: Path) -> None:
    content = raw_gguf([pair("k", 4, struct.pack("<I", 7))], version=2)
    assert read_gguf(write(tmp_path / "m.gguf", content)).metadata == {"k": 7}


def test_tensor_data_is_a_view_of_the_map(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"big": ("F32", (512, 512), random_blocks(rng, "F32", (512, 512)))})
    tracemalloc.start()
    try:
        file = read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert file.tensors["big"].nbytes == 1 << 20
    assert peak < 1 << 18


# The package takes half a minute to open the second.
PATIENT = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("fixture", ["smollm2_gguf", pytest.param("gemma3_gguf", marks=PATIENT)])
def test_a_real_model_reads_as_the_package_reads_it(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(fixture)
    ours = read_gguf(path)
    theirs = gguf.GGUFReader(path)
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, field in fields.items():
        value = ours.metadata[key]
        if isinstance(value, np.ndarray):
            value = value.tolist()
        assert value == field.contents(), key
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.dtype == tensor.tensor_type.name
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.data.ctypes.data % 32 == 0
        np.testing.assert_array_equal(mine.data, tensor.data.view(np.uint8).reshape(-1))


def test_a_vocabulary_of_a_quarter_million_is_whole(gemma3_gguf: Path) -> None:
    tokens = list(read_gguf(gemma3_gguf).metadata["tokenizer.ggml.tokens"])
    assert len(tokens) == 262144
    assert len(set(tokens)) == len(tokens)


# --- string arrays


def strings(tmp_path: Path, *values: bytes) -> StringArray:
    packed = struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))
    content = raw_gguf([pair("a", 9, packed)])
    array: StringArray = read_gguf(write(tmp_path / "s.gguf", content)).metadata["a"]
    return array


def test_bytes_that_are_no_utf8_survive(tmp_path: Path) -> None:
    raw = [b"ok", b"\xff\xfe", b"caf\xc3", b""]
    array = strings(tmp_path, *raw)
    assert [value.encode("utf-8", "surrogateescape") for value in array] == raw
    content = raw_gguf([pair("s", 8, text(b"\x80abc"))])
    value = read_gguf(write(tmp_path / "v.gguf", content)).metadata["s"]
    assert value.encode("utf-8", "surrogateescape") == b"\x80abc"


def test_a_string_array_is_a_sequence(tmp_path: Path) -> None:
    array = strings(tmp_path, b"zero", b"one", b"two")
    assert (array[0], array[-1], array[1:]) == ("zero", "two", ["one", "two"])
    with pytest.raises(IndexError):
        array[3]
    with pytest.raises(IndexError):
        array[-4]
    assert "one" in array
    assert array.index("two") == 2
    assert array == ["zero", "one", "two"] == list(array)
    assert array[1] == "one"  # also once all are decoded
    assert array != ["zero", "one"]
    assert array != ["zero", "one", "three"]
    assert array != 3
    assert len(array) == 3
    assert repr(array) == "<StringArray of 3 strings>"
    assert list(strings(tmp_path)) == []


def test_a_string_array_outlives_the_map(tmp_path: Path) -> None:
    file = read_gguf(
        write(tmp_path / "s.gguf", raw_gguf([pair("a", 9, struct.pack("<IQ", 8, 1) + text("x"))]))
    )
    for part in file.files:
        part.close()
    assert list(file.metadata["a"]) == ["x"]


# --- files that lie


U32 = 4
F32_DATA = bytes(32)
HUGE = (1 << 64) - 1

LIES: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "cannot be mapped"),
    "three bytes": (b"GGU", "header"),
    "another magic": (raw_gguf(magic=b"PK\x03\x04"), "begins with"),
    "keys beyond the end": (raw_gguf(pair_count=HUGE), "metadata keys"),
    "one key too many": (raw_gguf([pair("k", U32, bytes(4))], pair_count=2), "metadata key"),
    "tensors beyond the end": (raw_gguf(tensor_count=HUGE), "tensors cannot be"),
    "a key longer than the file": (
        raw_gguf([struct.pack("<Q", HUGE) + b"k" * 40]),
        "truncated or corrupt",
    ),
    "an empty key": (raw_gguf([pair("", U32, bytes(4))]), "0 bytes long"),
    "a key longer than allowed": (raw_gguf([pair("k" * 65536, U32, bytes(4))]), "65536 bytes long"),
    "a key that is no text": (raw_gguf([pair(b"\xff\xff", U32, bytes(4))]), "not UTF-8"),
    "a key that occurs twice": (raw_gguf([pair("k", U32, bytes(4))] * 2), "twice"),
    "an unknown value type": (raw_gguf([pair("k", 13, bytes(8))]), "value type 13"),
    "a boolean of 2": (raw_gguf([pair("k", 7, b"\x02")]), "boolean"),
    "a boolean array with a 2": (
        raw_gguf([pair("k", 9, struct.pack("<IQ", 7, 2) + b"\x01\x02")]),
        "boolean",
    ),
    "a string longer than the file": (
        raw_gguf([pair("k", 8, struct.pack("<Q", 1 << 62))]),
        "truncated or corrupt",
    ),
    "an array longer than the file": (
        raw_gguf([pair("k", 9, struct.pack("<IQ", 4, 1 << 61))]),
        "truncated or corrupt",
    ),
    "more strings than the file has bytes": (
        raw_gguf([pair("k", 9, struct.pack("<IQ", 8, 1 << 40))]),
        "truncated or corrupt",
    ),
    "an array string past the end": (
        raw_gguf([pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", HUGE))]),
        "string 1 of 2",
    ),
    "an array that ends inside a length": (
        raw_gguf([pair("k", 9, struct.pack("<IQ", 8, 2) + text("a" * 15))], alignment=1),
        "string 1 of 2",
    ),
    "an array of an unknown type": (
        raw_gguf([pair("k", 9, struct.pack("<IQ", 77, 0))]),
        "unknown type 77",
    ),
    "an alignment of 0": (raw_gguf([pair("general.alignment", U32, bytes(4))]), "power of two"),
    "an alignment of 4": (
        raw_gguf([pair("general.alignment", U32, struct.pack("<I", 4))]),
        "power of two",
    ),
    "an alignment of 24": (
        raw_gguf([pair("general.alignment", U32, struct.pack("<I", 24))]),
        "power of two",
    ),
    "an alignment that is a string": (
        raw_gguf([pair("general.alignment", 8, text("32"))]),
        "power of two",
    ),
    "a tensor without a name": (raw_gguf([], [tensor_info("")], F32_DATA), "0 bytes long"),
    "a tensor that occurs twice": (
        raw_gguf([], [tensor_info("t"), tensor_info("t", offset=32)], F32_DATA * 2),
        "twice",
    ),
    "a tensor of no values": (raw_gguf([], [tensor_info("t", (8, 0))], F32_DATA), "holds nothing"),
    "a tensor of five dimensions": (
        raw_gguf([], [tensor_info("t", (1, 1, 1, 1, 1))], F32_DATA),
        "5 dimensions",
    ),
    "a tensor whose size overflows 64 bits": (
        raw_gguf([], [tensor_info("t", (1 << 32, 1 << 32, 1 << 32, 8))], F32_DATA),
        "truncated or corrupt",
    ),
    "a tensor past the end": (
        raw_gguf([], [tensor_info("t", (9,))], F32_DATA),
        "truncated or corrupt",
    ),
    "a tensor that begins past the end": (
        raw_gguf([], [tensor_info("t", (1,), offset=1 << 63)], F32_DATA),
        "truncated or corrupt",
    ),
    "an unaligned tensor": (raw_gguf([], [tensor_info("t", (1,), offset=4)], F32_DATA), "aligned"),
    "a tensor of half a block": (
        raw_gguf([], [tensor_info("t", (16,), kind=2)], F32_DATA),
        "no whole number",
    ),
    "tensors that overlap": (
        raw_gguf([], [tensor_info("a", (16,)), tensor_info("b", (8,), offset=32)], F32_DATA * 2),
        "overlap",
    ),
    "one of two parts": (
        raw_gguf([pair("split.count", 2, struct.pack("<H", 2))]),
        "one of 2 parts",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_an_error(lie: str, tmp_path: Path) -> None:
    content, message = LIES[lie]
    path = write(tmp_path / "m.gguf", content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


OTHER_TYPES = sorted(set(gguf.GGMLQuantizationType.__members__) - set(SUPPORTED))

REFUSED: dict[str, tuple[bytes, str]] = {
    "version 1": (raw_gguf(version=1), "version 1"),
    "version 4": (raw_gguf(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "an array of arrays": (
        raw_gguf([pair("nest", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 4, 0))]),
        "'nest' is an array of arrays",
    ),
    "a ternary tensor": (
        raw_gguf([], [tensor_info("a.good"), tensor_info("b.bad", (256,), 34, 32)], bytes(512)),
        r"'b\.bad' has type TQ1_0",
    ),
    "a removed type": (
        raw_gguf([], [tensor_info("t", (32,), 4)], bytes(64)),
        "'t' has type number 4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_we_do_not_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    content, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(write(tmp_path / "m.gguf", content))


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_every_other_tensor_type_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    code = gguf.GGMLQuantizationType[kind].value
    content = raw_gguf([], [tensor_info("blk.0.w", (256,), code)], bytes(4096))
    with pytest.raises(UnsupportedModelError, match=rf"'blk\.0\.w' has type {kind},"):
        read_gguf(write(tmp_path / "m.gguf", content))


def test_every_truncation_is_an_error(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(
        path,
        {"a": ("Q4_0", (2, 64), random_blocks(rng, "Q4_0", (2, 64)))},
        {"k": ("string", "value"), "tokens": ("array", ["a", "bc", "def"]), "n": ("uint16", 3)},
    )
    content = path.read_bytes()
    whole = read_gguf(path).tensors["a"].nbytes
    used = len(content) - (-whole % 32)
    for length in range(used):
        with pytest.raises(CheckpointError):
            read_gguf(write(tmp_path / "cut.gguf", content[:length]))
    assert read_gguf(write(tmp_path / "cut.gguf", content[:used])).tensors["a"].nbytes == whole


def test_a_long_hostile_name_does_not_fill_the_message(tmp_path: Path) -> None:
    content = raw_gguf([], [tensor_info("\n" * 60000, (9,))], F32_DATA)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(write(tmp_path / "m.gguf", content))
    assert len(str(caught.value)) < 600 + len(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["missing", "directory", "pipe"])
def test_what_is_no_file_is_an_error(what: str, tmp_path: Path) -> None:
    path = tmp_path if what == "directory" else tmp_path / "m.gguf"
    if what == "pipe":
        os.mkfifo(path)
    with pytest.raises(ModelError, match=str(path)):
        read_gguf(path)


def test_a_failed_open_leaves_no_map(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", LIES["tensors that overlap"][0])
    with pytest.raises(CheckpointError):
        read_gguf(path)
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


# --- split files


@pytest.fixture
def split(tmp_path: Path, rng: np.random.Generator) -> list[Path]:
    tensors = {f"t{i}": ("F32", (2, 16), random_blocks(rng, "F32", (2, 16))) for i in range(6)}
    write_gguf(tmp_path / "m.gguf", tensors, {"k": ("string", "v")}, split_max_tensors=2)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole(split: list[Path], opened: int) -> None:
    file = read_gguf(split[opened])
    assert list(file.tensors) == [f"t{i}" for i in range(6)]
    assert file.metadata["k"] == "v"
    assert [part.path for part in file.files] == split
    for part in split:
        for tensor in gguf.GGUFReader(part).tensors:
            mine = file.tensors[tensor.name].dequantize()
            np.testing.assert_array_equal(mine, tensor.data.reshape(mine.shape))


def test_a_missing_part_is_named(split: list[Path]) -> None:
    split[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00003\.gguf: part 2 of 3"):
        read_gguf(split[0])


def test_parts_in_the_wrong_order_are_refused(split: list[Path]) -> None:
    second, third = split[1].read_bytes(), split[2].read_bytes()
    split[1].write_bytes(third)
    split[2].write_bytes(second)
    with pytest.raises(CheckpointError, match=r"part 2 .*counted from 0"):
        read_gguf(split[0])


def test_a_part_of_another_count_is_refused(split: list[Path], tmp_path: Path) -> None:
    for index, path in enumerate(split[:2], start=1):
        path.rename(tmp_path / f"x-0000{index}-of-00002.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts, the file name says 2"):
        read_gguf(tmp_path / "x-00001-of-00002.gguf")


def test_a_wrong_tensor_count_is_refused(split: list[Path]) -> None:
    content = split[0].read_bytes()
    key = text("split.tensors.count") + struct.pack("<I", 5)
    assert content.count(key + struct.pack("<i", 6)) == 1
    split[0].write_bytes(content.replace(key + struct.pack("<i", 6), key + struct.pack("<i", 7)))
    with pytest.raises(CheckpointError, match="6 tensors, metadata says 7"):
        read_gguf(split[0])


def test_a_tensor_in_two_parts_is_refused(split: list[Path]) -> None:
    content = split[1].read_bytes()
    split[1].write_bytes(content.replace(text("t2"), text("t0")))
    with pytest.raises(CheckpointError, match="'t0' is in two parts"):
        read_gguf(split[0])


def test_a_part_number_beyond_the_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no part 4 of 3"):
        split_files(tmp_path / "m-00004-of-00003.gguf")


def test_one_part_of_one_is_a_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00001.gguf", raw_gguf())
    assert read_gguf(path).files[0].path == path
