"""Memory beyond inputs and outputs grows with Sq + Sk: at S = 16k one S x S matrix in fp32 would be 1 GB."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from flash_attn import flash_attn_func

torch.set_num_threads(2)
S, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
make = lambda rows: torch.randn(1, rows, 1, 64, dtype=dtype, requires_grad=True)
def step(rows):
    q, k, v = make(rows), make(rows), make(rows)
    flash_attn_func(q, k, v, causal=True).sum().backward()
step(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(S)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def growth_mb(length: int, dtype: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(length), dtype], check=True, capture_output=True, text=True
    )
    return int(done.stdout) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read in the unit that Linux reports it in")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_linear(dtype):
    short, long = growth_mb(8192, dtype), growth_mb(16384, dtype)
    # Tensors: q, k, v, out and four gradients of S * 64; packed operands and sums, at most ten more of that size.
    tensor_mb = 16384 * 64 * 4 / 2**20
    assert long < 20 * tensor_mb, f"{long:.0f} MB for S = 16384"
    # Below five tensors the allocator's habits decide, not the algorithm.
    assert long < 2.5 * max(short, 5 * tensor_mb), f"{short:.0f} MB for S = 8192, {long:.0f} MB for twice that"
