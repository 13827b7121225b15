"""Every instruction set that this machine executes gives the oracle's results: the choice is one of speed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import cases
import harness
import pytest
import torch
from cases import Case

import flash_attn
from flash_attn import flash_attn_interface as interface

module = interface.flash_attn_gpu
AVAILABLE = module._cpu_isas()
KNOWN = ("portable", "avx2", "avx512", "avx512_bf16")

# A slice of the grid: every dtype, tails of vectors of every width, and each feature.
SLICE = [
    Case(dtype=dtype, lengths=((137, 1100),), H=2, Hk=1, D=D, Dv=Dv, causal=True)
    for dtype in cases.DTYPES
    for D, Dv in ((1, None), (5, 3), (17, 33), (31, 63), (64, None), (111, 8), (257, 40))
]
SLICE += [
    replace(Case(dtype=dtype, lengths=((67, 1100), (3, 1), (300, 41)), varlen=True, H=3, Hk=1, D=40), **settings)
    for dtype in cases.DTYPES
    for settings in (
        {},
        {"window": (100, 7)},
        {"softcap": 15.0},
        {"alibi": "BH"},
        {"dropout_p": 0.17},
        {"bias": "H", "mask": "3-D", "sink": True, "bounds": "heads", "lse_gradient": True},
    )
]


@pytest.fixture(params=KNOWN)
def isa(request):
    if request.param not in AVAILABLE:
        pytest.skip(f"this machine does not execute {request.param}; it has {', '.join(AVAILABLE)}")
    module._force_cpu_isa(request.param)
    yield request.param
    module._force_cpu_isa("")


@pytest.mark.second_torch
@pytest.mark.parametrize("case", [c.param() for c in SLICE])
def test_slice(case, isa):
    q = torch.zeros(1, 1, 1, 8, dtype=harness.TORCH_DTYPES[case.dtype])
    used = flash_attn.explain(q, q, q).instruction_set
    if case.dtype == "fp64":
        assert used == "portable"  # the reference precision has one kernel
    else:
        # Only bf16 has the BF16 dot product; others run the set below it.
        assert used == ("avx512" if isa == "avx512_bf16" and case.dtype != "bf16" else isa)
    harness.check(case)


def test_portable_is_always_there():
    assert AVAILABLE[-1] == "portable" and set(AVAILABLE) <= set(KNOWN)


def test_unknown_name_is_refused():
    with pytest.raises(RuntimeError, match="(?s)portable.*sse9"):
        module._force_cpu_isa("sse9")
    assert flash_attn.explain(*(torch.zeros(1, 1, 1, 8),) * 3).instruction_set in AVAILABLE


def report(**environment):
    script = (
        "import torch, flash_attn; q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16);"
        "print(flash_attn.explain(q, q, q).instruction_set)"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


@pytest.mark.second_torch
@pytest.mark.parametrize("name", AVAILABLE)
def test_environment_variable(name):
    done = report(FLASH_ATTN_CPU_ISA=name)
    assert done.stdout.strip() == name, done.stderr


def test_environment_variable_with_an_unknown_name():
    done = report(FLASH_ATTN_CPU_ISA="sse9")
    assert done.returncode != 0 and "FLASH_ATTN_CPU_ISA" in done.stderr and "sse9" in done.stderr
    assert "portable" in done.stderr
