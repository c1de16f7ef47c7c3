"""What a page's bytes are of: a description that is equal only where pages can be exchanged."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from steppe.backends.base import Backend, Program

__all__ = ["cache_layout"]

SAMPLES = 16
SAMPLE_BYTES = 4096


def cache_layout(program: Program, backend: Backend) -> dict[str, object]:
    """Model, kernels and sizes, as JSON has them."""
    return {
        "model": _fingerprint(program),
        "format": backend.cache_format,
        "page_size": backend.page_size,
        "page_bytes": [backend.page_bytes(group) for group in range(len(backend.groups))],
        "windows": [group.spec.window for group in backend.groups],
    }


def _fingerprint(program: Program) -> str:
    """A digest of every parameter's name, type, shape, and of pieces all over its bytes: reading a
    large model whole would take longer than computing a prompt.
    """
    digest = blake2b(digest_size=16)
    digest.update(repr((program.name, program.vocab_size, program.layers)).encode())
    for name in sorted(program.weights):
        weight = program.weights[name]
        digest.update(repr((name, weight.dtype, weight.shape, weight.add)).encode())
        data = np.asarray(weight.data).reshape(-1).view(np.uint8)
        if data.size <= SAMPLES * SAMPLE_BYTES:
            digest.update(data.tobytes())
            continue
        for start in np.linspace(0, data.size - SAMPLE_BYTES, SAMPLES, dtype=np.int64).tolist():
            digest.update(data[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
