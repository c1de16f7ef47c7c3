"""The output of a request: bounded, in order, one end, a reader that may be slow or gone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.errors import BackpressureError, NetworkError, ReplicaLostError, RequestCancelledError
from steppe.replicas.output import OutputChannel, joined, whole_response
from steppe.replicas.vocabulary import TokenChunk
from steppe.request import FinishReason, TokenLogprob, Usage
from steppe.testing import VirtualLoop, virtually
from tests.replicas.helpers import settle

STOP = FinishReason.STOP


def token(number: int, index: int = 0) -> TokenChunk:
    return TokenChunk(index, f"{number} ", (number,), (TokenLogprob(number, -1.0),))


def end(index: int = 0, usage: Usage | None = None) -> TokenChunk:
    return TokenChunk(index, finished=True, finish_reason=STOP, usage=usage)


async def drain(output: OutputChannel) -> list[TokenChunk]:
    chunks = []
    while (chunk := await output.pop()) is not None:
        chunks.append(chunk)
    return chunks


def test_chunks_come_as_they_were_written_to_a_reader_who_keeps_up() -> None:
    async def main(_: VirtualLoop) -> None:
        output = OutputChannel()
        assert not output.begun
        reader = asyncio.ensure_future(drain(output))
        for number in range(3):
            output.push(token(number))
            await settle(3)
        output.push(end(usage=Usage(1, 3)))
        output.close()
        assert await reader == [*map(token, range(3)), end(usage=Usage(1, 3))]
        assert output.begun
        assert output.done

    virtually(main)


def test_the_first_end_stands() -> None:
    async def main(_: VirtualLoop) -> None:
        output = OutputChannel()
        output.push(token(1))
        ends = []
        output.on_end = ends.append
        output.close(ReplicaLostError("gone"))
        output.close()
        output.close(NetworkError("too late"))
        assert ends == [output.error]
        output.push(token(2))
        assert await output.pop() == token(1)
        for _ in range(2):
            with pytest.raises(ReplicaLostError, match="gone"):
                await output.pop()
        assert isinstance(output.error, ReplicaLostError)

    virtually(main)


def test_a_reader_who_gives_up_is_released_and_the_writer_is_told_once() -> None:
    async def main(_: VirtualLoop) -> None:
        told = []
        output = OutputChannel()
        output.on_cancel = lambda: told.append(1)
        reader = asyncio.ensure_future(drain(output))
        await settle()
        output.cancel()
        output.cancel()
        with pytest.raises(RequestCancelledError):
            await reader
        output.push(token(1))
        with pytest.raises(RequestCancelledError):
            await output.pop()
        assert told == [1]

    virtually(main)


def test_giving_up_after_the_end_changes_nothing() -> None:
    async def main(_: VirtualLoop) -> None:
        output = OutputChannel()
        output.on_cancel = lambda: 1 / 0
        output.push(end(usage=Usage(1, 0)))
        output.close()
        output.cancel()
        assert await drain(output) == [end(usage=Usage(1, 0))]

    virtually(main)


def test_acceptance_is_told_once_and_so_is_what_came_instead() -> None:
    async def main(_: VirtualLoop) -> None:
        output = OutputChannel()
        waiting = asyncio.ensure_future(output.accepted())
        await settle()
        assert not waiting.done()
        output.accept()
        output.accept()
        await waiting
        output.close(NetworkError("broken at once"))
        await output.accepted()
        with pytest.raises(NetworkError):
            await output.pop()

        output = OutputChannel()
        waiting = asyncio.ensure_future(output.accepted())
        await settle()
        output.close(BackpressureError("backlog_full", "full"))
        output.accept()
        for call in (waiting, output.accepted()):
            with pytest.raises(BackpressureError):
                await call

    virtually(main)


def test_another_writer_may_take_over_until_there_was_a_chunk() -> None:
    async def main(_: VirtualLoop) -> None:
        failures: list[Exception] = []

        def take_over(error: Exception) -> bool:
            failures.append(error)
            return len(failures) < 2

        output = OutputChannel()
        output.on_failure = take_over
        output.close(ReplicaLostError("first"))
        assert not output.done
        output.push(token(1))
        output.close(ReplicaLostError("second"))
        assert output.done
        assert len(failures) == 1, "nobody is asked after a chunk"

        output = OutputChannel()
        output.on_failure = take_over
        output.close(ReplicaLostError("third"))
        assert isinstance(output.error, ReplicaLostError)
        assert len(failures) == 2

    virtually(main)


def test_two_readers_are_one_too_many() -> None:
    async def main(_: VirtualLoop) -> None:
        output = OutputChannel()
        first = asyncio.ensure_future(output.pop())
        await settle()
        with pytest.raises(RuntimeError, match="reader"):
            await output.pop()
        first.cancel()
        await settle()
        output.close()
        assert await output.pop() is None

    virtually(main)


@given(
    script=st.lists(st.one_of(st.integers(0, 2), st.none()), max_size=60),
    capacity=st.integers(1, 5),
)
def test_however_slow_the_reader_nothing_is_lost_or_doubled(
    script: list[int | None], capacity: int
) -> None:
    """A number writes a token of that sequence, None reads a chunk."""

    async def main(_: VirtualLoop) -> None:
        output = OutputChannel(capacity)
        written: dict[int, list[int]] = {0: [], 1: [], 2: []}
        read: list[TokenChunk] = []
        for number, step in enumerate(script):
            if step is not None:
                output.push(token(number, step))
                written[step].append(number)
            elif sum(map(len, written.values())) > sum(len(c.token_ids) for c in read):
                chunk = await output.pop()
                assert chunk is not None
                read.append(chunk)
        for index in (1, 0):
            output.push(end(index))
        output.push(end(2, Usage(1, 5)))
        output.close()
        tail = await drain(output)
        read += tail
        assert len(tail) <= max(capacity, 3) + 3  # a chunk for each of three sequences, twice
        assert [chunk.usage for chunk in read if chunk.usage] == [Usage(1, 5)]
        assert read[-1].usage
        answer = whole_response(read)
        for output_ in answer.outputs:
            assert list(output_.token_ids) == written[output_.index]
            assert output_.text == "".join(f"{one} " for one in written[output_.index])
            assert [p.token_id for p in output_.logprobs or ()] == written[output_.index]

    virtually(main)


def test_joined_keeps_logprobs_that_are_there_and_the_ending() -> None:
    plain = TokenChunk(0, "a", (1,))
    (one,) = joined([plain, token(2), end(usage=Usage(1, 2))])
    assert (one.text, one.token_ids) == ("a2 ", (1, 2))
    assert one.logprobs == (TokenLogprob(2, -1.0),)
    assert (one.finished, one.finish_reason, one.usage) == (True, STOP, Usage(1, 2))
    assert joined([plain]) == [plain]


def test_a_response_has_what_only_the_end_knows() -> None:
    scores = (None, TokenLogprob(7, -2.0))
    last = TokenChunk(
        1, finished=True, finish_reason=STOP, usage=Usage(2, 2), prompt_logprobs=scores
    )
    answer = whole_response([token(1), token(2, 1), end(), last])
    assert [one.prompt_logprobs for one in answer.outputs] == [scores, scores]
    assert answer.usage == Usage(2, 2)
    vector = TokenChunk(finished=True, finish_reason=STOP, usage=Usage(2, 0), embedding=(0.6, 0.8))
    assert whole_response([vector]).outputs[0].embedding == (0.6, 0.8)


@pytest.mark.parametrize(
    "chunks", [[], [token(1)], [token(1), end()], [token(1), end(1, Usage(1, 1))]]
)
def test_half_an_answer_is_none(chunks: list[TokenChunk]) -> None:
    with pytest.raises(NetworkError, match="before its end"):
        whole_response(chunks)
