"""What a generation owns goes back once, in order, on every path."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from steppe.errors import ExecutionError
from steppe.request import FinishReason, LLMGenerationRequest
from steppe.runtime.generation import ActiveLatch, InProgressGuard, StreamChannelFinalizer
from steppe.streaming import StreamChannel
from tests.runtime.asking import ask, heard
from tests.runtime.fakes import assert_clean, fake_runtime

if TYPE_CHECKING:
    from steppe.runtime.rank_runtime import LLMRankRuntime


def test_one_of_many_threads_takes_a_latch() -> None:
    latch = ActiveLatch()
    start = threading.Barrier(8)
    won: list[bool] = []

    def take() -> None:
        start.wait(10)
        won.append(latch.take())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(won) == [False] * 7 + [True]
    assert latch.taken
    latch.release()
    assert not latch.taken


@pytest.mark.parametrize("fails", [False, True])
def test_a_guard_releases_its_latch_once_on_either_path(fails: bool) -> None:
    latch = ActiveLatch()
    assert latch.take()
    guard = InProgressGuard(latch)

    def work() -> None:
        with guard:
            assert latch.taken
            if fails:
                raise KeyError("on the way")

    if fails:
        with pytest.raises(KeyError):
            work()
    else:
        work()
    assert not latch.taken
    # Somebody else has it now; the spent guard must not release it under them.
    assert latch.take()
    with guard:
        pass
    assert latch.taken


def test_a_finalizer_ends_what_is_open_and_nothing_else() -> None:
    ended, still_open, joined = StreamChannel(), StreamChannel(), StreamChannel()
    ended.finish(FinishReason.STOP)
    with StreamChannelFinalizer([ended, still_open]) as finalizer:
        finalizer.add(joined)
    assert ended.finish_reason is FinishReason.STOP
    for channel in (still_open, joined):
        assert channel.finish_reason is FinishReason.ERROR
        assert heard(channel)[0].finish_reason is FinishReason.ERROR
    assert heard(ended) == {}


def test_it_owns_what_the_blocking_call_kept_on_its_stack() -> None:
    runtime, _ = fake_runtime()
    request = ask("owned", channel=StreamChannel())
    generation = runtime.begin_generation(request, founder_request_id=9)
    assert generation is not None
    with generation:
        assert generation.request is request
        assert generation.founder_request_id == 9
        (founder,) = generation.context.residents
        assert founder.identity.request_id == 9
        assert generation.managed_request.leases == (founder.lease,)
        assert generation.strategy.name == "vanilla"
        assert (generation.kv_headroom.base, generation.kv_headroom.draft) == (1, 0)
        assert generation.stream_finalizer is not None
        assert (generation.enable_spec_decode, generation.has_action_request) == (False, False)
    assert_clean(runtime)


def test_the_stepped_plane_finalizes_its_channels_itself() -> None:
    runtime, _ = fake_runtime()
    channel = StreamChannel()
    generation = runtime.begin_generation(ask(channel=channel), prefill=False)
    assert generation is not None
    assert generation.stream_finalizer is None
    assert not channel.attached
    generation.close()
    assert not channel.finished


class Watch:
    """Notes, at each release, what had been given back before it."""

    def __init__(self, runtime: LLMRankRuntime, channel: StreamChannel) -> None:
        self.runtime = runtime
        self.channel = channel
        self.seen: list[tuple[str, bool, int, bool]] = []

    def note(self, what: str) -> None:
        self.seen.append(
            (what, self.channel.finished, self.runtime.pool.used_pages, self.runtime.generating)
        )


def test_channels_end_first_and_the_latch_opens_last(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, _ = fake_runtime()
    channel = StreamChannel()
    generation = runtime.begin_generation(ask("order", 9, channel=channel))
    assert generation is not None
    watch = Watch(runtime, channel)
    used = runtime.pool.used_pages
    clear, release = generation.context.clear, runtime._latch.release
    monkeypatch.setattr(generation.context, "clear", lambda: (watch.note("session"), clear())[0])
    monkeypatch.setattr(runtime._latch, "release", lambda: (watch.note("latch"), release())[0])
    generation.close()
    generation.close()
    assert watch.seen == [("session", True, used, True), ("latch", True, 0, True)]
    assert_clean(runtime)


def test_pages_come_back_even_if_a_strategy_fails_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, _ = fake_runtime()
    channel = StreamChannel()
    generation = runtime.begin_generation(ask("stuck", 9, channel=channel))
    assert generation is not None

    def fail(sequence: object) -> None:
        raise ExecutionError("no eviction")

    monkeypatch.setattr(generation.strategy, "on_evict", fail)
    with pytest.raises(ExecutionError, match="no eviction"):
        generation.close()
    assert channel.finish_reason is FinishReason.ERROR
    assert_clean(runtime)


def test_abandoning_a_generation_with_waiting_founders_leaves_nothing() -> None:
    runtime, _ = fake_runtime(pages=2)
    channels = [StreamChannel(), StreamChannel()]
    batch = LLMGenerationRequest.batch([ask("a" * 8, 8, channel=channel) for channel in channels])
    with runtime.begin_generation(batch) or pytest.fail("refused") as generation:
        assert generation.session.resident_count == 1
    assert [channel.finish_reason for channel in channels] == [FinishReason.ERROR] * 2
    assert_clean(runtime)
    assert runtime.handle_request(ask()) is not None
