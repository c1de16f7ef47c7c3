"""The native CPU backend: C++ kernels chosen for this machine, one call per step, no torch.

Importing this package raises BackendError where the extension has not been built.
"""

from __future__ import annotations

from steppe.errors import BackendError

try:
    from steppe.backends.native import _native  # noqa: F401
except ImportError as error:
    raise BackendError(
        f"the native backend is not built ({error}): install steppe with a C++20 compiler at hand"
    ) from error

from steppe.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
