"""Ids in, deliverable text out: detokenizer and stop matcher together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steppe.text.pipeline import TextDelta, TextPipeline
from tests.text.corpus import any_text
from tests.text.test_stop import expected

if TYPE_CHECKING:
    from steppe.text.tokenizer import Tokenizer

shared_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def texts_with_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text and stops, most of which are cut out of it, some from inside its characters' reach."""
    text = draw(any_text)
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        if text and draw(st.booleans()):
            at = draw(st.integers(0, len(text) - 1))
            stops.append(text[at : at + draw(st.integers(1, 5))])
        else:
            stops.append(draw(st.text(min_size=1, max_size=3)))
    return text, stops


@given(drawn=texts_with_stops(), include_stop=st.booleans(), step=st.integers(1, 4))
@shared_fixtures
def test_streamed_text_is_the_decoded_text_up_to_the_first_stop(
    byte_level: Tokenizer, drawn: tuple[str, list[str]], include_stop: bool, step: int
) -> None:
    text, stops = drawn
    ids = byte_level.encode(text)
    pipeline = TextPipeline(byte_level, stops, include_stop=include_stop)
    deltas = [pipeline.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    deltas.append(pipeline.finish())
    whole = "".join(delta.text for delta in deltas)
    assert (whole, deltas[-1].stop) == expected(text, stops, include_stop)
    assert pipeline.stop == deltas[-1].stop


@given(data=st.data(), stops=st.lists(st.sampled_from(["\ufffd", "a", " b", "\ufffd\ufffd", "e"])))
@shared_fixtures
def test_any_ids_even_broken_ones(
    sentencepiece_style: Tokenizer, data: st.DataObject, stops: list[str]
) -> None:
    """A stop may match the replacement character that only ``finish`` brings out."""
    size = sentencepiece_style.vocab_size
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=25))
    pipeline = TextPipeline(sentencepiece_style, stops)
    whole = "".join([pipeline.push([token_id]).text for token_id in ids])
    last = pipeline.finish()
    assert (whole + last.text, last.stop) == expected(
        sentencepiece_style.decode(ids), stops, include_stop=False
    )


@given(text=any_text, cut=st.integers(0, 30))
@shared_fixtures
def test_a_copy_resumes_where_the_original_was(byte_level: Tokenizer, text: str, cut: int) -> None:
    ids = byte_level.encode(text)
    pipeline = TextPipeline(byte_level, ["\n", "cat"])
    pipeline.push(ids[:cut])
    twin = pipeline.copy()
    assert twin.push(ids[cut:]) == pipeline.push(ids[cut:])
    assert twin.finish() == pipeline.finish()


def test_control_tokens_can_be_shown_and_stopped_at(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b", parse_special=True)
    assert TextPipeline(byte_level, ["<|im_end|>"]).push(ids) == TextDelta("ab", None)
    shown = TextPipeline(byte_level, ["<|im_end|>"], skip_special_tokens=False)
    assert shown.push(ids) == TextDelta("a", "<|im_end|>")
