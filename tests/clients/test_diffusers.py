"""diffusers' attention backends `flash` and `flash_varlen` against its `native`, which is torch's own attention."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKL  # noqa: F401  the package as its users import it
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

import flash_attn
from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward, _wrapped_flash_attn_forward

B, S, H, D = 2, 37, 3, 40
FUNCTIONS = {"flash": "flash_attn_func", "flash_varlen": "flash_attn_varlen_func"}


@pytest.fixture(params=FUNCTIONS)
def backend(request):
    return request.param


@pytest.fixture
def calls(record):
    assert attention_dispatch.flash_attn_func is flash_attn.flash_attn_func
    assert attention_dispatch._wrapped_flash_attn_forward is _wrapped_flash_attn_forward
    assert attention_dispatch._wrapped_flash_attn_backward is _wrapped_flash_attn_backward
    calls = []
    for name in FUNCTIONS.values():
        record(attention_dispatch, name, calls)
    return calls


def inputs(Sk=S, dtype=torch.bfloat16):
    return [torch.randn(B, n, H, D).to(dtype).requires_grad_() for n in (S, Sk, Sk)]


def run(backend, tensors, dout, **options):
    """(out, gradients) of one backend."""
    with attention_backend(backend):
        out = dispatch_attention_fn(*tensors, **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def check(backend, tensors, calls, **options):
    """No further from native in fp32 than native in the given dtype is, within a factor of two (gradients three)."""
    dout = torch.randn_like(tensors[0])
    exact = [x.detach().float().requires_grad_() for x in tensors]
    wanted = run("native", exact, dout.float(), **options)
    native = run("native", tensors, dout, **options)
    for i, (a, b, c) in enumerate(zip(run(backend, tensors, dout, **options), native, wanted)):
        assert a.shape == c.shape and a.dtype == tensors[0].dtype
        assert (a.float() - c).abs().max() <= (3 if i else 2) * (b.float() - c).abs().max() + 1e-4
    assert [name for name, _ in calls] == [FUNCTIONS[backend]]
    return calls[0][1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention(backend, calls, dtype, is_causal):
    assert check(backend, inputs(dtype=dtype), calls, is_causal=is_causal)["causal"] is is_causal


def test_cross_attention_and_scale(backend, calls):
    assert check(backend, inputs(Sk=11), calls, scale=0.3)["softmax_scale"] == 0.3


def test_key_padding(calls):
    """A mask (B,Sk) that keeps the first keys of each sequence becomes lengths."""
    mask = torch.arange(S) < torch.tensor([[29], [8]])
    call = check("flash_varlen", inputs(), calls, attn_mask=mask)
    assert call["cu_seqlens_k"].tolist() == [0, 29, 37] and call["max_seqlen_k"] == 29


def test_context_parallel_operators():
    """What diffusers calls under context parallelism: the operators by position, LSE as (B,S,H), buffers filled."""
    q, k, v = (x.detach() for x in inputs(dtype=torch.float16))
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    dout = torch.randn_like(q)

    class Context:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    context = Context()
    out, lse = attention_dispatch._flash_attention_forward_op(context, q, k, v, is_causal=True, return_lse=True)
    wanted, wanted_lse, _ = flash_attn.flash_attn_func(*exact, causal=True, return_attn_probs=True)
    assert lse.shape == (B, S, H)
    torch.testing.assert_close(lse, wanted_lse.permute(0, 2, 1).detach(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.float(), wanted.detach(), rtol=1e-2, atol=2e-3)
    gradients = attention_dispatch._flash_attention_backward_op(context, dout)
    for a, b in zip(gradients, torch.autograd.grad(wanted, exact, dout.float())):
        torch.testing.assert_close(a.float(), b, rtol=1e-2, atol=1e-2)


def test_a_transformer_block_end_to_end(backend, calls):
    """A diffusers model switched over with set_attention_backend."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(3)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    ).to(torch.bfloat16)
    arguments = dict(
        hidden_states=torch.randn(1, 16, 4).bfloat16(),
        encoder_hidden_states=torch.randn(1, 5, 32).bfloat16(),
        pooled_projections=torch.randn(1, 8).bfloat16(),
        timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=torch.cat([torch.zeros(16, 1), torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))], dim=1),
        txt_ids=torch.zeros(5, 3),
    )
    # Switching a model over also makes the backend the default; attention_backend puts the old one back.
    with torch.no_grad(), attention_backend("native"):
        native = model(**arguments).sample.float()
        model.set_attention_backend(backend)
        flash = model(**arguments).sample.float()
    assert {name for name, _ in calls} == {FUNCTIONS[backend]} and len(calls) == 2
    torch.testing.assert_close(flash, native, rtol=5e-2, atol=5e-2 * native.abs().max().item())
