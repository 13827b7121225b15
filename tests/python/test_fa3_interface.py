"""flash_attn_interface, FlashAttention-3's names, against definitions in double precision written out per row."""

import ast
import inspect
import math

import pytest
import torch

import flash_attn
import flash_attn_interface as fa3

pytestmark = pytest.mark.second_torch
H, HK, D, DV = 4, 2, 16, 24

SIGNATURES = {
    "flash_attn_func": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1,-1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1,-1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1,-1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
    "sm_margin=0, return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
    "softmax_scale=None, causal=False, window_size=(-1,-1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1,-1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
}


@pytest.fixture(autouse=True)
def seed(rng):
    pass


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_upstreams(name):
    wanted = ast.parse(f"def f({SIGNATURES[name]}): pass").body[0].args
    defaults = [eval(ast.unparse(d), {"torch": torch}) for d in wanted.defaults]
    parameters = list(inspect.signature(getattr(fa3, name)).parameters.values())
    assert [p.name for p in parameters] == [a.arg for a in wanted.args]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    given = [p.default for p in parameters if p.default is not p.empty]
    assert given == defaults and [type(d) for d in given] == [type(d) for d in defaults]


def attend(q, k, v, qv=None, scale=None, causal=False, window=(-1, -1), chunk=0, softcap=0.0):
    """(out (Sq,H,Dv), lse (H,Sq)) of one sequence, fp64, row by row."""
    q, k, v = q.double(), k.double(), v.double()
    (Sq, heads), Sk, group = q.shape[:2], k.shape[0], q.shape[1] // k.shape[1]
    scale = scale or (q.shape[-1] + (0 if qv is None else v.shape[-1])) ** -0.5
    rows, lses = [], []
    for i in range(Sq):
        p = i + Sk - Sq
        seen = [
            j
            for j in range(Sk)
            if (not causal or j <= p)
            and (window[0] < 0 or j >= p - window[0])
            and (window[1] < 0 or j <= p + window[1])
            and (chunk == 0 or j // chunk == p // chunk)
        ]
        for h in range(heads):
            keys, values = k[seen, h // group], v[seen, h // group]
            score = keys @ q[i, h]
            if qv is not None:
                score = score + values @ qv[i, h].double()
            score = score * scale
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            weights = score.softmax(0) if seen else score
            rows.append(weights @ values)
            lses.append(score.logsumexp(0) if seen else torch.tensor(-math.inf, dtype=torch.float64))
    return torch.stack(rows).view(Sq, heads, v.shape[-1]), torch.stack(lses).view(Sq, heads).t()


def inputs(Sq, Sk, B=2, dtype=torch.float32):
    shapes = (B, Sq, H, D), (B, Sk, HK, D), (B, Sk, HK, DV), (B, Sq, H, DV)
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "chunk": {"chunk": 3},
    "causal chunk softcap": {"causal": True, "chunk": 4, "softcap": 2.0},
    "window chunk": {"window": (1, 2), "chunk": 3},
    "scale": {"scale": 0.4, "causal": True},
}
UPSTREAMS_NAMES = {"window": "window_size", "chunk": "attention_chunk", "scale": "softmax_scale"}
EACH_OPTION = pytest.mark.parametrize("option", OPTIONS)


def named(option):
    return {UPSTREAMS_NAMES.get(name, name): value for name, value in OPTIONS[option].items()}


@EACH_OPTION
@pytest.mark.parametrize("with_qv", [False, True])
@pytest.mark.parametrize("lengths", [(5, 8), (8, 5), (1, 7), (6, 6)], ids=str)
def test_dense(option, with_qv, lengths):
    q, k, v, qv = inputs(*lengths)
    leaves = [q, k, v, qv] if with_qv else [q, k, v]
    extra = qv if with_qv else None
    out, lse = fa3.flash_attn_func(q, k, v, qv=extra, **named(option), return_attn_probs=True)
    wanted = [attend(q[b], k[b], v[b], None if extra is None else qv[b], **OPTIONS[option]) for b in range(2)]
    wanted_out = torch.stack([w[0] for w in wanted])
    close(out, wanted_out)
    close(lse, torch.stack([w[1] for w in wanted]))
    dout = torch.randn_like(out)
    for actual, expected in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(wanted_out, leaves, dout.double())
    ):
        close(actual, expected, 1e-4)
    assert torch.equal(fa3.flash_attn_func(q, k, v, qv=extra, **named(option)), out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_qv_of_absorbed_latents(dtype):
    q, k = (torch.randn(1, S, heads, 64).to(dtype) for S, heads in ((3, 4), (9, 1)))
    qv, v = (torch.randn(1, S, heads, 512).to(dtype) for S, heads in ((3, 4), (9, 1)))
    out = fa3.flash_attn_func(q, k, v, qv=qv, causal=True)
    close(out[0], attend(q[0], k[0], v[0], qv[0], causal=True)[0], 4e-3 if dtype == torch.float16 else 3e-2)


def test_lse_of_empty_rows_and_of_calls_without_keys():
    q, k, v, _ = inputs(4, 2)
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[:, :, :2] == -math.inf).all() and lse[:, :, 2:].isfinite().all() and (out[:, :2] == 0).all()
    _, lse = fa3.flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)
    assert (lse == math.inf).all()
    no_keys = (q[0], k[0, :0], v[0, :0], int32(0, 4), int32(0, 0), 4, 0)
    _, lse = fa3.flash_attn_varlen_func(*no_keys, return_attn_probs=True)
    assert (lse == math.inf).all()


def test_packed_projections():
    qkv = torch.randn(2, 5, 3, H, D, requires_grad=True)
    out, lse = fa3.flash_attn_qkvpacked_func(qkv, causal=True, attention_chunk=2, return_attn_probs=True)
    wanted = [attend(*x.unbind(1), causal=True, chunk=2) for x in qkv]
    close(out, torch.stack([w[0] for w in wanted]))
    close(lse, torch.stack([w[1] for w in wanted]))
    flat = torch.randn(2, 5, H + 2 * HK, D, requires_grad=True)
    out = fa3.flash_attn_qkvpacked_func(flat, num_heads_q=H)
    wanted = torch.stack([attend(*x.split((H, HK, HK), dim=1))[0] for x in flat])
    close(out, wanted)
    close(*(torch.autograd.grad(o.sum(), flat)[0] for o in (out, wanted)), 1e-4)
    for wrong in (None, H + 1, H + 2 * HK):
        with pytest.raises(RuntimeError, match="num_heads_q"):
            fa3.flash_attn_qkvpacked_func(flat, num_heads_q=wrong)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@EACH_OPTION
@pytest.mark.parametrize("used", ["all", "q", "k", "both"])
def test_varlen(option, used):
    cu_q, cu_k = [0, 3, 3, 8], [0, 6, 8, 12]
    q, k, v, qv = (x[0] for x in inputs(9, 13, B=1))  # one row behind the last sequence
    used_q = [2, 0, 5] if used in ("q", "both") else [3, 0, 5]
    used_k = [5, 0, 3] if used in ("k", "both") else [6, 2, 4]
    given = {"seqused_q": int32(*used_q)} if used in ("q", "both") else {}
    given.update({"seqused_k": int32(*used_k)} if used in ("k", "both") else {})
    call = (q, k, v, int32(*cu_q), int32(*cu_k), 5, 6)
    out, lse = fa3.flash_attn_varlen_func(*call, qv=qv, **given, **named(option), return_attn_probs=True)
    wanted, wanted_lse = torch.zeros(9, H, DV).double(), torch.full((H, 9), -math.inf).double()
    for a, c, n, m in zip(cu_q, cu_k, used_q, used_k):
        if n:
            part = attend(q[a : a + n], k[c : c + m], v[c : c + m], qv[a : a + n], **OPTIONS[option])
            wanted[a : a + n], wanted_lse[:, a : a + n] = part
    close(out, wanted)
    close(lse, wanted_lse)
    dout = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, (q, k, v, qv), dout), torch.autograd.grad(wanted, (q, k, v, qv), dout.double())
    ):
        close(one, other, 1e-4)
    with torch.no_grad():
        close(fa3.flash_attn_varlen_func(*call, qv=qv, **given, **named(option)), wanted)


def test_used_lengths_are_checked():
    q, k, v, _ = (x[0] for x in inputs(4, 4, B=1))
    for name in ("seqused_q", "seqused_k"):
        for wrong in (int32(5), int32(-1), int32(1, 2), torch.tensor([2])):
            with pytest.raises(RuntimeError, match=name):
                fa3.flash_attn_varlen_func(q, k, v, int32(0, 4), int32(0, 4), 4, 4, **{name: wrong})


def rotate(x, cos, sin, position):
    """x (heads,D) with pairs (2n, 2n + 1) rotated."""
    R, c, s = 2 * cos.shape[1], cos[position].double(), sin[position].double()
    x = x.double().clone()
    even, odd = x[:, 0:R:2].clone(), x[:, 1:R:2].clone()
    x[:, 0:R:2], x[:, 1:R:2] = even * c - odd * s, odd * c + even * s
    return x


@pytest.mark.parametrize("option", ["plain", "causal", "chunk", "window chunk", "causal chunk softcap", "scale"])
@pytest.mark.parametrize("storage", ["dense", "rows", "paged"])
@pytest.mark.parametrize("case", ["dense", "qv", "ragged", "ragged qv", "rotary_seqlens"])
def test_kvcache(option, storage, case):
    B, slots, page = 2, 12, 3
    starts, pads, ragged = [4, 6], [1, 0], case.startswith("ragged")
    counts, new = ([3, 1], [2, 4]) if ragged else ([3, 3], [2, 2])
    cos, sin = (f(torch.rand(16, 4) * 6) for f in (torch.cos, torch.sin))
    pages, table, arguments = (2, slots), [[0], [1]], {}
    if storage == "rows":
        pages, table, arguments = (3, slots), [[2], [0]], {"cache_batch_idx": int32(2, 0)}
    elif storage == "paged":
        pages, table = (9, page), [[8, 3, 0, 1], [2, 5, 7, 4]]
        arguments = {"page_table": int32(*sum(table, [])).view(2, 4)}
    k_cache, v_cache = torch.randn(*pages, HK, D), torch.randn(*pages, HK, DV)
    old_k, old_v = k_cache.clone(), v_cache.clone()
    q, qv = torch.randn(sum(counts), H, D), torch.randn(sum(counts), H, DV)
    k, v = torch.randn(sum(new), HK, D), torch.randn(sum(new), HK, DV)
    first = [2, 3] if case == "rotary_seqlens" else starts

    expected, lses, o, n = [], [], 0, 0
    per_row = option != "plain"
    for b in range(B):
        own_k, own_v = (torch.cat([c[p] for p in table[b]])[: starts[b]].double() for c in (old_k, old_v))
        turned = [rotate(k[n + i], cos, sin, first[b] + i)[None] for i in range(new[b])]
        own_k, own_v = torch.cat([own_k, *turned]), torch.cat([own_v, v[n : n + new[b]].double()])
        queries = [rotate(q[o + i], cos, sin, first[b] + i * per_row) for i in range(counts[b])]
        part_qv = qv[o : o + counts[b]] if "qv" in case else None
        one = attend(torch.stack(queries), own_k[pads[b] :], own_v[pads[b] :], part_qv, **OPTIONS[option])
        expected.append(one[0])
        lses.append(one[1])
        o, n = o + counts[b], n + new[b]

    if ragged:
        arguments.update(cu_seqlens_q=int32(0, 3, 4), max_seqlen_q=3, cu_seqlens_k_new=int32(0, 2, 6))
    else:
        q, qv, k, v = (x.view(B, -1, *x.shape[1:]) for x in (q, qv, k, v))
    if "qv" in case:
        arguments["qv"] = qv
    if case == "rotary_seqlens":
        arguments["rotary_seqlens"] = int32(*first)
    arguments.update(cache_seqlens=int32(*starts), cache_leftpad=int32(*pads), rotary_cos=cos, rotary_sin=sin)
    result = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, **arguments, **named(option), return_softmax_lse=True
    )
    out, lse, out_accum, lse_accum = result
    assert out_accum.numel() == lse_accum.numel() == 0
    close(out, torch.cat(expected) if ragged else torch.stack(expected))
    close(lse, torch.cat(lses, dim=1) if ragged else torch.stack(lses))
    appended = {(table[b][s // pages[1]], s % pages[1]) for b in range(B) for s in range(starts[b], starts[b] + new[b])}
    changed = (v_cache != old_v).flatten(2).any(-1).nonzero().tolist()
    assert {tuple(x) for x in changed} == appended
    assert {tuple(x) for x in (k_cache != old_k).flatten(2).any(-1).nonzero().tolist()} == appended


def test_packed_new_keys_of_equal_lengths_are_those_that_come_in_rows():
    q, k, v = (torch.randn(2, 3, heads, D) for heads in (H, HK, HK))
    packed = {"k": k.flatten(0, 1), "v": v.flatten(0, 1), "cu_seqlens_k_new": int32(0, 3, 6)}
    results = []
    for new in ({"k": k, "v": v}, packed):
        caches = torch.ones(2, 12, HK, D), torch.ones(2, 12, HK, D)
        results.append((fa3.flash_attn_with_kvcache(q, *caches, **new, cache_seqlens=int32(4, 6)), *caches))
    for one, other in zip(*results):
        close(one, other, 1e-5)


@pytest.mark.parametrize("window", [(-1, -1), (12, 12), (3, -1)], ids=str)
def test_both_ways_to_a_cache_rotate_alike(window):
    """rotary_seqlens equal to cache_seqlens takes the way over packed batches, and must change nothing."""
    cos, sin = torch.rand(16, 4).cos(), torch.rand(16, 4).sin()
    q, k, v = (torch.randn(2, 3, heads, D) for heads in (H, HK, HK))
    results = []
    for more in ({}, {"rotary_seqlens": int32(4, 6)}):
        caches = torch.ones(2, 12, HK, D), torch.ones(2, 12, HK, D)
        more.update(rotary_cos=cos, rotary_sin=sin, cache_seqlens=int32(4, 6), window_size=window)
        results.append((fa3.flash_attn_with_kvcache(q, *caches, k, v, rotary_interleaved=False, **more), *caches))
    for one, other in zip(*results):
        close(one, other, 1e-5)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"window_size": (1,)}, "window_size"),
        ({"qv": torch.ones(2, 2, H, D)}, "qv has shape"),
        ({"cache_batch_idx": int32(0, 2)}, "cache_batch_idx"),
        ({"cache_leftpad": int32(0, 9)}, "leftpad"),
        ({"cache_seqlens": int32(7, 2)}, "cache_seqlens"),
        ({"cache_seqlens": int32(3, -1)}, "cache_seqlens"),
        ({"cache_seqlens": None}, "cache_seqlens"),
        ({"cu_seqlens_k_new": int32(0, 1, 9)}, "cu_seqlens"),
        ({"k": None, "v": None}, "cu_seqlens_k_new"),
        ({"v": None}, "come together"),
        ({"rotary_cos": torch.ones(9, 4)}, "rotary_sin"),
        ({"max_seqlen_q": 1}, "max_seqlen_q"),
        ({"scheduler_metadata": torch.zeros(1)}, "scheduler_metadata"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_caches_are_untouched_after_an_error(wrong, message):
    k_cache, v_cache = torch.randn(2, 8, HK, D), torch.randn(2, 8, HK, DV)
    before = k_cache.clone(), v_cache.clone()
    call = {"k": torch.randn(4, HK, D), "v": torch.randn(4, HK, DV), "cu_seqlens_k_new": int32(0, 2, 4)}
    call.update(cache_seqlens=int32(3, 4), attention_chunk=3)
    fa3.flash_attn_with_kvcache(torch.randn(2, 2, H, D), k_cache.clone(), v_cache.clone(), **call)
    with pytest.raises((RuntimeError, ValueError), match=message):
        fa3.flash_attn_with_kvcache(torch.randn(2, 2, H, D), k_cache, v_cache, **{**call, **wrong})
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize("out_dtype", [None, torch.float32, torch.float16, torch.bfloat16])
def test_combine_joins_parts_of_the_keys(out_dtype):
    q, k, v, _ = inputs(5, 12)
    with torch.no_grad():
        whole, whole_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
        parts = [fa3.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True) for a, b in ((0, 3), (3, 12))]
    outs = torch.stack([*(p[0] for p in parts), torch.full_like(whole, math.nan)])
    lses = torch.stack([*(p[1] for p in parts), torch.full_like(whole_lse, -math.inf)]).transpose(2, 3)
    lses[:, 0, 0, 0] = -math.inf
    lses[2, 1] = math.inf
    whole[0, 0, 0], whole_lse[0, 0, 0] = 0, -math.inf
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.float32) and lse.dtype == torch.float32 and lse.stride(1) == 1
    close(out, whole, {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(out_dtype, 1e-5))
    close(lse, whole_lse.transpose(1, 2), 1e-5)
    for given in ({}, {"out_dtype": out.dtype}):
        own = torch.empty_like(out)
        assert fa3.flash_attn_combine(outs, lses, out=own, **given)[0] is own and torch.equal(own, out)


def test_combine_names_what_is_wrong():
    out, lse = torch.randn(2, 1, 3, H, D), torch.randn(2, 1, 3, H)
    for call, name in (
        ((out[0], lse), "out_partial"),
        ((out, lse[:1]), "lse_partial"),
        ((out.half(), lse), "out_partial"),
        ((out, lse.double()), "lse_partial"),
        ((out, lse, None, torch.float64), "out_dtype"),
        ((out, lse, out), "out is"),
        ((out, lse, out[0].clone(), torch.float16), "out_dtype"),
    ):
        with pytest.raises(RuntimeError, match=name):
            fa3.flash_attn_combine(*call)


def test_hints_are_checked_and_change_nothing():
    q, k, v, _ = inputs(5, 8)
    plain = fa3.flash_attn_func(q, k, v)
    for hints in ({"num_splits": 0}, {"num_splits": 256}, {"pack_gqa": True}, {"sm_margin": 4}):
        assert torch.equal(fa3.flash_attn_func(q, k, v, **hints), plain)
    wrong = [("num_splits", 257), ("num_splits", -1), ("pack_gqa", 1), ("sm_margin", -1), ("attention_chunk", -2)]
    for name, value in wrong:
        with pytest.raises(RuntimeError, match=name):
            fa3.flash_attn_func(q, k, v, **{name: value})
    for name in ("q_descale", "k_descale", "v_descale"):
        for function, tensors in ((fa3.flash_attn_func, (q, k, v)), (fa3.flash_attn_with_kvcache, (q, k, v))):
            with pytest.raises(NotImplementedError, match=name):
                function(*tensors, **{name: torch.ones(2, HK)})
    with pytest.raises(RuntimeError, match="qv has shape"):
        fa3.flash_attn_func(q, k, v, qv=q)
    with pytest.raises(RuntimeError, match="D \\+ Dv"):
        wide = torch.randn(2, 8, HK, 576)
        fa3.flash_attn_func(q, k, wide, qv=torch.randn(2, 5, H, 576))


def test_metadata_fits_the_call():
    q, k, v, _ = inputs(5, 8)
    metadata = fa3.get_scheduler_metadata(2, 5, 8, H, HK, D, int32(8, 7), headdim_v=DV, num_splits=3)
    with torch.no_grad():
        plain = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(8, 7))
        planned = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(8, 7), scheduler_metadata=metadata)
    assert metadata.dtype == torch.int32 and torch.equal(plain, planned)
    for wrong, name in (((3, 5, 8, H, HK, D), "cache_seqlens"), ((2, 5, 8, 3, 2, D), "num_heads_q")):
        with pytest.raises(RuntimeError, match=name):
            fa3.get_scheduler_metadata(*wrong, int32(8, 7))


def test_it_is_not_the_module_of_flash_attention_2():
    assert fa3.flash_attn_func is not flash_attn.flash_attn_func and fa3.__version__ == "3.0.0"
