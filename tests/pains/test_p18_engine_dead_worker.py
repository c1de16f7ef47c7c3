"""P17, P18: an engine whose worker had died still accepted work. It says so, with the cause."""

from __future__ import annotations

import threading

import pytest

from steppe.errors import EngineFailedError, RequestFailedError
from steppe.testing import Hold
from tests.engine.helpers import ask

from .engines import scripted


class Murder(BaseException):
    """Not an Exception: nothing on the way catches it by kind."""


def test_waiters_are_released_and_submit_refuses_at_once() -> None:
    hold, cause = Hold(), Murder("the worker is gone")
    with scripted(manual=False, capacity=1, holds={1: hold}, fail_steps={1: cause}) as (engine, _):
        handles = [engine.submit(ask()) for _ in range(3)]
        errors: list[BaseException] = []

        def wait(number: int) -> None:
            try:
                handles[number].get(10)
            except RequestFailedError as error:
                errors.append(error)

        waiters = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
        for waiter in waiters:
            waiter.start()
        assert hold.entered.wait(10)
        hold.release()
        for waiter in waiters:
            waiter.join(10)
        assert [error.__cause__ for error in errors] == [cause] * 3
        with pytest.raises(EngineFailedError) as refusal:
            engine.submit(ask())
        assert refusal.value.__cause__ is cause
        assert engine.health().state == "failed"
