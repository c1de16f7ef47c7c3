"""The torch backend: any torch device, and on the CPU in float32 the reference.

Importing this package imports torch, and raises BackendError where torch cannot be imported.
"""

from __future__ import annotations

from steppe.errors import BackendError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise BackendError(
        f"the torch backend needs PyTorch ({error}): pip install steppe[torch]"
    ) from error

from steppe.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
