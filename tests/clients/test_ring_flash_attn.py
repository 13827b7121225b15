"""ring-flash-attn over two gloo processes gives what one process gives, gradients included; see ring_worker.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn

WORLD_SIZE = 2
HERE = Path(__file__).resolve().parent
NAMES = ["ring full", "ring causal", "zigzag causal", "stripe causal", "ring varlen", "zigzag varlen", "llama3 varlen"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank saved: name -> (one process in fp32, in bf16, the ring), and its calls of raw functions."""
    folder = tmp_path_factory.mktemp("ranks")
    source = str(Path(flash_attn.__file__).resolve().parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ring_worker.py"), str(folder), str(rank), str(WORLD_SIZE)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()  # one that waits for another that has failed
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("name", NAMES)
def test_ring_equals_one_process(results, name):
    """No further from fp32 than one process in bf16 is, within a factor of three: blocks are rounded before summing."""
    for rank, saved in enumerate(results):
        chosen = {key: tensors for key, tensors in saved["results"].items() if key.startswith(name + " ")}
        assert [key.split()[-1] for key in chosen] == ["out", "dq", "dk", "dv"]
        for key, (exact, one, got) in chosen.items():
            assert got.shape == exact.shape and got.dtype == torch.bfloat16
            error, allowed = ((x.float() - exact).abs().max().item() for x in (got, one))
            assert error <= 3 * allowed, f"rank {rank}, {key}: {error} where one process has {allowed}"


def test_nothing_was_left_out(results):
    """Every scenario, and the raw functions under it, were really called."""
    for saved in results:
        assert len(saved["results"]) == 4 * len(NAMES)
        assert {name for name, calls in saved["calls"].items() if calls > 0} == {
            f"_flash_attn_{form}{way}" for form in ("", "varlen_") for way in ("forward", "backward")
        }
