from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Int32 = NDArray[np.int32]
Row = tuple[
    Int32 | None,
    Floats | None,
    Int32 | None,
    Int32 | None,
    NDArray[np.bool_] | None,
    Int32 | None,
    NDArray[np.uint32] | None,
]

LAYOUT: str

def variants() -> list[str]: ...
def built_variants() -> list[str]: ...
def default_threads() -> int: ...
def uniform(seed: int, sequence_index: int, position: int, purpose: int) -> float: ...
def format_of(type: str) -> str: ...
def checksum(data: NDArray[np.uint8]) -> int: ...
def packed(
    type: str,
    data: NDArray[np.uint8],
    n: int,
    k: int,
    order: NDArray[np.int64] | None,
    quantize: str = "",
) -> NDArray[np.uint8]: ...
def quantized(target: str, x: Floats) -> NDArray[np.uint8]: ...
def unpacked(
    type: str, data: NDArray[np.uint8], n: int, k: int, order: NDArray[np.int64] | None
) -> Floats: ...
def linear(
    isa: str,
    type: str,
    data: NDArray[np.uint8],
    n: int,
    k: int,
    x: Floats,
    bias: Floats | None,
    add: Floats | None,
    order: NDArray[np.int64] | None,
) -> Floats: ...
def quantize(isa: str, x: Floats) -> tuple[NDArray[np.int8], Floats, Floats]: ...
def attention(
    isa: str,
    kv_dtype: str,
    queries: Floats,
    keys: Floats,
    values: Floats,
    pages: Int32,
    window: int,
    scale: float,
    softcap: float,
    tile_tokens: int,
    part_blocks: int,
) -> Floats: ...
def sample(
    isa: str,
    logits: Floats,
    rows: NDArray[np.uint8],
    extras: Sequence[Row] | None,
    top_width: int,
) -> tuple[Int32, Floats, Int32, Floats]: ...
def resample(
    program: Program,
    which: Int32,
    rows: NDArray[np.uint8],
    extras: Sequence[Row] | None,
) -> tuple[Int32] | tuple[Int32, Floats, Int32, Floats]: ...
def time_linear(
    isa: str, type: str, m: int, n: int, k: int, threads: int, repeats: int
) -> tuple[float, float]: ...
def probe(isa: str, threads: int, bytes: int) -> tuple[float, float]: ...

class Program:
    def __init__(self, isa: str, threads: int, vocab: int, max_positions: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    def output_width(self, output: int, /) -> int: ...
    def add_weight(
        self,
        type: str,
        data: NDArray[np.uint8],
        n: int,
        k: int,
        order: NDArray[np.int64] | None,
        quantize: str = "",
    ) -> int: ...
    def add_packed(
        self, format: str, data: NDArray[np.uint8], n: int, k: int, checksum: int
    ) -> int: ...
    def add_vector(self, values: Floats, /) -> int: ...
    def add_rope(self, inv_freq: Floats, scale: float, /) -> int: ...
    def add_slot(self, width: int, domain: int, /) -> int: ...
    def add_panel(self, form: int, k: int, domain: int, /) -> int: ...
    def add_output(self, width: int, /) -> int: ...
    def set_groups(self, count: int, /) -> None: ...
    def set_kv_dtype(self, name: str, /) -> None: ...
    def add_layer(self, group: int, kv_heads: int, head_dim: int, window: int, /) -> None: ...
    def set_logits(self, slot: int, /) -> None: ...
    def weight_form(self, weight: int, /) -> int: ...
    def rows_phase(
        self, domain: int, micros: Sequence[tuple[int, int, int, int, int, int, int, float]], /
    ) -> None: ...
    def gemm_phase(
        self, domain: int, panel: int, segments: Sequence[tuple[int, int, int, int]], /
    ) -> None: ...
    def gated_phase(
        self,
        domain: int,
        panel: int,
        segments: Sequence[tuple[int, int, int, int]],
        act: int,
        out: int,
        out_panel: int,
        /,
    ) -> None: ...
    def attention_phase(
        self,
        q: int,
        layer: int,
        heads: int,
        scale: float,
        softcap: float,
        out: int,
        out_panel: int,
        /,
    ) -> None: ...
    def experts_phase(
        self,
        domain: int,
        router: int,
        experts: Sequence[tuple[int, int, int]],
        top_k: int,
        normalize: bool,
        act: int,
        source: int,
        out: int,
        /,
    ) -> None: ...
    def set_timing(self, on: bool, /) -> None: ...
    def timing(self) -> tuple[int, float, list[tuple[str, float]]]: ...
    def read_weights(self) -> int: ...
    def layer_page_bytes(self, layer: int, /) -> int: ...
    def read_pages(self, layer: int, pages: Int32, /) -> NDArray[np.uint8]: ...
    def write_pages(self, layer: int, pages: Int32, data: NDArray[np.uint8], /) -> None: ...
    def allocate_cache(self, pages: Sequence[int], /) -> None: ...
    def embedding_table(self, weight: int, /) -> Floats: ...
    def run(
        self,
        token_ids: Int32,
        positions: Int32,
        query_start: Int32,
        context_len: Int32,
        tables: Sequence[Int32],
        slots: Sequence[NDArray[np.int64]],
        logit_rows: Int32,
        sample: NDArray[np.uint8],
        extras: Sequence[Row] | None,
        outputs: Sequence[int],
        hidden_rows: Int32 | None,
        sampled: Int32,
        logprob: Floats | None,
        top_ids: Int32 | None,
        top_logprobs: Floats | None,
        logits: Floats | None,
        hidden: Sequence[Floats],
    ) -> None: ...
