"""Training calls of raw and underscore functions, argument for argument as the named client makes them."""

from __future__ import annotations

import pytest
import torch
from definition import assert_near, differentiated, merge, scores
from plain_attention import band

import flash_attn_2_cuda
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_attn_gpu,
)

B, S, H, D = 2, 32, 4, 16
SCALE = D**-0.5
CHUNK = 8  # MoBA's


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def inputs(*shape):
    """q, k, v, dout."""
    return [torch.randn(*shape, H, D) for _ in range(4)]


def slices(x):
    """Gradient buffers as xformers and TransformerEngine make them: views of one allocation, filled with rubbish."""
    return torch.full((3, *x.shape), 7.0).unbind(0)


def interleaved(x):
    """The same as views of a packed (...,3,H,D)."""
    return torch.full((*x.shape[:-2], 3, *x.shape[-2:]), 7.0).unbind(-3)


# xformers to October 2025: ops/fmha/flash.py


@pytest.mark.parametrize("buffers", [slices, interleaved])
@pytest.mark.parametrize("causal", [False, True])
def test_xformers_dense(causal, buffers):
    """fwd with 13 arguments and bwd with 19, all by position."""
    q, k, v, dout = inputs(B, S)
    score = (0.0, SCALE, causal, -1, -1, 0.0)
    out, lse, _, rng_state = flash_attn_gpu.fwd(q, k, v, None, None, *score, False, None)
    visible = band(S, S) if causal else None
    dq, dk, dv = buffers(q)
    flash_attn_gpu.bwd(dout, q, k, v, out, lse, dq, dk, dv, None, *score, False, None, rng_state)
    assert_near(lse, scores(q.double(), k.double(), visible))
    for got, wanted in zip((out, dq, dk, dv), differentiated((q, k, v), dout, visible)):
        assert_near(got, wanted)


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
def test_xformers_varlen(window):
    """varlen_fwd with 21 arguments and varlen_bwd with 24, all by position; LSE is (H,total)."""
    lengths = (9, 23)
    q, k, v, dout = inputs(S)
    cu = bounds(*lengths)
    score = (0.0, SCALE, False, True, *window, 0.0)  # p, scale, zero_tensors, causal, window, softcap
    out, lse, _, rng_state = flash_attn_gpu.varlen_fwd(
        q, k, v, None, cu, cu, None, None, None, None, 23, 23, *score, False, None
    )
    assert lse.shape == (H, S)
    dq, dk, dv = slices(q)
    flash_attn_gpu.varlen_bwd(
        dout, q, k, v, out, lse, dq, dk, dv, cu, cu, None, 23, 23, *score, False, None, rng_state
    )  # fmt: skip
    document = torch.arange(S) < 9
    visible = band(S, S, left=None if window[0] < 0 else window[0]) & (document[:, None] == document)
    wanted = differentiated([x[None] for x in (q, k, v)], dout[None], visible)
    for a, b in zip((out, dq, dk, dv), wanted):
        assert_near(a[None], b)


def test_xformers_used_keys_and_pages():
    """seqused_k and block_tables of varlen_fwd, as the padded and the paged key biases pass them."""
    q, cache = torch.randn(4, H, D), torch.randn(2, 2, 16, H, D)
    used, cu_q = torch.tensor([11, 5], dtype=torch.int32), bounds(1, 3)
    score = (0.0, SCALE, False, True, -1, -1, 0.0, False, None)
    k, v = (x.reshape(32, H, D) for x in cache)
    padded = flash_attn_gpu.varlen_fwd(
        q, k, v, None, cu_q, bounds(16, 16), used, None, None, None, 3, 16, *score
    )  # fmt: skip
    k_pages, v_pages = (x.reshape(4, 8, H, D)[[1, 3, 0, 2]].contiguous() for x in cache)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    paged = flash_attn_gpu.varlen_fwd(
        q, k_pages, v_pages, None, cu_q, bounds(16, 16), used, None, table, None, 3, 16, *score
    )  # fmt: skip
    for b, rows in enumerate(torch.arange(4).split([1, 3])):
        one = [q[None, rows], cache[0, b, None, : used[b]], cache[1, b, None, : used[b]]]
        (wanted, *_) = differentiated(one, torch.zeros_like(one[0]), band(len(rows), int(used[b])))
        assert_near(padded[0][None, rows], wanted)
        assert_near(paged[0][None, rows], wanted)


def test_xformers_and_transformer_engine_imports():
    """The alias that xformers takes is the module that NVIDIA's TransformerEngine imports varlen_bwd from."""
    assert flash_attn_gpu is flash_attn_2_cuda and callable(flash_attn_2_cuda.varlen_bwd)


# Libraries that split the sequence: each block's call has the style of its client, results are merged by LSE.


def deepspeed_forward(q, k, v, causal):
    """DeepSpeed 0.19, sequence/fpdt_layer.py, the style for flash_attn 2.7 and later."""
    out, lse, s_dmask, rng_state = _flash_attn_forward(
        q,
        k,
        v,
        0.0,
        SCALE,
        causal=causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    assert lse.shape == (B, H, q.shape[1]) and lse.dtype == torch.float32 and rng_state.shape == (2,)
    return out, lse


def deepspeed_backward(dout, q, k, v, out, lse, gradients, causal):
    _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        *gradients,
        0.0,
        SCALE,
        causal=causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        rng_state=None,
    )


OPTIONS = {"dropout_p": 0.0, "softmax_scale": SCALE, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0}


def engine_forward(q, k, v, causal):
    """TransformerEngine, context_parallel.py: (b,s) flattened, varlen, LSE (H,total)."""
    length = q.shape[1]
    out, lse, _, rng_state = _flash_attn_varlen_forward(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        bounds(*[length] * B),
        bounds(*[k.shape[1]] * B),
        length,
        k.shape[1],
        causal=causal,
        alibi_slopes=None,
        return_softmax=False,
        block_table=None,
        **OPTIONS,
    )
    assert lse.shape == (H, B * length) and rng_state.dtype == torch.int64
    return out.unflatten(0, (B, length)), lse.unflatten(1, (B, length)).transpose(0, 1)


def engine_backward(dout, q, k, v, out, lse, gradients, causal):
    flat = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
    buffers = [torch.full_like(x.flatten(0, 1), 7.0) for x in gradients]
    _flash_attn_varlen_backward(
        *flat,
        lse.transpose(0, 1).flatten(1),
        *buffers,
        bounds(*[q.shape[1]] * B),
        bounds(*[k.shape[1]] * B),
        q.shape[1],
        k.shape[1],
        causal=causal,
        alibi_slopes=None,
        deterministic=True,
        rng_state=torch.zeros(2, dtype=torch.int64),
        **OPTIONS,
    )
    for whole, part in zip(gradients, buffers):
        whole.copy_(part.unflatten(0, whole.shape[:2]))


def engine_dense_forward(q, k, v, causal):
    """TransformerEngine's calls for batches without padding: everything after q, k and v by keyword."""
    return _flash_attn_forward(q, k, v, causal=causal, alibi_slopes=None, return_softmax=False, **OPTIONS)[:2]


def engine_dense_backward(dout, q, k, v, out, lse, gradients, causal):
    _flash_attn_backward(
        dout, q, k, v, out, lse, *gradients, causal=causal, alibi_slopes=None, deterministic=False, **OPTIONS
    )


STYLES = {
    "DeepSpeed FPDT": (deepspeed_forward, deepspeed_backward),
    "TransformerEngine varlen": (engine_forward, engine_backward),
    "TransformerEngine dense": (engine_dense_forward, engine_dense_backward),
}


@pytest.mark.parametrize("buffers", [slices, interleaved])
@pytest.mark.parametrize("client", STYLES)
def test_blocks_of_a_sequence(client, buffers):
    """Causal attention in four blocks: forward merged by LSE; backward of each block with the merged out and LSE,
    into buffers that are used again and must be overwritten."""
    forward, backward = STYLES[client]
    q, k, v, dout = inputs(B, S)
    blocks = [slice(i, i + 8) for i in range(0, S, 8)]
    reused = buffers(q[:, blocks[0]])
    got = [torch.zeros_like(q) for _ in range(4)]
    for i, rows in enumerate(blocks):
        mine = q[:, rows]
        out, lse = forward(mine, k[:, rows], v[:, rows], True)
        for keys in blocks[:i]:
            out, lse = merge(out, lse, *forward(mine, k[:, keys], v[:, keys], False))
        got[0][:, rows] = out
        for keys in blocks[: i + 1]:
            call = (dout[:, rows], mine, k[:, keys], v[:, keys], out, lse)
            backward(*call, reused, keys == rows)
            got[1][:, rows] += reused[0]
            got[2][:, keys] += reused[1]
            got[3][:, keys] += reused[2]
    for a, b in zip(got, differentiated((q, k, v), dout, band(S, S))):
        assert_near(a, b)


# MoBA: fla-core 0.6, ops/moba/parallel.py, and sglang 0.5.23, vmoba.py. Neither imports without Triton or a GPU.


MOBA = {"dropout_p": 0.0, "softmax_scale": SCALE}
MOBA_BACKWARD = {**MOBA, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


def moba_inputs(q, k, v, chosen):
    """The queries (selected,1,D) sorted by (chunk, head), the keys and values (pairs * CHUNK,2,1,D) of each such pair
    that has a query, the arguments that tell them apart, and the queries' places in (S * H)."""
    rows_of = {(c, h): (chosen[:, h] == c).nonzero()[:, 0] for c in range(S // CHUNK) for h in range(H)}
    rows_of = {pair: rows for pair, rows in rows_of.items() if len(rows)}
    place = torch.cat([rows * H + h for (_, h), rows in rows_of.items()])
    kv = torch.stack((k, v), dim=1)
    moba_kv = torch.cat([kv[c * CHUNK : (c + 1) * CHUNK, :, h] for c, h in rows_of]).unsqueeze(2)
    lengths = {
        "cu_seqlens_q": bounds(*map(len, rows_of.values())),
        "cu_seqlens_k": bounds(*[CHUNK] * len(rows_of)),
        "max_seqlen_q": S,
        "max_seqlen_k": CHUNK,
    }
    return q.view(-1, D)[place].unsqueeze(1), moba_kv, lengths, place, list(rows_of)


def moba_forward(q, k, v, own, moba_q, moba_kv, lengths, place, causal):
    """(out (S,H,D), LSE (S*H)) of both calls merged."""
    out, lse, _, _ = _flash_attn_varlen_forward(q=q, k=k, v=v, causal=causal, **own, **MOBA)
    part, part_lse, _, _ = _flash_attn_varlen_forward(
        q=moba_q, k=moba_kv[:, 0], v=moba_kv[:, 1], causal=False, **lengths, **MOBA
    )
    assert lse.shape == (H, S) and part_lse.shape == (1, len(place))
    out, lse = out.reshape(-1, D).clone(), lse.t().reshape(-1).clone()
    rows, row_lse = merge(out[place].unsqueeze(1), lse[place].unsqueeze(0), part, part_lse)
    out[place], lse[place] = rows.squeeze(1), row_lse.squeeze(0)
    return out.view(S, H, D), lse


def moba_backward(arguments, out, lse, gradients, lengths, causal):
    _flash_attn_varlen_backward(
        **dict(zip(("dout", "q", "k", "v"), arguments)),
        out=out,
        softmax_lse=lse,
        **dict(zip(("dq", "dk", "dv"), gradients)),
        **lengths,
        **MOBA_BACKWARD,
        causal=causal,
        deterministic=True,
    )


@pytest.mark.parametrize("client", ["fla", "sglang"])
def test_moba(client):
    """Each query sees its own chunk and, per head, one earlier chunk at most. Two varlen calls by keyword: all heads on
    the own chunk, then single heads with keys and values that are every second row of kv. Their LSEs are merged, and
    the merged LSE and out go to both backwards. fla's own chunk is causal and its dk, dv are dense; sglang's own chunk
    is not causal and it gives kv's strided halves as dk and dv."""
    causal = client == "fla"
    q, k, v, dout = inputs(S)
    cu = bounds(*[CHUNK] * (S // CHUNK))
    own = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": S, "max_seqlen_k": S}
    # chosen[t, h]: the earlier chunk that token t looks at with head h, -1 for none.
    chunk_of = torch.arange(S) // CHUNK
    chosen = (torch.rand(S, H) * (chunk_of[:, None] + 1)).long() - 1
    moba_q, moba_kv, lengths, place, pairs = moba_inputs(q, k, v, chosen)
    out, lse = moba_forward(q, k, v, own, moba_q, moba_kv, lengths, place, causal)

    gradients = [torch.full_like(x, 7.0) for x in (q, k, v)]
    moba_backward((dout, q, k, v), out, lse.view(S, H).t().contiguous(), gradients, own, causal)
    dq, dkv = torch.full_like(moba_q, 7.0), torch.full_like(moba_kv, 7.0)
    halves = [torch.full_like(moba_kv[:, 0], 7.0) for _ in range(2)] if client == "fla" else dkv.unbind(1)
    selected = [x.view(-1, D)[place].unsqueeze(1) for x in (dout, out)]
    arguments = (selected[0], moba_q, *moba_kv.unbind(1))
    moba_backward(arguments, selected[1], lse[place].view(1, -1), (dq, *halves), lengths, False)
    gradients[0].view(-1, D).index_add_(0, place, dq.squeeze(1))
    for (c, h), dk, dv in zip(pairs, *(x.squeeze(1).split(CHUNK) for x in halves)):
        gradients[1][c * CHUNK : (c + 1) * CHUNK, h] += dk
        gradients[2][c * CHUNK : (c + 1) * CHUNK, h] += dv

    same = chunk_of[:, None] == chunk_of
    visible = (same & band(S, S) if causal else same) | (chosen.t()[:, :, None] == chunk_of)
    wanted = differentiated([x[None] for x in (q, k, v)], dout[None], visible[None])
    for a, b in zip((out, *gradients), wanted):
        assert_near(a[None], b)
