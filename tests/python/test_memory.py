"""Memory beyond inputs and outputs grows with Sq + Sk: at S = 16k one S x S matrix in fp32 would be 1 GB."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from flash_attn import _native, flash_attn_func

MB = 2**20
# What docs/cpu-backend.md states for B = 1, H = 8, S = 16k, D = 64.
SHARED_MB, THREAD_MB = 64, 1

PROGRAM = """
import resource, sys, torch
from flash_attn import flash_attn_func

torch.set_num_threads(2)
S, H, dtype, left = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4])
make = lambda rows: torch.randn(1, rows, H, 64, dtype=dtype, requires_grad=True)
def step(rows):
    q, k, v = make(rows), make(rows), make(rows)
    flash_attn_func(q, k, v, causal=True, window_size=(left, 0)).sum().backward()
step(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(S)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read in the unit that Linux reports it in")


def growth_mb(*arguments) -> float:
    """Of the process: S, H, dtype, left bound of the window."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return int(done.stdout) / 1024


@linux
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_is_linear(dtype):
    short, long = growth_mb(8192, 1, dtype, 256), growth_mb(16384, 1, dtype, 256)
    # Tensors: q, k, v, out and four gradients of S * 64; packed operands and sums, at most ten more of that size.
    tensor_mb = 16384 * 64 * 4 / MB
    assert long < 20 * tensor_mb, f"{long:.0f} MB for S = 16384"
    # Below five tensors the allocator's habits decide, not the algorithm.
    assert long < 2.5 * max(short, 5 * tensor_mb), f"{short:.0f} MB for S = 8192, {long:.0f} MB for twice that"


@linux
def test_peak_memory_of_the_process():
    """Nothing is allocated past what the backend counts."""
    tensors = 8 * 16384 * 8 * 64 * 2 / MB  # q, k, v, out, dout, dq, dk, dv
    assert growth_mb(16384, 8, "bfloat16", 256) < tensors + SHARED_MB + 2 * THREAD_MB + 30


@pytest.fixture
def threads():
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def scratch_mb(call):
    """What call() returns, and its peak of scratch memory, in a thread that has kept none from earlier calls."""
    peak = _native.load()._cpu_workspace_peak
    peak()
    kept = peak()  # By other threads: the peak since a moment ago.
    with ThreadPoolExecutor(1) as thread:
        identity = thread.submit(threading.get_native_id).result()
        result = thread.submit(call).result()
        megabytes = (peak() - kept) / MB
    while os.path.exists(f"/proc/self/task/{identity}"):
        time.sleep(1e-3)  # Joined, it has yet to give back what it keeps.
    return result, megabytes


def make(*rows, dtype):
    return (torch.randn(1, n, 8, 64, dtype=dtype, requires_grad=True) for n in rows)


def forward_mb(Sq, Sk, dtype, window=(-1, -1)):
    """Peak of scratch memory, causal."""
    q, k, v = make(Sq, Sk, Sk, dtype=dtype)
    return scratch_mb(lambda: flash_attn_func(q, k, v, causal=True, window_size=window))[1]


def backward_mb(S, dtype, window=(-1, -1)):
    out = flash_attn_func(*make(S, S, S, dtype=dtype), causal=True, window_size=window)
    return scratch_mb(lambda: out.sum().backward())[1]


def few_queries(dtype):
    """So many that four threads work on whole blocks of them, of up to 512 in tiles and 128 in fp64."""
    return 512 if dtype == torch.float64 else 1024


@pytest.mark.second_torch
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scratch_memory_at_16k(dtype, n, threads):
    threads(n)
    # A thread may hold one head at a time, forward 4 MB in bf16 and backward 12.
    for mb, least in (forward_mb(few_queries(dtype), 16384, dtype), 3), (backward_mb(16384, dtype, (64, 0)), 8):
        assert least < mb <= SHARED_MB + n * THREAD_MB, f"{mb} MB"


@pytest.mark.second_torch
def test_scratch_memory_of_what_takes_less_time(threads):
    """So few queries and the window above, which make the test quick, hide nothing."""
    threads(4)
    few = few_queries(torch.float32)
    assert forward_mb(few, 4096, torch.float32) == forward_mb(4096, 4096, torch.float32) > 8
    assert backward_mb(4096, torch.float32, (64, 0)) == backward_mb(4096, torch.float32) > 8


@pytest.mark.second_torch
@pytest.mark.parametrize("n", [1, 4])
def test_scratch_memory_of_a_window_does_not_grow(n, threads):
    threads(n)
    left, dtype = 700, torch.float32
    mb = [forward_mb(S, S, dtype, (left, 0)) for S in (2048, 4096)]
    packed_mb = (left + 384) * (64 + 64) * 4 / MB
    assert n * packed_mb / 2 < mb[0] == mb[1] < n * (packed_mb + THREAD_MB)
