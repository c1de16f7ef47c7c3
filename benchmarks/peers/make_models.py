"""Models that nobody publishes, for comparisons on equal files.

    python benchmarks/peers/make_models.py q4_0 --model smollm2-135m OUT.gguf
    python benchmarks/peers/make_models.py random --format Q4_K OUT.gguf

``q4_0`` derives a Q4_0 file from any GGUF model: its matrices of 4 and 5 bits are quantised anew,
everything else is copied. ``random`` writes the shape of a Llama of a billion parameters
(Llama 3.2 1B) with random weights: it says nothing and costs what the real one costs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf_writer import write

from steppe.formats.gguf import read_gguf
from steppe.formats.resolve import resolve

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY = 16, 2048, 8192, 32, 8, 64, 128256
Q4_0_FILE = 2
"""The number of ``general.file_type``."""


def q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of 32 values as a scale and 4-bit levels from -8 to 7. The value that is largest in
    magnitude becomes -8.
    """
    blocks = values.reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = (largest / -8).astype(np.float16)
    step = scale.astype(np.float32)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    levels = np.clip(np.floor(blocks * inverse + 8.5), 0, 15).astype(np.uint8)
    packed = levels[:, :16] | levels[:, 16:] << 4
    return np.concatenate([scale.view(np.uint8), packed], axis=1).reshape(-1)


def requantise(model: str, output: Path) -> None:
    """Write ``model`` with its matrices of 4 and 5 bits in Q4_0."""
    source = read_gguf(resolve(model).path)
    tensors = []
    for name, tensor in source.tensors.items():
        kind, data = tensor.dtype, np.asarray(tensor.data)
        if kind.startswith(("Q4", "Q5")):
            kind, data = "Q4_0", q4_0(tensor.dequantize())
        tensors.append((name, tensor.shape, kind, data))
    metadata = {
        key: value if isinstance(value, np.ndarray | str | int | float) else list(value)
        for key, value in source.metadata.items()
    }
    write(output, {**metadata, "general.file_type": Q4_0_FILE}, tensors)


def random_blocks(kind: str, elements: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Random values of a quantised type, of about the size that weights have, around 0."""
    if kind == "Q8_0":
        scale, bytes_of_block, per_block = 0.02 / 64, 32, 32
    elif kind == "Q4_0":
        scale, bytes_of_block, per_block = 0.02 / 4, 16, 32
    else:
        scale, bytes_of_block, per_block = 0.02 / 256, 140, 256
    count = elements // per_block
    levels = draw.integers(0, 256, (count, bytes_of_block), dtype=np.uint8)
    scales = np.full((count, 1), scale, np.float16).view(np.uint8)
    if kind == "Q4_K":
        # Each group's scale and minimum are 32 of these: levels from 0 to 15, less 7.5.
        minimums = np.full((count, 1), scale * 7.5, np.float16).view(np.uint8)
        # Six bits each, packed: the top bits of eight bytes belong to the later four groups.
        levels[:, :8], levels[:, 8:12] = 0b10_100000, 0
        return np.concatenate([scales, minimums, levels], axis=1).reshape(-1)
    return np.concatenate([scales, levels], axis=1).reshape(-1)


def random_llama(kind: str, output: Path) -> None:
    """Write the shape of a Llama of a billion parameters, its embedding tied to its head."""
    draw = np.random.default_rng(0)
    tensors = []

    def matrix(name: str, rows: int, columns: int) -> None:
        data = random_blocks(kind, rows * columns, draw)
        tensors.append((f"{name}.weight", (rows, columns), kind, data))

    def norm(name: str) -> None:
        ones = np.ones(WIDTH, np.float32).view(np.uint8)
        tensors.append((f"{name}.weight", (WIDTH,), "F32", ones))

    matrix("token_embd", VOCABULARY, WIDTH)
    norm("output_norm")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.attn_q", HEADS * HEAD, WIDTH)
        matrix(f"{block}.attn_k", KV_HEADS * HEAD, WIDTH)
        matrix(f"{block}.attn_v", KV_HEADS * HEAD, WIDTH)
        matrix(f"{block}.attn_output", WIDTH, HEADS * HEAD)
        matrix(f"{block}.ffn_gate", INNER, WIDTH)
        matrix(f"{block}.ffn_up", INNER, WIDTH)
        matrix(f"{block}.ffn_down", WIDTH, INNER)
    write(output, metadata(kind), tensors)


def metadata(kind: str) -> dict[str, object]:
    """What loaders want to know, with a made-up vocabulary."""
    # The alphabet of byte-level tokens, as GPT-2 has it, then words that no merge makes.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(spare)}
    tokens = [letters[byte] for byte in range(256)]
    tokens += ["ab", *(f"word{index}" for index in range(VOCABULARY - 258)), "<end>"]
    types = np.ones(VOCABULARY, np.int32)
    types[-1] = 3
    return {
        "general.architecture": "llama",
        "general.name": f"random 1B {kind}",
        "llama.context_length": 8192,
        "llama.embedding_length": WIDTH,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD,
        "llama.rope.freq_base": 500000.0,
        "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": VOCABULARY - 1,
        "tokenizer.ggml.eos_token_id": VOCABULARY - 1,
    }


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("q4_0", "random"))
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="what q4_0 is derived from")
    parser.add_argument("--format", default="Q4_0", choices=("Q4_0", "Q4_K", "Q8_0"))
    arguments = parser.parse_args()
    if arguments.what == "q4_0":
        requantise(arguments.model, arguments.output)
    else:
        random_llama(arguments.format, arguments.output)


if __name__ == "__main__":
    main()
