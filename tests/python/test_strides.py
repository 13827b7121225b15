"""Inputs and outputs of any layout in memory."""

from __future__ import annotations

import math

import cases
import harness
import pytest
import tensors
import torch
from cases import Case
from functions import whole_storage

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn import flash_attn_interface as interface

STRIDED = pytest.mark.feature("strided inputs forward", "strided inputs backward")
B, Sq, Sk, H, Hk, D = 2, 70, 150, 4, 2, 24


def last_stride_two(x):
    return torch.stack((x, torch.full_like(x, math.nan)), -1).flatten(-2)[..., ::2]


LAYOUTS = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "batch innermost": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "last stride 2": last_stride_two,
    "features transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda x: tensors.strided(x, "sliced"),
    "every second row": lambda x: torch.stack((x, torch.full_like(x, math.nan)), 2).flatten(1, 2)[:, ::2],
    "offset by one element": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


@STRIDED
@pytest.mark.second_torch
@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_layout_changes_no_bit(dtype, layout, which):
    inputs = harness.make_inputs(Case(dtype=dtype, lengths=((Sq, Sk),) * B, H=H, Hk=Hk, D=D, causal=True))
    expected, lse, _ = flash_attn_func(*inputs.leaves, causal=True, return_attn_probs=True)
    expected_grads = torch.autograd.grad(expected, inputs.leaves, inputs.dout)
    change = LAYOUTS[layout]
    leaves = [
        (change(x.detach()) if which in (name, "all") else x.detach()).requires_grad_()
        for name, x in zip("qkv", inputs.leaves)
    ]
    dout = change(inputs.dout) if which in ("dout", "all") else inputs.dout
    out, out_lse, _ = flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    assert torch.equal(out, expected) and torch.equal(out_lse, lse)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, leaves, dout), expected_grads))


@STRIDED
@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_expanded_inputs(dtype):
    """Stride 0: one key/value head, one batch of keys and one dout for all. Gradients sum over the expansion."""
    t = harness.TORCH_DTYPES[dtype]
    q, k, v = torch.randn(B, Sq, H, D).to(t), torch.randn(1, Sk, 1, D).to(t), torch.randn(1, Sk, 1, D).to(t)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expanded = [q, k.expand(B, Sk, Hk, D), v.expand(B, Sk, Hk, D)]
    full = [x.detach().contiguous().requires_grad_() for x in expanded]
    dout = torch.randn(1, 1, 1, D).to(t).expand(B, Sq, H, D)
    out, expected = flash_attn_func(*expanded), flash_attn_func(*full)
    assert torch.equal(out, expected)
    got = torch.autograd.grad(out, leaves, dout)
    plain = torch.autograd.grad(expected, full, dout.contiguous())
    for a, b in zip(got, (plain[0], *(x.sum((0, 2), keepdim=True) for x in plain[1:]))):
        assert torch.equal(a, b)


@STRIDED
@pytest.mark.parametrize("dtype", ("fp16", "bf16"))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", (64, 128))
@pytest.mark.parametrize("S", (1, 2, 5, 17, 128))
def test_transposed_dout(S, D, causal, dtype):
    """Contract: test_flash_attn_bwd_transpose."""
    case = Case(dtype=dtype, lengths=((S, S),) * 5, H=2, Hk=2, D=D, causal=causal)
    inputs = harness.make_inputs(case)
    inputs.dout = inputs.dout.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    out, lse, _ = harness.public_call(inputs)
    grads = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    harness.compare(inputs, out, lse, grads, *(harness.reference(inputs, None, a) for a in harness.arithmetics(case)))


def raw_backward(inputs, buffers):
    case = inputs.case
    q, k, v = (x.detach() for x in inputs.leaves)
    scale = case.D**-0.5
    score = (0.0, scale, case.causal, -1, -1, 0.0, None)
    if case.varlen:
        cu = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, *inputs.max_seqlens)
        out, lse, _, _ = interface._flash_attn_varlen_forward(q, k, v, *cu, *score, False)
        interface._flash_attn_varlen_backward(inputs.dout, q, k, v, out, lse, *buffers, *cu, *score, False)
    else:
        out, lse, _, _ = interface._flash_attn_forward(q, k, v, *score, False)
        interface._flash_attn_backward(inputs.dout, q, k, v, out, lse, *buffers, *score, False)


@STRIDED
@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("layout", ["dqkv", "dkv", "heads first", "sliced"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_gradient_buffers(varlen, layout, dtype):
    """Backward overwrites strided views of a packed buffer in place, and nothing around them."""
    case = Case(
        dtype=dtype, lengths=((90, 90), (37, 37)) if varlen else ((90, 90),) * 2, varlen=varlen, H=3, Hk=3, D=16
    )
    inputs = harness.make_inputs(case)
    expected = [torch.full_like(x, math.nan) for x in inputs.leaves]
    raw_backward(inputs, expected)
    dtype = expected[0].dtype
    rows, heads = inputs.q.shape[:-2], inputs.q.shape[-2:]
    if layout == "dqkv":
        whole = torch.full((*rows, 3, *heads), 7.0, dtype=dtype)
        buffers = whole.unbind(-3)
    elif layout == "dkv":
        whole = torch.full((*rows, 2, *heads), 7.0, dtype=dtype)
        buffers = [torch.full_like(inputs.q, 7.0), *whole.unbind(-3)]
    else:
        buffers = [tensors.strided(torch.full_like(x, 7.0), layout) for x in expected]
    pointers = [x.data_ptr() for x in buffers]
    raw_backward(inputs, buffers)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected))
    assert pointers == [x.data_ptr() for x in buffers]
    if layout == "sliced":
        for window, plain in zip(buffers, expected):
            assert torch.isfinite(whole_storage(window)).sum() == plain.numel()  # NaN around the window is still there


@STRIDED
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_packed_equals_separate(dtype):
    """One packed tensor gives, bit for bit, what its three views give; its gradient is contiguous."""
    qkv = torch.randn(B, Sk, 3, H, D).to(harness.TORCH_DTYPES[dtype]).requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    dout = torch.randn_like(out)
    (packed,) = torch.autograd.grad(out, qkv, dout)
    parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    separate = flash_attn_func(*parts, causal=True)
    assert torch.equal(out, separate) and packed.is_contiguous()
    for n, grad in enumerate(torch.autograd.grad(separate, parts, dout)):
        assert torch.equal(packed[:, :, n], grad)


@STRIDED
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_varlen_views_of_a_packed_buffer(dtype):
    qkv = torch.randn(120, 3, H, D).to(harness.TORCH_DTYPES[dtype])
    cu = torch.tensor([0, 50, 120], dtype=torch.int32)
    strided = flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 70, 70, causal=True)
    plain = flash_attn_varlen_func(*(x.contiguous() for x in qkv.unbind(1)), cu, cu, 70, 70, causal=True)
    assert torch.equal(strided, plain)


def test_results_are_contiguous_and_alias_nothing():
    q = torch.randn(B, H, Sq, D).transpose(1, 2)
    out, lse, _ = flash_attn_func(q, q, q, return_attn_probs=True)
    assert out.is_contiguous() and lse.is_contiguous()
    assert out.data_ptr() != q.data_ptr()
