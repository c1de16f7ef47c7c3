"""Keys: the same content has one, anything else another."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from steppe.runtime.kv.keys import PageKeys, PrefixIdentity

if TYPE_CHECKING:
    import numpy as np

IDENTITIES = st.builds(
    PrefixIdentity, st.text(max_size=4), st.integers(0, 2**64 - 1), st.binary(max_size=4)
)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), IDENTITIES, st.integers(1, 9), st.data())
def test_keys_do_not_depend_on_how_they_were_asked_for(
    tokens: list[int], identity: PrefixIdentity, size: int, data: st.DataObject
) -> None:
    keys = PageKeys(size)
    whole = keys.chain(identity).extend(tokens, len(tokens) // size)
    assert len(whole) == len(tokens) // size == len(set(whole))
    step_by_step = keys.chain(identity)
    for count in data.draw(st.lists(st.integers(0, len(tokens) // size))):
        assert step_by_step.extend(tokens, count)[:count] == whole[:count]


@given(st.lists(IDENTITIES, min_size=2, max_size=5, unique=True))
def test_whoever_differs_in_anything_shares_no_key(identities: list[PrefixIdentity]) -> None:
    keys = PageKeys(2)
    chains = [set(keys.chain(one).extend([1, 2, 1, 2], 2)) for one in identities]
    assert not any(one & other for one, other in itertools.combinations(chains, 2))


def test_a_key_stands_for_everything_before_its_page(rng: np.random.Generator) -> None:
    keys = PageKeys(4)
    tokens = rng.integers(0, 50_000, 40).tolist()
    before = list(keys.chain(PrefixIdentity()).extend(tokens, 10))
    changed = int(rng.integers(0, 40))
    tokens[changed] += 1
    after = keys.chain(PrefixIdentity()).extend(tokens, 10)
    assert [a == b for a, b in zip(before, after, strict=True)] == [
        page < changed // 4 for page in range(10)
    ]


def test_another_pool_has_other_keys() -> None:
    """Nobody can prepare, elsewhere, a prompt that collides here."""
    one, other = (PageKeys(4).chain(PrefixIdentity()).extend([1, 2, 3, 4], 1) for _ in range(2))
    assert one != other
