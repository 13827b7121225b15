"""What client libraries rely on and no other file of this folder tests; tests/clients/README.md has the whole list."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import sys

import pytest
import torch
from small_calls import dense, randn, varlen

import flash_attn
from flash_attn import flash_attn_interface as interface

SCORE = (0.0, 0.3, False, -1, -1, 0.0, None)  # dropout_p, softmax_scale, causal, window, softcap, alibi_slopes

# Module: what clients import from it.
PUBLIC = [f"flash_attn{form}_func" for form in ("", "_varlen", "_qkvpacked", "_kvpacked")]
PUBLIC += ["flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "flash_attn_with_kvcache"]
RAW = [f"_flash_attn_{form}{way}" for form in ("", "varlen_") for way in ("forward", "backward")]
IMPORTS = {
    "flash_attn": ["__version__", *PUBLIC],
    "flash_attn.flash_attn_interface": [*PUBLIC, *RAW, *["_wrapped" + name for name in RAW], "flash_attn_gpu"],
    "flash_attn_2_cuda": ["fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"],
    "flash_attn.bert_padding": ["pad_input", "unpad_input", "index_first_axis", "rearrange"],
    "flash_attn.ops.triton.rotary": ["apply_rotary"],
    "flash_attn.layers.rotary": [
        "apply_rotary_emb",
        "apply_rotary_emb_func",
        "RotaryEmbedding",
        "apply_rotary_emb_qkv_",
        "apply_rotary_emb_kv_",
    ],
    "flash_attn.losses.cross_entropy": ["CrossEntropyLoss"],
    "flash_attn.ops.triton.cross_entropy": ["cross_entropy_loss"],
    "flash_attn.modules.mha": ["MHA", "FlashSelfAttention", "FlashCrossAttention"],
    "flash_attn.modules.mlp": ["GatedMlp"],
    "flash_attn.modules.block": ["Block"],
}


@pytest.mark.parametrize("module", IMPORTS)
def test_names_that_clients_import(module):
    imported = importlib.import_module(module)
    assert not [name for name in IMPORTS[module] if not hasattr(imported, name)]


@pytest.mark.skipif(sys.version_info < (3, 10), reason="packages_distributions is new in Python 3.10")
def test_distribution_is_flash_attn():
    """transformers and diffusers look up which distribution the import name belongs to."""
    owners = importlib.metadata.packages_distributions().get("flash_attn", [])
    if not owners:
        pytest.skip("flash_attn is not installed here, only on the path")
    assert {name.replace("_", "-") for name in owners} == {"flash-attn"}


@pytest.mark.parametrize("return_softmax, dropout_p", [(False, 0.0), (True, 0.3)])
def test_results_of_raw_forwards(return_softmax, dropout_p):
    """Ring-attention libraries unpack four values, and tell versions apart by their number and by the LSE's rank."""
    (q, k, v), (packed_q, packed_k, packed_v, *lengths) = dense(), varlen()
    score = (dropout_p, *SCORE[1:], return_softmax)
    for results, rows, lse_shape in (
        (interface._flash_attn_forward(q, k, v, *score), (2, 5), (2, 4, 5)),
        (interface._flash_attn_varlen_forward(packed_q, packed_k, packed_v, *lengths, *score), (5,), (4, 5)),
    ):
        assert type(results) is tuple and len(results) == 4
        out, lse, s_dmask, rng_state = results
        assert out.shape == (*rows, 4, 8) and out.dtype == q.dtype
        assert lse.shape == lse_shape and lse.dtype == torch.float32 and lse.is_contiguous()
        assert rng_state.shape == (2,) and rng_state.dtype == torch.int64
        assert (s_dmask.numel() > 0) is return_softmax


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lse_is_fp32_for_half_dtypes(dtype):
    q, k, v = (x.to(dtype) for x in dense())
    assert interface._flash_attn_forward(q, k, v, *SCORE, False)[1].dtype == torch.float32


@pytest.mark.parametrize("w", [1, 3, 9, 100])
def test_windows_of_transformers(w):
    """transformers passes a window of w keys as (w - 1, w - 1) together with causal=True, also past the sequence."""
    q, k, v = dense()
    call = flash_attn.flash_attn_func
    given = call(q, k, v, causal=True, window_size=(w - 1, w - 1))
    assert torch.equal(given, call(q, k, v, causal=True, window_size=(w - 1, 0)))
    assert torch.equal(given, call(q, k, v, causal=True)) is (w >= k.shape[1])
    packed = varlen()
    varlen_call = flash_attn.flash_attn_varlen_func
    given = varlen_call(*packed, causal=True, window_size=(w - 1, w - 1))
    assert torch.equal(given, varlen_call(*packed, causal=True, window_size=(w - 1, 0)))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_backward_uses_the_out_and_lse_it_is_given(layout):
    """Keys in two parts: with the merged out and LSE, the backward of each part gives its share of the whole's
    gradients. The LSE may have any strides: that of ring-flash-attn is a view of (B,S,H)."""
    q, k, v = dense()
    dout = randn(*q.shape, seed=7)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, *SCORE, False)
    wanted = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *wanted, *SCORE, False)
    parts = [interface._flash_attn_forward(q, a, b, *SCORE, False) for a, b in zip(k.split(4, 1), v.split(4, 1))]
    merged = torch.stack([part[1] for part in parts]).logsumexp(0)
    shares = [(part[1] - merged).exp().transpose(1, 2).unsqueeze(-1) for part in parts]
    merged_out = sum(part[0] * share for part, share in zip(parts, shares))
    torch.testing.assert_close(merged, lse)
    if layout == "transposed":
        merged = merged.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "sliced":
        merged = torch.stack([merged, torch.full_like(merged, math.nan)], dim=-1)[..., 0]
    assert merged.is_contiguous() is (layout == "contiguous")
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for a, b, da, db in zip(*(x.split(4, 1) for x in (k, v, dk, dv))):
        part_dq = torch.full_like(q, 7.0)
        interface._flash_attn_backward(dout, q, a, b, merged_out, merged, part_dq, da, db, *SCORE, False)
        dq += part_dq
    for got, expected in zip((dq, dk, dv), wanted):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
