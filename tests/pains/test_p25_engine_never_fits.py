"""P25: what could never fit was retried forever. It is refused at submit, or ends at the wall."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.errors import InvalidRequestError
from tests.engine.helpers import ask, expected, run

from .engines import scripted


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 60))),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_every_request_ends_in_bounded_steps(
    pages: int, asked: list[tuple[int, int | None]], overcommit: bool
) -> None:
    with scripted(capacity=3, pages=pages, page_size=8, context=100, overcommit=overcommit) as (
        engine,
        runtime,
    ):
        accepted = []
        for prompt, count in asked:
            request = ask(count, prompt=prompt)
            fits = -(-(prompt + (count or 1)) // 8) <= pages and prompt + (count or 0) <= 100
            if fits:
                runtime.validate(request)
                accepted.append((engine.submit(request), count))
            else:
                with pytest.raises(InvalidRequestError, match=rf"\b({pages}|100)\b"):
                    runtime.validate(request)
        run(engine, limit=3000)
        for handle, count in accepted:
            response = handle.get()
            assert response.token_ids == expected(handle.id, len(response.token_ids))
            if count is not None:
                assert len(response.token_ids) == count
        assert ("preempt", 1) not in runtime.log, "the oldest never gives way"
