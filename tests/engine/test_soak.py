"""Twenty thousand requests of the soak; ``make soak`` runs a million."""

from __future__ import annotations

import pytest

from .soak import soak


@pytest.mark.timeout(600)
def test_a_tiny_pool_serves_everybody_and_ends_clean(seed: int) -> None:
    metrics = soak(20_000, seed)
    assert metrics.preemptions > 1000
    assert metrics.cancelled > 0
