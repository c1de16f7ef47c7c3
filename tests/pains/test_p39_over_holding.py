"""P39: a whole stop-length window was withheld at every step. Only a live partial match may be.

P40, stop part: text held back at the end is delivered, and stream and whole text agree.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steppe.text.pipeline import TextPipeline
from steppe.text.stop import StopMatcher
from tests.text.conftest import byte_level_tokenizer

STOP = "</tool_call_that_is_very_long>"
TOKENIZER = byte_level_tokenizer(adds_bos=False)


def test_text_that_starts_no_stop_is_not_held() -> None:
    matcher = StopMatcher([STOP, "\n\nHuman:"])
    for word in ("The ", "capital ", "of ", "France ", "is "):
        assert matcher.push(word) == (word, None)


def test_a_false_start_is_released_at_once() -> None:
    matcher = StopMatcher([STOP])
    assert matcher.push("a </tool") == ("a ", None)
    assert matcher.push("_") == ("", None)
    assert matcher.push("box") == ("</tool_box", None)


def test_what_is_held_at_the_end_is_delivered() -> None:
    pipeline = TextPipeline(TOKENIZER, [STOP])
    text = "answer </tool_call"
    streamed = "".join(pipeline.push([i]).text for i in TOKENIZER.encode(text))
    assert streamed == "answer "
    last = pipeline.finish()
    assert (streamed + last.text, last.stop) == (text, None)


@given(text=st.text("</tol_ca>x", max_size=60))
def test_stream_equals_whole(text: str) -> None:
    stop = "</tool>"
    pipeline = TextPipeline(TOKENIZER, [stop])
    streamed = "".join(pipeline.push([i]).text for i in TOKENIZER.encode(text))
    assert streamed + pipeline.finish().text == text.split(stop)[0]
