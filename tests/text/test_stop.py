"""Stop strings: the earliest occurrence ends the text, however the text was cut up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import InvalidRequestError
from steppe.text.stop import StopMatcher

# Few letters, so that stops overlap, nest and nearly match.
letters = st.text("ab\n<", max_size=14)
stop_lists = st.lists(st.text("ab\n<", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule, stated on the whole text."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    at, size, stop = min(found)
    return text[: at + size if include_stop else at], stop


def streamed(matcher: StopMatcher, chunks: list[str]) -> tuple[str, str | None]:
    text, stop = "", None
    for chunk in chunks:
        more, stop = matcher.push(chunk)
        text += more
    more, stop = matcher.flush()
    return text + more, stop


@given(chunks=st.lists(letters, max_size=12), stops=stop_lists, include_stop=st.booleans())
def test_every_chunking_gives_the_text_before_the_earliest_match(
    chunks: list[str], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    assert streamed(matcher, chunks) == expected("".join(chunks), stops, include_stop)


@given(text=letters, stops=stop_lists)
def test_only_what_a_stop_may_still_claim_is_held(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    for char in text:
        _, stop = matcher.push(char)
        if stop is not None:
            break
        held = matcher.held
        assert held == "" or any(s.startswith(held) or s in held for s in stops)
    else:
        ends = [text[i:] for i in range(len(text))]
        claimed = [e for e in ends if any(s.startswith(e) and s != e for s in stops)]
        assert matcher.held == max(claimed, key=len, default="")


@given(text=letters, more=letters, stops=stop_lists)
def test_a_copy_goes_its_own_way(text: str, more: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    first, _ = matcher.push(text)
    twin = matcher.copy()
    assert streamed(twin, [more]) == streamed(matcher, [more])
    assert first == StopMatcher(stops).push(text)[0]


def test_of_stops_that_start_together_the_shortest_ends_the_text() -> None:
    assert streamed(StopMatcher(["abc", "ab"]), ["xabc"]) == ("x", "ab")
    assert streamed(StopMatcher(["abc", "ab"]), list("xabc")) == ("x", "ab")


def test_a_complete_stop_waits_for_an_earlier_one() -> None:
    matcher = StopMatcher(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", None)
    assert matcher.copy().push("d") == ("", "abcd")
    assert matcher.copy().push("e") == ("a", "bc")
    assert matcher.copy().flush() == ("a", "bc")


def test_after_a_match_nothing_comes_out() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", ".")
    assert matcher.push("c") == ("", ".")
    assert matcher.flush() == ("", ".")
    assert matcher.matched == "."


def test_without_stops_text_passes_through() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ("", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.field == "stop"
