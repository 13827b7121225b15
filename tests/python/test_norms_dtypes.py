"""Norms of sums: which dtype each result has, what is rounded when, and the modules' eps."""

import pytest
import torch

from flash_attn.ops import layer_norm as layer_norm_module
from flash_attn.ops import rms_norm as rms_norm_module
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn, layer_norm_linear_fn, rms_norm_fn

pytestmark = pytest.mark.second_torch
N, EPS = 10, 1e-5
FP32_SUM = dict(prenorm=True, residual_in_fp32=True)


def test_residual_in_fp32_under_every_name():
    x, w = torch.randn(3, N).bfloat16(), torch.ones(N)
    for module, kind in ((layer_norm_module, "layer"), (rms_norm_module, "rms")):
        for name, tensors in (
            ("", (x, None, w, w)),
            ("_subset", (x, None, w, w)),
            ("_parallel_residual", (x, x, None, w, w, w, w)),
        ):
            function = getattr(module, f"dropout_add_{kind}_norm{name}")
            for in_fp32 in (False, True):
                y, *_, total = function(*tensors, 0.0, EPS, prenorm=True, residual_in_fp32=in_fp32)
                assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32 if in_fp32 else torch.bfloat16)
    for function in (layer_norm_fn, rms_norm_fn):
        y, total = function(x, w, w, out_dtype=torch.float16, **FP32_SUM)
        assert (y.dtype, total.dtype) == (torch.float16, torch.float32)
    assert layer_norm_linear_fn(x, w, w, torch.randn(3, N), None, **FP32_SUM)[1].dtype == torch.float32
    assert RMSNorm(N)(x, **FP32_SUM)[1].dtype == torch.float32


@pytest.mark.parametrize("function", [layer_norm_fn, rms_norm_fn])
def test_results_see_the_sum_before_its_rounding(function, rng):
    x, residual = torch.randn(200, N).bfloat16(), (20 + torch.randn(200, N)).bfloat16()
    y, total = function(x, torch.ones(N), None, residual, eps=EPS, prenorm=True)
    exact = x.float() + residual.float()
    assert torch.equal(total, exact.bfloat16()) and not torch.equal(total.float(), exact)
    assert torch.equal(y, function(exact, torch.ones(N), None, eps=EPS).bfloat16())


@pytest.mark.parametrize(
    "cls",
    [layer_norm_module.DropoutAddLayerNorm, rms_norm_module.DropoutAddRMSNorm, rms_norm_module.RMSNorm, RMSNorm],
)
def test_modules_take_eps(cls):
    x = torch.tensor([[3.0, -3.0]])
    for eps in (1e-5, 7.0):
        torch.testing.assert_close(cls(2, eps=eps)(x), x / (9 + eps) ** 0.5)
