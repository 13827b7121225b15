"""How benchmarks/attention.py takes times: what is timed, how often, and after what."""

from __future__ import annotations

import mmap
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
needs_sdpa = pytest.mark.requires_torch(2, 0, "the peer is torch's scaled_dot_product_attention")

FAULTS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import timing, torch

def results():  # Three, as of backward; freed at once.
    return [torch.ones(2 << 20) for _ in range(3)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    results()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

timing.keep_freed_memory()
print([faults() for _ in range(8)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc; others have no such thresholds")
def test_freed_memory_is_kept(modules, monkeypatch):
    command = [sys.executable, "-c", FAULTS, str(BENCHMARKS)]
    faults = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert faults < 3 * (8 << 20) // mmap.PAGESIZE // 10
    timing, asked = modules("timing"), []
    monkeypatch.setattr(timing, "keep_freed_memory", lambda: asked.append(True))
    timing.in_turn([int], 0.0)
    assert asked


def test_what_runs_before_a_call_is_not_timed(modules):
    order = []

    def before():
        order.append("before")
        time.sleep(0.02)

    samples = modules("timing").in_turn(
        [lambda: order.append("ours"), lambda: order.append("peer")], 0.0, before=before
    )
    assert order == ["ours", "peer"] + ["before", "ours", "before", "peer"] * 5
    assert all(min(of_call) < 0.02 for of_call in samples)


@needs_sdpa
def test_cold_calls_come_after_other_work(modules, monkeypatch):
    order = []

    def doing(name):
        return lambda: order.append(name)

    row = modules("rows").Row("dense", "one", "fp32", lambda: modules("rows").Calls(doing("ours"), doing("peer")))
    monkeypatch.setattr(modules("attention"), "other_work", lambda: doing("other work"))
    args = modules("attention").parse_arguments(["--cold", "--seconds", "0"])
    list(modules("attention").measured([row], args))
    assert order == ["ours", "peer"] + ["other work", "ours", "other work", "peer"] * 5


def test_long_rounds_are_run_twice(modules, monkeypatch):
    timing = modules("timing")
    assert [len(samples) for samples in timing.in_turn([int, int], 0.0)] == [5, 5]
    monkeypatch.setattr(timing, "LONG_ROUND", 0.0)
    assert [len(samples) for samples in timing.in_turn([int, int], 0.0)] == [2, 2]
