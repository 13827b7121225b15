"""Repeating a call repeats every bit, whatever ran in between. Contract: the race and determinism tests, in small."""

from __future__ import annotations

import cases
import harness
import pytest
import torch
from cases import Case

PAIRS = ((1, 239), (3, 799), (127, 512), (113, 203), (256, 512), (200, 64), (500, 100), (65, 1100))


@pytest.fixture
def all_threads():
    """More threads than cores, so that a race has a chance."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def repeat(case, times):
    inputs = harness.make_inputs(case)

    def run():
        torch.manual_seed(42)
        out, lse, _ = harness.public_call(inputs)
        return [out, lse, *torch.autograd.grad(out, inputs.leaves, inputs.dout)]

    first = run()
    for n in range(times):
        # Fills freed memory with something else, which a result that is not fully written would show.
        torch.full((1 << 16,), float(n))
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), first, run()):
            assert torch.equal(a, b), f"{name} differs in repeat {n} of {case.id}"


@pytest.mark.second_torch
@pytest.mark.parametrize("dropout_p", (0.0, 0.17))
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_race_condition(causal, pair, dropout_p, all_threads):
    """Without `deterministic` dq too: the CPU sums in one order always."""
    repeat(Case(dtype="fp16", lengths=(pair,) * 3, H=4, Hk=4, D=32, causal=causal, dropout_p=dropout_p), 10)


@pytest.mark.feature("deterministic")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"window": (50, 20)}, {"alibi": "BH"}], ids=str)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_deterministic(varlen, settings, dtype, all_threads):
    lengths = ((70, 600), (0, 9), (129, 130)) if varlen else ((130, 600),) * 2
    repeat(Case(dtype=dtype, lengths=lengths, varlen=varlen, H=6, Hk=2, D=40, deterministic=True, **settings), 10)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_deterministic_changes_nothing_here(dtype):
    """The CPU backward is always deterministic, so the flag changes no bit."""
    inputs = harness.make_inputs(Case(dtype=dtype, lengths=((130, 600),), H=4, Hk=2, D=40))
    grads = [
        torch.autograd.grad(harness.public_call(inputs, deterministic=flag)[0], inputs.leaves, inputs.dout)
        for flag in (False, True)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
