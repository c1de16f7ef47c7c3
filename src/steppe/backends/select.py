"""From a backend's name to a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, get_args

from steppe.errors import BackendError

if TYPE_CHECKING:
    from steppe.backends.base import Backend

__all__ = ["BACKENDS", "create_backend"]

_DType = Literal["auto", "float32", "bfloat16"]

BACKENDS = ("native", "torch")
"""The backends that exist."""


def create_backend(
    name: str = "auto",
    *,
    device: str = "cpu",
    dtype: str = "auto",
    threads: int | None = None,
    page_size: int | None = None,
) -> Backend:
    """Make the backend called ``name``.

    ``auto`` is native on the CPU: weights stay as stored. It is torch on another ``device``, and
    when a ``dtype`` is named, since only torch converts weights to one. ``page_size`` None is the
    backend's own.

    Raises BackendError for a name, device or type that does not exist, a backend that does not have
    what was asked for, or one whose packages are not installed.
    """
    if dtype not in get_args(_DType):
        raise BackendError(f"there is no dtype {dtype}: choose {', '.join(get_args(_DType))}")
    if name == "auto":
        name = "native" if device == "cpu" and dtype == "auto" else "torch"
    if name == "native":
        if device != "cpu":
            raise BackendError(f"the native backend runs on the CPU, not on {device}")
        if dtype != "auto":
            raise BackendError("the native backend keeps weights as stored: dtype must be auto")
        # Imported here and below, since only who asks for a backend should pay for (or have) it.
        from steppe.backends.native import NativeBackend

        native = NativeBackend(threads=threads)
        if page_size is not None and page_size != native.page_size:
            raise BackendError(f"the native backend's pages have {native.page_size} tokens")
        return native
    if name == "torch":
        from steppe.backends.torch import TorchBackend

        return TorchBackend(
            device=device,
            dtype=cast("_DType", dtype),
            threads=threads,
            page_size=64 if page_size is None else page_size,
        )
    raise BackendError(f"there is no backend {name}: choose auto or {' or '.join(BACKENDS)}")
