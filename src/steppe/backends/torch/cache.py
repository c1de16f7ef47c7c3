"""Paged keys and values on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from steppe.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from steppe.backends.tape import CacheGroup

__all__ = ["Cached", "PagedCache", "quantize"]

# Rows whose magnitudes are all below this are zero: its reciprocal must stay finite.
_LEAST = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class Cached:
    """The keys or the values of a layer: ``data`` [slots, kv_heads, head_dim], a view.

    Where ``data`` is int8, ``scales`` [slots, kv_heads] float32 multiply it.
    """

    data: torch.Tensor
    scales: torch.Tensor | None

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep rows [n, kv_heads, head_dim] at ``slots``, rounded to the cache's type."""
        if self.scales is None:
            self.data.index_copy_(0, slots, rows.to(self.data.dtype))
            return
        quants, scales = quantize(rows.float())
        self.data.index_copy_(0, slots, quants)
        self.scales.index_copy_(0, slots, scales)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """What is kept at ``slots``: float32 [n, kv_heads, head_dim]."""
        rows = self.data.index_select(0, slots).float()
        if self.scales is not None:
            rows *= self.scales.index_select(0, slots)[:, :, None]
        return rows


class PagedCache:
    """For each cache group two tensors [layers, pages, page_size, kv_heads, head_dim], zeroed, and
    where they are int8 the float32 scales of each token's heads.

    One thread.
    """

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.groups = groups
        self.page_size = page_size
        self.device = device
        self.dtype = dtype
        self._tensors: list[tuple[_Pages, _Pages]] = []
        self._places = {
            layer: (number, place)
            for number, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }

    def place(self, layer: int) -> tuple[int, int]:
        """(group, place in the group) of a layer."""
        return self._places[layer]

    def page_bytes(self, group: int) -> int:
        """Bytes of one page of a group: all its layers, keys and values, and their scales."""
        spec = self.groups[group].spec
        head = spec.head_dim * self.dtype.itemsize
        if self.dtype == torch.int8:
            head += torch.float32.itemsize
        return 2 * len(self.groups[group].layers) * self.page_size * spec.num_kv_heads * head

    def allocate(self, num_pages: Sequence[int]) -> None:
        """Make the memory. Raises BackendError if it does not fit, or the counts are wrong."""
        if len(num_pages) != len(self.groups) or any(count < 1 for count in num_pages):
            raise BackendError(
                f"{len(self.groups)} cache groups cannot have {list(num_pages)} pages"
            )
        self._tensors = []
        for group, pages in zip(self.groups, num_pages, strict=True):
            spec = group.spec
            shape = (len(group.layers), pages, self.page_size, spec.num_kv_heads, spec.head_dim)
            try:
                keys, values = self._zeros(shape), self._zeros(shape)
            except RuntimeError as error:
                self._tensors = []
                raise BackendError(f"no memory for a cache of {pages} pages: {error}") from error
            self._tensors.append((keys, values))

    def read(self, group: int, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of some pages, uint8[n, page_bytes]: of each tensor, all layers."""
        numbers = self._checked(group, pages)
        parts = [
            tensor[:, numbers].transpose(0, 1).contiguous().view(torch.uint8).flatten(1)
            for tensor in self._parts(group)
        ]
        return np.array(torch.cat(parts, dim=1).cpu().numpy())

    def write(self, group: int, pages: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite pages with what ``read`` gave."""
        numbers = self._checked(group, pages)
        if data.shape != (len(pages), self.page_bytes(group)):
            raise BackendError(f"{data.shape} bytes are not {len(pages)} pages of group {group}")
        rest = torch.from_numpy(np.array(data)).to(self.device)
        for tensor in self._parts(group):
            one = tensor[:, :1].numel() * tensor.element_size()
            part, rest = rest[:, :one].contiguous(), rest[:, one:]
            shape = (len(pages), tensor.shape[0], *tensor.shape[2:])
            tensor[:, numbers] = part.view(tensor.dtype).reshape(shape).transpose(0, 1)

    def _parts(self, group: int) -> list[torch.Tensor]:
        """All the tensors of a group: [layers, pages, ...]."""
        pages = self._tensors[group]
        return [part for each in pages for part in (each.data, each.scales) if part is not None]

    def _checked(self, group: int, pages: Sequence[int]) -> torch.Tensor:
        if not self._tensors or not all(0 <= page < self.num_pages[group] for page in pages):
            raise BackendError(f"the cache has not all of the pages {list(pages)}")
        return torch.tensor(list(pages), dtype=torch.int64, device=self.device)

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages of each group; empty before ``allocate``."""
        return tuple(keys.data.shape[1] for keys, _ in self._tensors)

    def layer(self, group: int, place: int) -> tuple[Cached, Cached]:
        """Keys and values of one layer."""
        keys, values = self._tensors[group]
        return keys.layer(place), values.layer(place)

    def _zeros(self, shape: tuple[int, ...]) -> _Pages:
        data = torch.zeros(shape, dtype=self.dtype, device=self.device)
        scales = None
        if self.dtype == torch.int8:
            scales = torch.zeros(shape[:-1], dtype=torch.float32, device=self.device)
        return _Pages(data, scales)


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """The keys or the values of a group: [layers, pages, page_size, kv_heads(, head_dim)]."""

    data: torch.Tensor
    scales: torch.Tensor | None

    def layer(self, place: int) -> Cached:
        scales = None if self.scales is None else self.scales[place].flatten(0, 1)
        return Cached(self.data[place].flatten(0, 1), scales)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., n] as int8 [..., n] and scales [...]: the largest magnitude of a row / 127."""
    largest = rows.abs().amax(dim=-1)
    small = largest < _LEAST
    inverse = torch.where(small, 0.0, 127.0 / largest)
    scales = torch.where(small, 0.0, largest * (1.0 / 127.0))
    # A row that is not finite keeps a scale that is not: what its quants are does not matter.
    quants = (rows * inverse[..., None]).round_().clamp_(-127, 127).nan_to_num_(0.0)
    return quants.to(torch.int8), scales
