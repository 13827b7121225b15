"""Inference calls, argument for argument as the named client makes them, without installing it."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from definition import assert_near, merge, scores
from plain_attention import attend, band
from rotation import expected as rotated
from rotation import tables

import flash_attn

B, S, H, Hk, D = 3, 40, 4, 2, 16
LENGTHS = torch.tensor([7, 30, 19], dtype=torch.int32)


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def keys_of_each(cache, lengths):
    return [row[: int(n)] for row, n in zip(cache, lengths)]


def decode_from_definition(q, k_cache, v_cache, lengths, **options):
    """q (B,1,H,D) over the first lengths[b] slots of caches (B,S,Hk,D)."""
    parts = zip(q, keys_of_each(k_cache, lengths), keys_of_each(v_cache, lengths))
    return torch.cat([attend(x[None].double(), k[None].double(), v[None].double(), **options) for x, k, v in parts])


def test_megatron_decode_with_rotary():
    """Megatron-core 0.16, flash_decode: everything by keyword; caches are stored sequence first and passed as views
    permuted to batch first, appended to in place."""
    stored = [torch.randn(S, B, Hk, D) for _ in range(2)]
    before = [x.clone() for x in stored]
    k_cache, v_cache = (x.permute(1, 0, 2, 3) for x in stored)
    q, k, v = (torch.randn(1, B, h, D).permute(1, 0, 2, 3) for h in (H, Hk, Hk))
    cos, sin = tables(S, D)
    out = flash_attn.flash_attn_with_kvcache(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=LENGTHS,
        rotary_interleaved=False,
    )
    positions = LENGTHS[:, None].long()
    q_turned, k_turned = (rotated(x, cos, sin, positions, False) for x in (q, k))
    wanted_k, wanted_v = (x.permute(1, 0, 2, 3).clone() for x in before)
    for b, n in enumerate(LENGTHS.tolist()):
        wanted_k[b, n], wanted_v[b, n] = k_turned[b, 0].float(), v[b, 0]
    torch.testing.assert_close(k_cache, wanted_k)
    assert torch.equal(v_cache, wanted_v)
    assert_near(out, decode_from_definition(q_turned, wanted_k, wanted_v, LENGTHS + 1))


def paged(k_cache, v_cache, page=8):
    """The caches (B,S,Hk,D) as shuffled pages, and their block table."""
    table = torch.randperm(B * S // page).reshape(B, S // page).int()
    pages = [torch.empty(B * S // page, page, Hk, D) for _ in range(2)]
    for whole, part in zip((k_cache, v_cache), pages):
        part[table.flatten().long()] = whole.reshape(-1, page, Hk, D)
    return *pages, table


def test_megatron_paged_decode():
    """Megatron-core 0.16, dynamic batching: causal, block_table and num_splits=0, which asks the library to choose."""
    k_cache, v_cache = (torch.randn(B, S, Hk, D) for _ in range(2))
    k_pages, v_pages, table = paged(k_cache, v_cache)
    q = torch.randn(B, 1, H, D)
    out = flash_attn.flash_attn_with_kvcache(
        q=q,
        k_cache=k_pages,
        v_cache=v_pages,
        cache_seqlens=LENGTHS,
        causal=True,
        block_table=table,
        num_splits=0,
    )
    assert_near(out, decode_from_definition(q, k_cache, v_cache, LENGTHS))


def test_megatron_paged_prefill():
    """Megatron-core 0.16, chunked prefill: seven arguments by position, then softmax_scale, causal and block_table."""
    k_cache, v_cache = (torch.randn(B, S, Hk, D) for _ in range(2))
    k_pages, v_pages, table = paged(k_cache, v_cache)
    chunks = [5, 1, 12]
    q = torch.randn(sum(chunks), H, D)
    out = flash_attn.flash_attn_varlen_func(
        q,
        k_pages,
        v_pages,
        bounds(*chunks),
        bounds(*LENGTHS.tolist()),
        max(chunks),
        int(LENGTHS.max()),
        softmax_scale=0.3,
        causal=True,
        block_table=table,
    )
    for b, (part, got) in enumerate(zip(q.split(chunks), out.split(chunks))):
        k, v = (x[b, : LENGTHS[b]][None].double() for x in (k_cache, v_cache))
        wanted = attend(part[None].double(), k, v, band(chunks[b], int(LENGTHS[b])), scale=0.3)
        assert_near(got[None], wanted)


def test_megatron_imports():
    """Megatron-core 0.16 imports these inside `try` with a bare `except`, so a missing one is never seen."""
    assert importlib.import_module("flash_attn.layers.rotary").apply_rotary_emb
    assert flash_attn.flash_attn_varlen_func and flash_attn.flash_attn_with_kvcache and flash_attn.__version__


def test_unsloth_gemma2_decode():
    """unsloth 2026.10.9, models/gemma2.py: permuted caches, an int cache_seqlens, cache_leftpad, softcap, window."""
    stored = [torch.randn(S, B, Hk, D) for _ in range(2)]
    k_cache, v_cache = (x.permute(1, 0, 2, 3) for x in stored)
    q, leftpad, window = torch.randn(B, H, 1, D), torch.tensor([0, 21, 4], dtype=torch.int32), 12
    out = flash_attn.flash_attn_with_kvcache(
        q.transpose(1, 2),
        k_cache,
        v_cache,
        cache_seqlens=25,
        cache_leftpad=leftpad,
        softmax_scale=0.5,
        softcap=3.0,
        window_size=(window - 1, 0),
    )
    for b, pad in enumerate(leftpad.tolist()):
        first = max(pad, 25 - window)
        k, v = (x[b, first:25].double().repeat_interleave(2, dim=1) for x in (k_cache, v_cache))
        s = 3 * (torch.einsum("hd,jhd->hj", q[b, :, 0].double(), k) * 0.5 / 3).tanh()
        assert_near(out[b, 0], torch.einsum("hj,jhd->hd", s.softmax(-1), v))


def test_unsloth_attention_calls():
    """unsloth 2026.10.9, utils/attention_dispatch.py: transposed views; varlen with seven arguments by position."""
    Q, K, V = (torch.randn(1, h, S, D) for h in (H, Hk, Hk))
    views = [x.transpose(1, 2) for x in (Q, K, V)]
    dense = flash_attn.flash_attn_func(*views, causal=True, window_size=(9, 9)).reshape(1, S, H, D)
    assert_near(dense, attend(*(x.double() for x in views), band(S, S, left=9)))
    packed = [x.reshape(S, -1, D) for x in views]
    cu = bounds(15, 25)
    options = {"dropout_p": 0.0, "causal": True}
    varlen = flash_attn.flash_attn_varlen_func(*packed, cu, cu, 25, 25, **options).view(1, S, H, D)
    same = torch.arange(S) < 15
    visible = band(S, S) & (same[:, None] == same)
    assert_near(varlen, attend(*(x.double() for x in views), visible))


def test_unsloth_health_check():
    """unsloth 2026.10.9: when this import raises, it also switches transformers' FlashAttention-2 off."""
    module = importlib.import_module("flash_attn.flash_attn_interface")
    assert all(callable(getattr(module.flash_attn_gpu, name)) for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd"))


def test_vllm_vision_attention():
    """vLLM on ROCm, ViT: bf16, q, k and v by position, the rest by keyword, max_seqlen as a tensor."""
    q, k, v = (torch.randn(30, H, D).bfloat16() for _ in range(3))
    cu = bounds(12, 18)
    out = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=torch.tensor(18),
        max_seqlen_k=torch.tensor(18),
        dropout_p=0.0,
        causal=False,
        softmax_scale=0.25,
    )
    first = torch.arange(30) < 12
    wanted = attend(*(x[None].double() for x in (q, k, v)), first[:, None] == first, scale=0.25)
    assert_near(out[None], wanted, 1e-2)


def test_vllm_mla_prefill():
    """vLLM on ROCm, MLA: V padded to the width of Q and K, return_attn_probs for LSE, num_splits when batches must be
    invariant; the new tokens (causal) and chunks of context (not causal, some of them empty) merged by LSE."""
    Dv, new, context = 8, [4, 9], [(6, 5), (0, 8)]
    q = torch.randn(sum(new), H, D)
    k_new, k_first, k_second = (torch.randn(n, H, D) for n in (sum(new), 6, 13))
    v_new, v_first, v_second = (torch.randn(n, H, Dv) for n in (sum(new), 6, 13))

    def call(k, v, lengths, causal):
        return flash_attn.flash_attn_varlen_func(
            q=q,
            k=k,
            v=torch.nn.functional.pad(v, [0, D - Dv]),
            cu_seqlens_q=bounds(*new),
            cu_seqlens_k=bounds(*lengths),
            max_seqlen_q=max(new),
            max_seqlen_k=max(lengths),
            softmax_scale=0.25,
            causal=causal,
            return_attn_probs=True,
            num_splits=1,
        )[:2]

    chunks = [(k_first, v_first, (6, 0)), (k_second, v_second, (5, 8))]
    out, lse = call(k_new, v_new, new, True)
    assert lse.shape == (H, sum(new)) and lse.dtype == torch.float32
    for k, v, lengths in chunks:
        out, lse = merge(out, lse, *call(k, v, lengths, False))
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    for b, rows in enumerate(torch.arange(sum(new)).split(new)):
        pieces = [(k.split(lengths)[b], v.split(lengths)[b]) for k, v, lengths in chunks]
        pieces.append((k_new[rows], v_new[rows]))
        k, v = (torch.cat(x)[None].double() for x in zip(*pieces))
        visible = band(len(rows), k.shape[1])
        assert k.shape[1] == sum(context[b]) + len(rows)
        assert_near(out[None, rows][..., :Dv], attend(q[None, rows].double(), k, v, visible, scale=0.25))
        assert_near(lse[None, :, rows], scores(q[None, rows].double(), k, visible, scale=0.25))
    assert (out[..., Dv:] == 0).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_vllm_rotary_import(interleaved):
    """vLLM imports this wherever find_spec("flash_attn") succeeds; without it a model fails to load (vllm#38056)."""
    assert importlib.util.find_spec("flash_attn") is not None
    apply_rotary = importlib.import_module("flash_attn.ops.triton.rotary").apply_rotary
    x, (cos, sin) = torch.randn(2, 9, H, D), tables(9, D)
    wanted = rotated(x, cos, sin, torch.arange(9), interleaved)
    assert_near(apply_rotary(x, cos, sin, interleaved=interleaved), wanted)


@pytest.mark.parametrize("head_dim", [40, 64, 80, 160, 512])
def test_comfyui_transposed_views(head_dim):
    """ComfyUI --use-flash-attention: (b,h,s,d) memory seen as (b,s,h,d); any exception there means SDPA in silence."""
    q, k, v = (torch.randn(1, 2, n, head_dim, dtype=torch.float16).transpose(1, 2) for n in (33, 21, 21))
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.0, causal=False)
    assert_near(out, attend(*(x.double() for x in (q, k, v))), 2e-3)


def test_exllamav2_paged_decode():
    """exllamav2 pages caches by 256 and appends through the block table; fp16."""
    page = 256
    k_pages, v_pages = (torch.randn(4, page, Hk, D).half() for _ in range(2))
    table, lengths = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([300, 255], dtype=torch.int32)
    q, k, v = (torch.randn(2, 1, h, D).half() for h in (H, Hk, Hk))
    out = flash_attn.flash_attn_with_kvcache(
        q=q, k=k, v=v, k_cache=k_pages, v_cache=v_pages, cache_seqlens=lengths, block_table=table, causal=True
    )
    assert torch.equal(k_pages[0, 300 - page], k[0, 0]) and torch.equal(v_pages[3, 255], v[1, 0])
    whole = [pages[table.long()].flatten(1, 2) for pages in (k_pages, v_pages)]
    assert_near(out, decode_from_definition(q, *whole, lengths + 1), 2e-3)
