"""The bounded queue, and the gate around it."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from steppe.engine.command_queue import CommandQueue
from steppe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(("asked", "got"), [(1, 2), (2, 2), (3, 4), (4, 4), (16, 16), (17, 32)])
def test_capacity_is_a_power_of_two(asked: int, got: int) -> None:
    queue: CommandQueue[int] = CommandQueue(asked)
    assert queue.capacity == got
    assert [queue.push(item) for item in range(got + 1)] == [True] * got + [False]


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_below_one_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError):
        CommandQueue(capacity)


def test_full_then_drained_accepts_again_and_keeps_order() -> None:
    queue: CommandQueue[int] = CommandQueue(4)
    taken = []
    pushed = iter(range(100))
    for _ in range(10):  # wraps around several times
        while queue.push(item := next(pushed)):
            pass
        taken.append(queue.pop())
        taken.append(queue.pop())
        assert queue.has_pending
        assert item > max(taken)  # type: ignore[type-var]
    assert taken == sorted(taken)  # type: ignore[type-var]


def test_a_refused_push_leaves_nothing_behind() -> None:
    class Item:
        pass

    queue: CommandQueue[Item] = CommandQueue(2)
    queue.push(Item())
    queue.push(Item())
    item = Item()
    gone = weakref.ref(item)
    assert not queue.push(item)
    del item
    assert gone() is None
    inside = weakref.ref(queue._items[0])
    del queue
    assert inside() is None, "what is left inside goes with the queue"


def test_an_empty_queue_pops_nothing() -> None:
    queue: CommandQueue[int] = CommandQueue(2)
    assert queue.pop() is None
    assert not queue.has_pending


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns far more often than they usually do."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_many_producers_lose_and_double_nothing_and_keep_their_own_order() -> None:
    queue: CommandQueue[tuple[int, int]] = CommandQueue(1 << 12)
    each, producers = 4000, 8

    def produce(who: int) -> None:
        for number in range(each):
            while not queue.push((who, number)):
                pass

    threads = [threading.Thread(target=produce, args=(who,)) for who in range(producers)]
    for thread in threads:
        thread.start()
    taken: list[list[int]] = [[] for _ in range(producers)]
    left = each * producers
    while left:
        item = queue.pop()
        if item is not None:
            taken[item[0]].append(item[1])
            left -= 1
    for thread in threads:
        thread.join()
    assert queue.pop() is None
    assert all(numbers == list(range(each)) for numbers in taken)
