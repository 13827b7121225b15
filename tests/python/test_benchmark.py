"""benchmarks/attention.py runs, checks its rows, and writes what it says. Speed is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "attention.py"
needs_sdpa = pytest.mark.requires_torch(2, 0, "the peer is torch's scaled_dot_product_attention")


def benchmark(*arguments, status=0):
    """Returns what it printed."""
    command = [sys.executable, str(BENCHMARK), "--quick", "--seconds=0.01", "--threads=1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_sdpa
def test_every_row_against_torch(tmp_path):
    printed = benchmark("--head-dims", "64", "--json", str(tmp_path / "times.json"))
    stored = json.loads((tmp_path / "times.json").read_text())
    assert len(stored["rows"]) == 3 * 1 * 1 * 2 * 2  # dtypes, D, S, masks, directions
    for row in stored["rows"]:
        assert row["name"] in printed
        assert len(row["seconds"]) == len(row["peer_seconds"]) >= 5
        assert row["ratio"] == pytest.approx(row["peer_median"] / row["median"])
    assert torch.__version__ in stored["setting"]["torch"]


@pytest.mark.second_torch
def test_without_a_peer(tmp_path):
    benchmark("--against=none", "--rows", "fp32 D64 causal", "--json", str(tmp_path / "times.json"))
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["fp32 D64 S256 causal forward", "fp32 D64 S256 causal backward"]
    assert all("ratio" not in row for row in rows)


@needs_sdpa
def test_plot_over_lengths(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    benchmark("--rows", "fp32 D64 forward", "--lengths", "64", "128", "--plot", str(tmp_path / "speed.png"))
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@needs_sdpa
def test_fail_under():
    rows = ("--rows", "fp32 D64 full forward")
    assert "below 1000.0x: fp32 D64 S256 full forward" in benchmark(*rows, "--fail-under", "1000", status=1)
    benchmark(*rows, "--fail-under", "0.0001")


def test_unknown_rows_say_so():
    assert "no row has these words" in benchmark("--against=none", "--rows", "fp8", status=1)


def test_wrong_result_is_refused(monkeypatch):
    """A row whose numbers are wrong must not be timed."""
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    import attention

    monkeypatch.setattr(attention, "our_attention", lambda q, k, v, causal: 1.01 * q)
    with pytest.raises(SystemExit, match="wrong by"):
        attention.measure(attention.Row("fp32", 64, 32, "full", "forward", 1, 2), "none", 0.01)
