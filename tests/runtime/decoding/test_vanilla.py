"""One token a step."""

from __future__ import annotations

from steppe.runtime.decoding.strategy import Acceptance, DecodeRows, DecodingKvHeadroom
from steppe.runtime.decoding.vanilla import VanillaDecoding
from steppe.runtime.kv.pool import PagePool
from tests.runtime.test_executor import sequence_of


def test_it_computes_the_last_token_and_takes_the_next() -> None:
    strategy = VanillaDecoding()
    sequence = sequence_of(PagePool([4], 4), [4, 5, 6], 2)
    assert (strategy.name, strategy.is_speculative) == ("vanilla", False)
    assert strategy.required_kv_headroom() == DecodingKvHeadroom(base=1, draft=0)
    assert strategy.query_length(sequence) == 1
    rows = strategy.rows(sequence, 1)
    assert rows == DecodeRows((6,), (0,))
    assert strategy.accept(sequence, rows, [9]) == Acceptance(((0, 9),), computed=1)
    strategy.on_evict(sequence)
    assert (sequence.tokens, sequence.computed) == ([4, 5, 6], 2)
