"""Peak memory of a process that loads a model and answers, beside what the model must take.

    python benchmarks/memory.py [--model smollm2-135m ...] [--kv-memory 64] [--prompt 512]

Each model runs in a process of its own, as `steppe generate` does. "stored" are the weights in the
files, "packed" those in memory, "rest" what the peak is above packed weights and cache: the
interpreter, libraries, the tokenizer, activations. The goal is a rest of 150 MB. Linux only: it
reads /proc.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MB = 1e6


def child(model: str, kv_memory: int, prompt: int, tokens: int) -> None:
    """Answer once, and print where the memory went."""
    from steppe.backends.native import NativeBackend
    from steppe.formats.checkpoint import open_checkpoint
    from steppe.request import LLMGenerationRequest, SamplingParams
    from steppe.runtime.config import RuntimeConfig
    from steppe.runtime.rank_runtime import LLMRankRuntime

    backend = NativeBackend()
    config = RuntimeConfig(max_batch_size=1, kv_memory=kv_memory)
    runtime = LLMRankRuntime(model, backend=backend, config=config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = LLMGenerationRequest([7 + i % 90 for i in range(prompt)], params=params)
    assert runtime.handle_request(request) is not None
    status = Path("/proc/self/status").read_text(encoding="ascii")
    lines = dict(line.split(":", 1) for line in status.splitlines())
    with open_checkpoint(model) as checkpoint:
        stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        if checkpoint.engine is not None:
            stored = checkpoint.engine.weights.size
    page = sum(backend.page_bytes(group) for group in range(len(backend.groups)))
    cache = page * -(-(prompt + tokens) // backend.page_size)
    peak = int(lines["VmHWM"].split()[0]) * 1024
    print(json.dumps([stored, backend.weight_bytes, cache, peak]))


def main() -> None:
    """Run the children and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--kv-memory", type=int, default=64, help="MiB")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.model[0], arguments.kv_memory << 20, arguments.prompt, arguments.tokens)
        return
    names = ("stored", "packed", "cache used", "peak", "rest")
    print(f"{'MB':24}" + "".join(f"{name:>12}" for name in names))
    for model in arguments.model:
        words = [sys.executable, __file__, "--child", "--model", model]
        words += ["--kv-memory", str(arguments.kv_memory)]
        words += ["--prompt", str(arguments.prompt), "--tokens", str(arguments.tokens)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        stored, packed, cache, peak = json.loads(done.stdout)
        values = (stored, packed, cache, peak, peak - packed - cache)
        print(f"{model[-24:]:24}" + "".join(f"{value / MB:12.1f}" for value in values))


if __name__ == "__main__":
    main()
