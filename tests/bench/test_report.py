"""Tables, JSON and pictures of a run."""

from __future__ import annotations

import json
import struct
import sys
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from steppe.bench import report
from steppe.bench.plot import check_plotting, plot_run, plot_sweep
from steppe.bench.stats import Objectives, Sample, Summary, summarize
from steppe.bench.sweep import Sweep, sustained
from steppe.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

SAMPLES = [
    Sample(0, 0.0, 0.0, 2.0, (1.0, 1.5, 2.0), 3, 10),
    Sample(1, 1.0, 1.2, 4.0, (2.0, 4.0), 2, 10),
    Sample(2, 2.0, 2.0, 2.1, error="http_429"),
]


def made(**objectives: float) -> Summary:
    return summarize(SAMPLES, Objectives(**objectives))


def printed(table: Table, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return console.export_text()


def test_a_table_has_every_percentile_of_every_latency() -> None:
    lines = printed(report.latency_table(made(), "my server")).splitlines()
    assert "my server" in lines[0]
    (first,) = (line for line in lines if "first token" in line)
    assert first.split() == ["time", "to", "first", "token", *["1", "s"] * 5]
    (whole,) = (line for line in lines if "end to end" in line)
    assert whole.split()[3:7] == ["2.5", "s", "2.5", "s"]


def test_a_table_in_a_pipe_of_eighty_columns_cuts_no_name_short() -> None:
    wide = [Sample(0, 0.0, 0.0, 0.0000934, (0.0000123, 0.0000345), 2, 10)]
    text = printed(report.latency_table(summarize(wide, Objectives()), "x"), width=80)
    assert "time to first token" in text
    assert text.count("0.0123 ms") == 5
    assert "…" not in text


def test_remarks_warn_where_the_measurement_deserves_it() -> None:
    said = "\n".join(report.remarks(made(first=1.5, between=0.1)))
    assert "2 of 3 requests answered" in said
    assert "errors: 1 http_429" in said
    assert "warning: 1 requests were sent late, by up to 200 ms" in said
    assert "first token within 1.5 s and tokens within 100 ms" in said
    calm = "\n".join(report.remarks(summarize(SAMPLES[:1], Objectives())))
    assert "warning" not in calm
    assert "errors" not in calm
    assert "goodput" not in calm


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0 ms"), (0.0123456, "12.3 ms"), (0.99999, "1 s"), (12.34, "12.3 s"),
     (1234.5, "1234 s")],
)  # fmt: skip
def test_durations(seconds: float | None, text: str) -> None:
    assert report.duration(seconds) == text


def test_json_has_everything_and_no_infinity() -> None:
    sweep = Sweep(((1.0, made()), (2.0, made())), 1.0, 2.0)
    whole = report.report_json(
        "s", {"rate": float("inf"), "seed": 1}, [(1.0, made(), SAMPLES)], sweep
    )
    back = json.loads(json.dumps(whole, allow_nan=False))
    assert back["settings"] == {"rate": None, "seed": 1}
    assert back["sweep"] == {"sustained": 1.0, "exceeded": 2.0}
    assert [one["error"] for one in back["runs"][0]["requests"]] == [None, None, "http_429"]
    assert back["runs"][0]["requests"][0]["chunks"] == [1.0, 1.5, 2.0]
    assert back["runs"][0]["summary"]["errors"] == {"http_429": 1}


def test_a_sweep_has_a_line_a_rate() -> None:
    sweep = Sweep(((1.0, made()), (2.0, made())), None, 1.0)
    text = printed(report.sweep_table(sweep, {rate: sustained(one) for rate, one in sweep.runs}))
    assert sum(line.rstrip().endswith(" no") for line in text.splitlines()) == 2


def test_a_missing_matplotlib_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"steppe\[bench\]"):
        check_plotting()


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_plotting()
    failed = summarize(SAMPLES[2:], Objectives())
    plot_run(tmp_path / "run.png", SAMPLES, "run")
    plot_run(tmp_path / "none.png", SAMPLES[2:], "none answered")
    plot_sweep(tmp_path / "sweep.png", Sweep(((1.0, made()), (2.0, made())), 1.0, 2.0), "sweep")
    plot_sweep(tmp_path / "lost.png", Sweep(((1.0, failed),), None, 1.0), "none answered")
    for name in ("run", "none", "sweep", "lost"):
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">II", content[16:24]) == (1100, 420)
