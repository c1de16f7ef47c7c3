"""Requests and rooms for the laws of the runtime, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from steppe.request import LLMGenerationRequest, SamplingParams
from tests.runtime.fakes import EOS, IM_END, VOCAB, fake_runtime

if TYPE_CHECKING:
    from steppe.runtime.rank_runtime import LLMRankRuntime

LONGEST_PROMPT = 14
MOST_TOKENS = 10
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Letters are likely, so that short stops are met; bytes from 128 on are parts of characters.
STOPS = st.text(LETTERS[:6] + "zé", min_size=1, max_size=3)
TOKENS = st.integers(0, VOCAB - 1)
# A letter at the end: a prompt cut inside a character is another test's subject (P41).
PROMPTS = st.one_of(
    st.lists(TOKENS, max_size=LONGEST_PROMPT - 1).map(lambda ids: (*ids, 97)),
    # Few enough that requests share prefixes, and find them in the cache or follow each other.
    st.builds(
        lambda shared, kept, end: (*((shared,) * 20)[:kept], *end, 97),
        st.sampled_from([98, 99]),
        st.integers(1, LONGEST_PROMPT - 3),
        st.lists(TOKENS, max_size=2),
    ),
)


@st.composite
def sampling_params(draw: st.DrawFn, *, most_sequences: int = 1) -> SamplingParams:
    """Every field that shapes tokens, text, logprobs or the end."""
    max_tokens = draw(st.one_of(st.integers(1, MOST_TOKENS), st.just(0), st.none()))
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": draw(st.integers(0, 2**64 - 1)),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 2.0])),
        "top_k": draw(st.sampled_from([0, 1, 5, 40])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.3])),
        "min_p": draw(st.sampled_from([0.0, 0.05])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.0, 1.5, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.0, 1.5, -1.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.0, 1.0])),
        "logit_bias": draw(
            st.one_of(
                st.none(),
                st.dictionaries(TOKENS, st.sampled_from([-100.0, 3.0, 8.0]), max_size=6),
                st.just(dict.fromkeys(range(128, 256), 6.0)),  # characters in pieces
                st.just({EOS: 6.0, IM_END: 5.0}),
            )
        ),
        "min_tokens": draw(st.integers(0, max_tokens if max_tokens is not None else 3)),
        "stop": draw(st.lists(STOPS, max_size=3)),
        "stop_token_ids": draw(st.lists(TOKENS, max_size=3)),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0, 1, 4])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0, 3])),
        "n": draw(st.integers(1, most_sequences)),
        "skip_special_tokens": draw(st.booleans()),
        "include_stop": draw(st.booleans()),
    }
    if max_tokens == 0 and fields["prompt_logprobs"] is None:
        fields["prompt_logprobs"] = 1
    return SamplingParams(**fields)


@st.composite
def requests(draw: st.DrawFn, *, most_sequences: int = 1) -> LLMGenerationRequest:
    """One request."""
    params = draw(sampling_params(most_sequences=most_sequences))
    return LLMGenerationRequest(
        draw(PROMPTS),
        params=params,
        cache_lookup=draw(st.sampled_from(["use", "use", "use", "bypass"])),
        cache_commit=draw(st.sampled_from(["all", "all", "prompt", "none"])),
        cache_salt=draw(st.sampled_from(["", "", "", "mine"])),
    )


@dataclass
class Sizes:
    """A room that holds the longest sequence, and not always much more."""

    page_size: int
    pages: int
    max_step_tokens: int
    max_batch_size: int
    overcommit: bool
    cache: bool
    spill: int

    def runtime(self) -> LLMRankRuntime:
        """An empty runtime of these sizes."""
        runtime, _ = fake_runtime(
            pages=self.pages,
            page_size=self.page_size,
            max_step_tokens=self.max_step_tokens,
            max_batch_size=self.max_batch_size,
            cache=self.cache,
            spill=self.spill * self.page_size * 8 * 2,
        )
        runtime.overcommit = self.overcommit
        return runtime


@st.composite
def sizes(draw: st.DrawFn, *, seats: int) -> Sizes:
    """Sizes for ``seats`` sequences; the context is the pool's, at most 40 tokens."""
    page_size = draw(st.sampled_from([1, 3, 8, 16]))
    least = -(-(LONGEST_PROMPT + MOST_TOKENS) // page_size)
    return Sizes(
        page_size,
        draw(st.integers(least, 40 // page_size)),
        draw(st.one_of(st.integers(1, 8), st.just(64))),
        seats,
        draw(st.booleans()),
        draw(st.sampled_from([True, True, True, False])),
        draw(st.sampled_from([0, 0, 3, 50])),
    )
