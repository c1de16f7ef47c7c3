"""The ragged batch a step becomes, and how rows of its output find their way back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from steppe.backends.base import StepOutput
from steppe.backends.tape import CacheGroup, CacheSpec
from steppe.errors import ExecutionError
from steppe.request import SamplingParams, TokenLogprob
from steppe.runtime.decoding.strategy import DecodeRows
from steppe.runtime.executor import SequenceRows, StepExecutor, StepOutcome
from steppe.runtime.kv.pool import PageLease, PagePool
from steppe.runtime.sequence import SequenceState, TextState
from steppe.stepping.types import ResidentRef, SequenceIdentity, SlotSeed
from steppe.text.pipeline import TextPipeline
from tests.runtime.fakes import byte_tokenizer, no_prefix

if TYPE_CHECKING:
    from steppe.backends.base import SampleBatch, StepInput

PAGE_SIZE = 4
TOKENIZER = byte_tokenizer()


class Recorder:
    """A backend that keeps what it is given and samples row numbers."""

    name = "recorder"
    page_size = PAGE_SIZE
    kept_rows = 0
    groups = tuple(CacheGroup(CacheSpec(1, 4, window=w), (i,)) for i, w in enumerate((None, 8)))

    def launch(self, step: StepInput, sample: SampleBatch) -> Recorder:
        self.step, self.sample = step, sample
        return self

    def wait(self) -> StepOutput:
        rows = len(self.step.logit_rows)
        return StepOutput(np.arange(rows, dtype=np.int32), np.zeros(rows, np.float32))


def sequence_of(
    pool: PagePool, tokens: list[int], computed: int, slot: int = 0, **params: Any
) -> SequenceState:
    seed = SlotSeed(1, slot, tuple(tokens), SamplingParams(**params), 5, 9, frozenset({250}), slot)
    lease = pool.lease(len(tokens) + 1)
    assert lease is not None
    text = TextState(TextPipeline(TOKENIZER), [])
    identity = SequenceIdentity(1, ResidentRef(slot, 1))
    sequence = SequenceState(seed, identity, lease, text, no_prefix())
    sequence.computed = computed
    return sequence


@pytest.fixture
def pool() -> PagePool:
    """Pages whose numbers differ between the groups."""
    pool = PagePool([20, 24], PAGE_SIZE)
    taken = pool.take(1)
    assert taken is not None
    pool.groups[1].free.reverse()
    return pool


def slots(lease: PageLease, group: int, positions: range) -> list[int]:
    pages = lease.pages[group]
    return [pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in positions]


def test_one_ragged_batch_of_a_decode_and_a_chunk(pool: PagePool) -> None:
    decoding = sequence_of(pool, [10, 11, 12, 13, 14, 15], 5)
    chunk = sequence_of(pool, list(range(30, 43)), 3, slot=1)
    backend = Recorder()
    StepExecutor(backend).execute(
        [
            SequenceRows(decoding, (15,), (), (0,), DecodeRows((15,), (0,))),
            SequenceRows(chunk, (33, 34, 35, 36)),
        ],
        outputs=("final_hidden",),
    )
    step = backend.step
    assert step.token_ids.tolist() == [15, 33, 34, 35, 36]
    assert step.positions.tolist() == [[5, 3, 4, 5, 6]]
    assert step.query_start.tolist() == [0, 1, 5]
    assert step.context_len.tolist() == [6, 7]
    assert step.logit_rows.tolist() == [0]
    assert step.outputs == ("final_hidden",)
    for group in range(2):
        table = step.block_tables[group]
        assert table.shape == (2, 4)
        assert table[0].tolist() == [*decoding.lease.pages[group], -1, -1]
        assert table[1].tolist() == list(chunk.lease.pages[group])
        assert step.slot_mappings[group].tolist() == [
            *slots(decoding.lease, group, range(5, 6)),
            *slots(chunk.lease, group, range(3, 7)),
        ]
    assert step.block_tables[0].tolist() != step.block_tables[1].tolist()
    assert {array.dtype for array in (step.token_ids, step.positions, step.query_start)} == {
        np.dtype(np.int32)
    }
    assert step.slot_mappings[0].dtype == np.int64
    assert step.context_len.dtype == np.int32


def test_rows_say_whose_they_are_and_what_they_predict(pool: PagePool) -> None:
    scoring = sequence_of(pool, [1, 2, 3, 4], 0, temperature=0.5, logprobs=1, prompt_logprobs=3)
    other = sequence_of(pool, [7, 8], 1, slot=1, temperature=0.25)
    backend = Recorder()
    outcome = StepExecutor(backend).execute(
        [
            SequenceRows(scoring, (1, 2, 3, 4), (0, 1, 2), (3,)),
            SequenceRows(other, (8,), (), (0,), DecodeRows((8,), (0,))),
        ]
    )
    rows = backend.sample.rows
    assert backend.step.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert rows["position"].tolist() == [1, 2, 3, 4, 2]
    assert rows["target"].tolist() == [2, 3, 4, -1, -1]
    assert rows["num_logprobs"].tolist() == [3, 3, 3, 1, -1]
    assert rows["temperature"].tolist() == [0.5, 0.5, 0.5, 0.5, 0.25]
    assert rows["sequence_index"].tolist() == [0, 0, 0, 0, 1]
    assert [outcome.samples(part)[0] for part in range(2)] == [[3], [4]]
    assert (backend.sample.bias, backend.sample.history, backend.sample.banned) == (None,) * 3


def test_extras_stand_beside_sampled_rows_only(pool: PagePool) -> None:
    rich = sequence_of(
        pool,
        [1, 2, 3],
        0,
        prompt_logprobs=0,
        logit_bias={9: 2.0},
        presence_penalty=1.0,
        min_tokens=1,
    )
    plain = sequence_of(pool, [7, 8], 1, slot=1)
    backend = Recorder()
    StepExecutor(backend).execute(
        [
            SequenceRows(rich, (1, 2, 3), (0, 1), (2,)),
            SequenceRows(plain, (8,), (), (0,), DecodeRows((8,), (0,))),
        ]
    )
    sample = backend.sample
    for extra in (sample.bias, sample.history, sample.banned):
        assert extra is not None
        assert [one is not None for one in extra] == [False, False, True, False]
    assert sample.banned is not None
    assert sample.banned[2] is not None
    assert sample.banned[2].tolist() == [250]


def test_building_a_step_changes_no_sequence(pool: PagePool) -> None:
    sequence = sequence_of(pool, [1, 2, 3], 1)
    backend = Recorder()
    StepExecutor(backend).execute([SequenceRows(sequence, (2, 3), (), (1,))])
    assert (sequence.computed, sequence.tokens) == (1, [1, 2, 3])


def test_a_failing_backend_is_the_callers_affair(pool: PagePool) -> None:
    class Failing(Recorder):
        def wait(self) -> StepOutput:
            raise ExecutionError("the device is gone")

    sequence = sequence_of(pool, [1, 2, 3], 1)
    with pytest.raises(ExecutionError, match="the device is gone"):
        StepExecutor(Failing()).execute([SequenceRows(sequence, (2, 3), (), (1,))])


# ---- the way back --------------------------------------------------------------------------------


def outcome_of(pool: PagePool, output: StepOutput, **params: Any) -> StepOutcome:
    """Of somebody else's row, and two rows of who asks for ``params``."""
    other = sequence_of(pool, [8], 0, slot=1)
    sequence = sequence_of(pool, [1, 2], 0, **params)
    return StepOutcome(
        (SequenceRows(other, (8,), (), (0,)), SequenceRows(sequence, (1, 2), (0,), (1,))), output
    )


OUTPUT = StepOutput(
    sampled=np.array([99, 2, 5], np.int32),
    logprob=np.array([-9.0, -1.5, -4.0], np.float32),
    top_ids=np.array([[0, 0, 0], [2, 8, -1], [7, 3, 6]], np.int32),
    top_logprobs=np.array([[0, 0, 0], [-1.5, -2.0, -np.inf], [-0.5, -1.0, -2.0]], np.float32),
)


def test_scores_and_samples_take_their_own_rows(pool: PagePool) -> None:
    outcome = outcome_of(pool, OUTPUT, logprobs=3, prompt_logprobs=2)
    assert outcome.scores(1) == [TokenLogprob(2, -1.5, ((2, -1.5), (8, -2.0)))]
    tokens, logprobs = outcome.samples(1)
    assert tokens == [5]
    # The sampled token is not among the likeliest: it comes last.
    assert logprobs == [TokenLogprob(5, -4.0, ((7, -0.5), (3, -1.0), (6, -2.0), (5, -4.0)))]


@pytest.mark.parametrize(("count", "top"), [(0, ((5, -4.0),)), (1, ((7, -0.5), (5, -4.0)))])
def test_a_row_is_cut_to_what_its_request_asked_for(
    pool: PagePool, count: int, top: tuple[tuple[int, float], ...]
) -> None:
    outcome = outcome_of(pool, OUTPUT, logprobs=count, prompt_logprobs=0)
    assert outcome.samples(1)[1] == [TokenLogprob(5, -4.0, top)]
    assert outcome.scores(1) == [TokenLogprob(2, -1.5, ((2, -1.5),))]


def test_padding_of_a_shorter_row_is_left_out(pool: PagePool) -> None:
    outcome = outcome_of(pool, OUTPUT, prompt_logprobs=3)
    assert outcome.scores(1)[0].top == ((2, -1.5), (8, -2.0))


def test_a_request_without_logprobs_gets_none_beside_one_with(pool: PagePool) -> None:
    assert outcome_of(pool, OUTPUT).samples(1) == ([5], [None])
    bare = replace(OUTPUT, logprob=None, top_ids=None, top_logprobs=None)
    assert outcome_of(pool, bare).samples(1) == ([5], [None])
