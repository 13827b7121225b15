"""AMD GPUs beside the two that run the whole grid: some of its problems on each, simulated."""

from __future__ import annotations

import cases
import gpu_cases
import harness
import pytest
import torch
from devices import OTHERS, SIMULATED, Device, needs_code

import flash_attn
from flash_attn.testing import simulated

pytestmark = [pytest.mark.gpu, pytest.mark.simulated]

# Every eighth problem of the list, another eighth on each target.
EIGHTHS = 8
PROBLEMS = [
    (case, Device(target, device.schedule, device.seed))
    for i, target in enumerate(OTHERS)
    for case, device in [pair for pair in gpu_cases.committed() if pair[1].name == "gfx942"][i::EIGHTHS]
]


@pytest.mark.parametrize("case, device", [pytest.param(c, d, id=f"{d.name}-{c.id}") for c, d in PROBLEMS])
def test_case(case, device):
    needs_code(device.name)
    harness.check(case, device=device)


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("D", (64, 128, 192, 256))
def test_aligned_causal_problems_without_features(target, D):
    """What the plain variant computes, where a target has one."""
    needs_code(target)
    harness.check(cases.Case(lengths=((70, 143),), H=2, Hk=1, D=D, dtype="bf16", causal=True), device=Device(target))


@pytest.mark.parametrize("D", (64, 33))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("target", SIMULATED + OTHERS)
def test_outputs_are_rounded_to_nearest_even(target, dtype, D):
    """Half the sum of two keys' values: many are ties. Tolerances let truncated ones pass. dV is half a sum as well."""
    needs_code(target)
    q, k = torch.zeros(1, 2, 1, D, dtype=dtype), torch.randn(1, 2, 1, D, dtype=dtype)
    v, dout = (torch.randn(1, 2, 1, D).to(dtype).requires_grad_() for _ in range(2))
    with simulated(target):
        out = flash_attn.flash_attn_func(q, k, v)
        (dv,) = torch.autograd.grad(out, v, dout)
    for got, of in ((out, v), (dv, dout)):
        assert torch.equal(got, (of.float().sum(1, keepdim=True) / 2).to(dtype).expand_as(got))


@pytest.mark.parametrize("target", OTHERS)
def test_explain_names_the_target_and_the_engines_variant(target):
    needs_code(target)
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with simulated(target):
        explanation = flash_attn.explain(q, q, q)
    assert explanation.instruction_set == target
    plain = explanation.kernel == "fa_forward_bf16_d64_plain"
    assert plain == (target in ("gfx90a", "gfx950", "gfx1100"))
    assert any(f"general variant: {target} has no other" in reason for reason in explanation.reasons) != plain
