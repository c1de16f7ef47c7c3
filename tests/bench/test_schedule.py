"""Schedules: what a seed fixes, what a rate changes, and traces from files."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.bench.schedule import WORDS, Arrival, Lengths, poisson, prompt_text, read_trace
from steppe.errors import ConfigError
from steppe.formats.checkpoint import open_checkpoint
from steppe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

FIXED = Lengths(10, 10)
RANGE = Lengths(3, 300)


@given(st.integers(), st.floats(0.01, 1e4), st.integers(1, 50))
def test_a_schedule_is_its_seed(seed: int, rate: float, count: int) -> None:
    first = poisson(rate, count, RANGE, RANGE, seed)
    assert first == poisson(rate, count, RANGE, RANGE, seed)
    assert [one.index for one in first] == list(range(count))
    assert first[0].at == 0.0
    assert all(a.at <= b.at for a, b in itertools.pairwise(first))
    assert all(3 <= one.prompt_tokens <= 300 and 3 <= one.output_tokens <= 300 for one in first)


@given(st.integers(), st.floats(0.1, 100), st.floats(0.1, 100))
def test_a_rate_only_stretches_time(seed: int, one: float, other: float) -> None:
    a, b = poisson(one, 20, RANGE, FIXED, seed), poisson(other, 20, RANGE, FIXED, seed)
    assert [x.prompt_tokens for x in a] == [x.prompt_tokens for x in b]
    for x, y in zip(a, b, strict=True):
        assert x.at * one == pytest.approx(y.at * other)
    assert [x.at for x in poisson(one, 20, FIXED, FIXED, seed)] == [x.at for x in a]


def test_gaps_are_exponential(seed: int) -> None:
    count, rate = 20_000, 4.0
    times = [one.at for one in poisson(rate, count + 1, FIXED, FIXED, seed)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = math.fsum(gaps) / count
    # Mean and deviation of an exponential law are both 1/rate; six standard errors are allowed.
    assert mean == pytest.approx(1 / rate, rel=6 / math.sqrt(count))
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / count
    assert math.sqrt(variance) == pytest.approx(1 / rate, rel=6 * math.sqrt(2 / count))
    beyond = sum(gap > 2 / rate for gap in gaps) / count
    assert beyond == pytest.approx(math.exp(-2), abs=6 * math.sqrt(0.25 / count))


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert {one.at for one in poisson(math.inf, 9, FIXED, FIXED, 0)} == {0.0}


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_is_more_than_nothing(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        poisson(rate, 1, FIXED, FIXED, 0)
    with pytest.raises(ConfigError, match="requests"):
        poisson(1.0, 0, FIXED, FIXED, 0)


def test_lengths_are_read_as_written() -> None:
    assert Lengths.parse("128") == Lengths(128, 128)
    assert Lengths.parse("64:256") == Lengths(64, 256)


@pytest.mark.parametrize("text", ["", "x", "0", "-4", "9:3", "1:2:3", "1.5", ":7"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Lengths.parse(text)


def test_a_trace_is_read_in_order_and_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,who,output_tokens,prompt_tokens\n107.5,b,2,20\n100,a,1,10\n\n")
    assert read_trace(path) == (Arrival(0, 0.0, 10, 1), Arrival(1, 7.5, 20, 2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "column 'at'"),
        ("at,prompt_tokens\n1,2\n", "column 'output_tokens'"),
        ("at,prompt_tokens,output_tokens\n", "no arrivals"),
        ("at,prompt_tokens,output_tokens\n1,2\n", "line 2"),
        ("at,prompt_tokens,output_tokens\n1,2,3\nx,2,3\n", "line 3"),
        ("at,prompt_tokens,output_tokens\nnan,2,3\n", "out of range"),
        ("at,prompt_tokens,output_tokens\n1,0,3\n", "out of range"),
    ],
)
def test_a_broken_trace_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(path)


@given(st.integers(), st.integers(1, 60), st.integers(0, 80))
def test_prompts_share_their_prefix_and_nothing_else(seed: int, tokens: int, prefix: int) -> None:
    one, other = (
        prompt_text(Arrival(index, 0.0, tokens, 1), prefix, seed, run).split()
        for index, run in ((0, 1), (1, 1))
    )
    again = prompt_text(Arrival(0, 0.0, tokens, 1), prefix, seed, 2).split()
    shared = min(prefix, tokens)
    assert len(one) == len(other) == len(again) == tokens
    assert one[:shared] == other[:shared] == again[:shared]
    if tokens - shared > 20:  # the same by chance: one in a hundred to the twentieth
        assert one[shared:] != other[shared:]
        assert one[shared:] != again[shared:]


def test_a_word_is_a_token(smollm2_gguf: Path, gemma3_gguf: Path, rng: np.random.Generator) -> None:
    assert len(set(WORDS)) == len(WORDS)
    for path in (smollm2_gguf, gemma3_gguf):
        tokenizer = Tokenizer.from_checkpoint(open_checkpoint(path))
        text = prompt_text(Arrival(0, 0.0, 200, 1), 50, int(rng.integers(1 << 30)))
        assert abs(len(tokenizer.encode(text)) - 200) <= 2  # a BOS, and a first word without space
