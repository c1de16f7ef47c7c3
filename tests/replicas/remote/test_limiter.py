"""Requests and tokens a minute: never too many, in order, and as many as may be."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import RateLimitedError
from steppe.replicas.remote.limiter import RateLimiter
from steppe.testing import VirtualLoop, virtually


def test_no_bounds_no_waiting() -> None:
    async def main(loop: VirtualLoop) -> None:
        limiter = RateLimiter(None, None, loop.time)
        for _ in range(1000):
            await limiter.take(10**9, 0.0)
        limiter.slow_down()
        limiter.settle(1, 2)
        assert loop.time() == 0

    virtually(main)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 500)), min_size=1, max_size=60),
    st.integers(1, 30),
    st.integers(50, 600),
)
def test_no_minute_has_more_than_the_bound_and_a_burst(
    asked: list[tuple[float, int]], requests: int, tokens: int
) -> None:
    async def main(loop: VirtualLoop) -> None:
        limiter = RateLimiter(requests, tokens, loop.time)
        went: list[tuple[float, int, int]] = []

        async def one(place: int, amount: int) -> None:
            await limiter.take(amount)
            went.append((loop.time(), amount, place))

        tasks = []
        for place, (pause, amount) in enumerate(asked):
            await asyncio.sleep(pause)
            tasks.append(asyncio.create_task(one(place, amount)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert [place for *_, place in went] == sorted(place for *_, place in went)
        for start, *_ in went:
            window = [amount for at, amount, _ in went if start <= at < start + 60]
            assert len(window) <= 2 * requests + 1e-6
            # The last one may leave the bucket in debt by what is beyond its size.
            assert sum(window) <= 2 * tokens + max(0, max(window) - tokens) + 1e-6

    virtually(main)


def test_a_full_rate_is_used() -> None:
    async def main(loop: VirtualLoop) -> None:
        limiter = RateLimiter(60, None, loop.time)
        for _ in range(180):
            await limiter.take(1)
        assert loop.time() == pytest.approx(120)

    virtually(main)


def test_who_cannot_go_in_time_hears_it_at_once_and_takes_nothing() -> None:
    async def main(loop: VirtualLoop) -> None:
        limiter = RateLimiter(6, None, loop.time)
        for _ in range(6):
            await limiter.take(1)
        with pytest.raises(RateLimitedError) as caught:
            await limiter.take(1, patience=9)
        assert caught.value.retry_after == pytest.approx(10)
        assert loop.time() == 0
        await limiter.take(1, patience=11)
        assert loop.time() == pytest.approx(10)

    virtually(main)


def test_who_waits_behind_another_gives_up_in_time_and_a_quitter_blocks_nobody() -> None:
    async def main(loop: VirtualLoop) -> None:
        limiter = RateLimiter(6, None, loop.time)
        for _ in range(6):
            await limiter.take(1)
        first = asyncio.create_task(limiter.take(1))
        await asyncio.sleep(0)
        with pytest.raises(RateLimitedError):
            await limiter.take(1, patience=5)
        assert loop.time() == pytest.approx(5)
        first.cancel()
        await limiter.take(1)
        assert loop.time() == pytest.approx(10)

    virtually(main)


def test_what_was_not_used_comes_back() -> None:
    async def main(loop: VirtualLoop) -> None:
        limiter = RateLimiter(None, 600, loop.time)
        await limiter.take(600)
        limiter.settle(600, 100)
        await limiter.take(500)
        assert loop.time() == 0
        await limiter.take(100)
        assert loop.time() == pytest.approx(10)

    virtually(main)


def test_a_slowed_rate_halves_and_recovers() -> None:
    async def main(loop: VirtualLoop) -> None:
        limiter = RateLimiter(60, None, loop.time)
        limiter.slow_down()
        await limiter.take(1)
        assert 1.5 < loop.time() < 2.01
        for _ in range(100):
            limiter.slow_down()
        before = loop.time()
        await limiter.take(1)
        assert 5 < loop.time() - before <= 16.1
        await asyncio.sleep(600)
        before = loop.time()
        for _ in range(120):
            await limiter.take(1)
        assert loop.time() - before == pytest.approx(60)

    virtually(main)
