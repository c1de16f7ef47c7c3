"""Token streams: merged without loss, ended once, woken once."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.request import FinishReason, TokenLogprob, Usage
from steppe.stepping.types import TokenDelta
from steppe.streaming import Finish, StreamChannel, StreamChunk, Wakeups, deliver

STOP = Finish(FinishReason.STOP, "end", Usage(1, 2))


def delta(*ids: int, text: str | None = None, logprobs: bool = False) -> TokenDelta:
    return TokenDelta(
        ids,
        "".join(f"<{one}>" for one in ids) if text is None else text,
        tuple(TokenLogprob(one, -1.0) for one in ids) if logprobs else None,
    )


def test_what_a_slow_reader_has_not_taken_is_merged() -> None:
    channel = StreamChannel()
    for number in range(5):
        deliver(channel, delta(number, logprobs=True))
    deliver(channel, delta(5, logprobs=True), STOP)
    chunk = channel.try_pop()
    assert chunk == StreamChunk(
        text="<0><1><2><3><4><5>",
        token_ids=(0, 1, 2, 3, 4, 5),
        logprobs=tuple(TokenLogprob(one, -1.0) for one in range(6)),
        finished=True,
        finish_reason=FinishReason.STOP,
        stop_reason="end",
        usage=Usage(1, 2),
    )
    assert channel.try_pop() is None


def test_nothing_is_written_for_nothing() -> None:
    channel = StreamChannel()
    deliver(channel, None)
    deliver(channel, delta())
    deliver(None, delta(1))
    assert channel.try_pop() is None
    deliver(channel, delta(text="text alone"))
    deliver(channel, delta(7, text=""))
    assert channel.try_pop() == StreamChunk(text="text alone", token_ids=(7,))


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), max_size=3), st.booleans()),
    max_size=40,
)


@given(STEPS)
def test_chunks_of_each_sequence_add_up_however_they_are_read(
    steps: list[tuple[int, list[int], bool]],
) -> None:
    channel = StreamChannel()
    written: dict[int, list[int]] = {index: [] for index in range(4)}
    read: dict[int, list[int]] = {index: [] for index in range(4)}
    text = dict.fromkeys(range(4), "")
    ended: list[int] = []

    def pop() -> bool:
        chunk = channel.try_pop()
        if chunk is None:
            return False
        assert chunk.index not in ended
        read[chunk.index] += chunk.token_ids
        text[chunk.index] += chunk.text
        if chunk.finished:
            ended.append(chunk.index)
        return True

    for index, ids, reads in steps:
        deliver(channel, delta(*ids), index=index)
        written[index] += ids
        if reads:
            pop()
    for index in range(4):
        end = Finish(FinishReason.LENGTH, closes_channel=index == 3)
        deliver(channel, delta(index), end, index=index)
        written[index].append(index)
        assert channel.finished == (index == 3)
    while pop():
        pass
    assert read == written
    assert text == {index: "".join(f"<{one}>" for one in ids) for index, ids in written.items()}
    assert sorted(ended) == [0, 1, 2, 3]
    assert channel.finish_reason is FinishReason.LENGTH


def test_the_terminal_chunk_is_there_before_finished_is_seen() -> None:
    for _ in range(200):
        channel = StreamChannel()
        writer = threading.Thread(target=deliver, args=(channel, delta(1), STOP))
        writer.start()
        while not channel.finished:
            pass
        chunk = channel.try_pop()
        assert chunk is not None
        assert chunk.finished
        writer.join()


def test_the_first_finish_stands_and_nothing_follows_it() -> None:
    channel = StreamChannel()
    deliver(channel, None, STOP)
    channel.finish(FinishReason.ERROR)
    deliver(channel, delta(1), Finish(FinishReason.CANCELLED))
    assert channel.finish_reason is FinishReason.STOP
    assert channel.try_pop() is not None
    assert channel.try_pop() is None


def test_cancelled_and_finished_are_different_things() -> None:
    channel = StreamChannel()
    deliver(channel, delta(1))
    channel.cancel()
    channel.cancel()
    assert channel.cancelled
    assert not channel.finished
    assert channel.wait_pop(0) is not None, "what was there can still be read"
    assert channel.wait_pop() is None, "and nobody waits for more"
    channel.finish(FinishReason.CANCELLED)
    assert channel.finish_reason is FinishReason.CANCELLED


def test_wait_pop_waits_times_out_and_wakes() -> None:
    channel = StreamChannel()
    assert channel.wait_pop(0.001) is None
    got: list[StreamChunk | None] = []
    for wake in (lambda: deliver(channel, delta(1)), channel.cancel):
        reader = threading.Thread(target=lambda: got.append(channel.wait_pop(10)))
        reader.start()
        wake()
        reader.join(10)
        assert not reader.is_alive()
    assert got == [StreamChunk(text="<1>", token_ids=(1,)), None]


def test_consume_reads_to_the_end() -> None:
    channel = StreamChannel()
    got: list[StreamChunk] = []
    reader = threading.Thread(target=channel.consume, args=(got.append,))
    reader.start()
    for number in range(100):
        deliver(channel, delta(number))
    deliver(channel, None, STOP)
    reader.join(10)
    assert not reader.is_alive()
    assert sum((chunk.token_ids for chunk in got), ()) == tuple(range(100))
    assert [chunk.finished for chunk in got].count(True) == 1


def test_a_channel_serves_one_request() -> None:
    channel = StreamChannel()
    channel.attach()
    assert channel.attached
    with pytest.raises(ValueError, match="used before"):
        channel.attach()
    channel.detach()
    channel.attach()
    other = StreamChannel()
    other.finish(FinishReason.STOP)
    with pytest.raises(ValueError, match="used before"):
        other.attach()


def test_cancel_tells_the_request_whenever_it_comes() -> None:
    told: list[int] = []
    channel = StreamChannel()
    channel.attach(lambda: told.append(1))
    channel.cancel()
    channel.cancel()
    assert told == [1]
    early = StreamChannel()
    early.cancel()
    early.attach(lambda: told.append(2))
    assert told == [1, 2]
    late = StreamChannel()
    late.attach(lambda: told.append(3))
    late.finish(FinishReason.STOP)
    late.cancel()
    assert told == [1, 2]


def test_a_finished_channel_lets_go_of_its_request() -> None:
    class Request:
        def cancel(self) -> None: ...

    request, channel = Request(), StreamChannel()
    gone = weakref.ref(request)
    channel.attach(request.cancel)
    channel.finish(FinishReason.STOP)
    gc.disable()
    try:
        del request
        assert gone() is None
    finally:
        gc.enable()


def test_an_unread_channel_holds_its_own_output_and_no_more() -> None:
    """P23: memory of what nobody reads grows with the tokens, not with the steps."""
    channel = StreamChannel()
    empty = delta(text="")
    deliver(channel, delta(1))
    tracemalloc.start()
    for _ in range(10_000):
        deliver(channel, empty)
        channel.push(0, empty)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 4096
    assert channel._pending[0].token_ids == [1]


# ---- event loops ---------------------------------------------------------------------------------


def test_coroutines_read_what_threads_write() -> None:
    async def main() -> list[StreamChunk]:
        channel = StreamChannel()

        def write() -> None:
            for number in range(50):
                deliver(channel, delta(number))
            deliver(channel, None, STOP)

        writer = threading.Thread(target=write)
        writer.start()
        got = [chunk async for chunk in channel]
        writer.join()
        return got

    got = asyncio.run(main())
    assert sum((chunk.token_ids for chunk in got), ()) == tuple(range(50))
    assert got[-1].finished


def test_a_commit_wakes_each_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        channels = [StreamChannel() for _ in range(20)]
        readers = [asyncio.create_task(channel.pop()) for channel in channels]
        await asyncio.sleep(0)
        calls: list[object] = []
        real = loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            calls.append(args)
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

        def commit() -> None:
            wakeups = Wakeups()
            for number, channel in enumerate(channels):
                deliver(channel, delta(number), wakeups=wakeups)
            wakeups.flush()

        thread = threading.Thread(target=commit)
        thread.start()
        got = await asyncio.gather(*readers)
        thread.join()
        assert [chunk.token_ids for chunk in got if chunk] == [(n,) for n in range(20)]
        assert len(calls) == 1

    asyncio.run(main())


def test_a_loop_that_closed_meanwhile_is_nobodys_problem() -> None:
    channel = StreamChannel()

    async def wait_a_moment() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.pop(), 0.01)

    asyncio.run(wait_a_moment())
    deliver(channel, delta(1))
    loop = asyncio.new_event_loop()
    waiter = loop.create_future()
    loop.close()
    wakeups = Wakeups()
    wakeups.add(waiter)
    wakeups.flush()
    assert channel.try_pop() == StreamChunk(text="<1>", token_ids=(1,))


def test_one_reader_at_a_time() -> None:
    async def main() -> None:
        channel = StreamChannel()
        first = asyncio.create_task(channel.pop())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already has a reader"):
            await channel.pop()
        channel.cancel()
        assert await first is None
        assert await channel.pop() is None

    asyncio.run(main())
