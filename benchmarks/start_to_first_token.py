"""From the start of a process to the first token: how long it takes, and where the time goes.

    python benchmarks/start_to_first_token.py [--model smollm2-135m] [--backend auto] [--runs 5]
    python benchmarks/start_to_first_token.py --http ...

Each run is a new process, as `steppe generate` is one; with `--http` it is `steppe serve`, asked
for a stream as soon as its port answers. Times are seconds since the parent started it, so they
contain the interpreter's own start. Prints the median of every stage.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time


def child(model: str, backend: str, threads: int | None, started: float) -> None:
    """Load, answer with one token, and print when each stage began."""
    stages = [("interpreter", 0.0), ("code", time.time() - started)]

    def tell(stage: str) -> None:
        stages.append((stage, time.time() - started))

    from steppe import LLM, SamplingParams

    with LLM(model, backend=backend, threads=threads, on_progress=tell) as llm:
        tell("first token")
        params = SamplingParams(temperature=0, max_tokens=1)
        if llm.chat_template is None:
            next(llm.stream("The capital of France is", params))
        else:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            next(llm.stream_chat(messages, params))
        tell("end")
    print(json.dumps(stages))


def http_run(words: list[str]) -> list[tuple[str, float]]:
    """Start `steppe serve`, ask it for one token as soon as it listens, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 1, "temperature": 0, "stream": True,
        }
    ).encode()  # fmt: skip
    ask = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "steppe", "serve", *words, "--port", str(port)],
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            while True:
                try:
                    connection = socket.create_connection(("127.0.0.1", port))
                    if connection.getsockname() != connection.getpeername():
                        break
                    connection.close()  # nobody listens: it got the port itself
                except ConnectionRefusedError:
                    if server.poll() is not None:
                        raise SystemExit(f"the server ended with {server.returncode}") from None
                    time.sleep(0.002)
            listening = time.perf_counter() - started
            with connection:
                connection.settimeout(30)
                connection.sendall(ask)
                answer = b""
                while b'"content":"' not in answer.replace(b'"content":""', b""):
                    part = connection.recv(65536)
                    if not part:
                        raise SystemExit(f"no token came: {answer!r}")
                    answer += part
            first = time.perf_counter() - started
        finally:
            server.terminate()
            server.wait(40)
    return [("start", 0.0), ("first token", listening), ("end", first)]


def main() -> None:
    """Run the children and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--http", action="store_true", help="start `steppe serve` instead")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.model, arguments.backend, arguments.threads, arguments.child)
        return
    how = ["--backend", arguments.backend]
    if arguments.threads is not None:
        how += ["--threads", str(arguments.threads)]
    words = [sys.executable, __file__, "--model", arguments.model, *how]
    # The processes may keep their bytecode, as pip keeps that of what it installs.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    runs = []
    for _ in range(arguments.runs + 1):
        if arguments.http:
            runs.append(http_run([arguments.model, *how]))
            continue
        done = subprocess.run(
            [*words, "--child", repr(time.time())], check=True, capture_output=True, text=True
        )
        runs.append(json.loads(done.stdout))
    runs = runs[1:]  # the first fills the file cache
    names = [name for name, _ in runs[0]]
    print(f"{arguments.model}, backend {arguments.backend}, median of {arguments.runs} runs")
    for index, name in enumerate(names[:-1]):
        took = statistics.median(run[index + 1][1] - run[index][1] for run in runs)
        print(f"  {name:14} {took:6.2f} s")
    totals = sorted(run[-1][1] for run in runs)
    middle = statistics.median(totals)
    print(f"  {'in all':14} {middle:6.2f} s   ({totals[0]:.2f} to {totals[-1]:.2f})")


if __name__ == "__main__":
    main()
