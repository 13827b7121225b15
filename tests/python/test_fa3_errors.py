"""What flash_attn_interface refuses: the error names the argument, on each way that a call may take."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import flash_attn_interface as fa3
from flash_attn import _attention, _kvcache

pytestmark = pytest.mark.second_torch
H, HK, D = 4, 2, 16


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


CU = int32(0, 1, 2)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("used", ["q", "k", "qk"])
def test_cu_seqlens_are_checked_beside_used_lengths(used, grad):
    q, k, v = (torch.randn(8, heads, D, requires_grad=grad) for heads in (H, HK, HK))
    given = {f"seqused_{name}": int32(2, 3) for name in used}
    good = {"cu_seqlens_q": int32(0, 4, 8), "cu_seqlens_k": int32(0, 4, 8)}
    assert fa3.flash_attn_varlen_func(q, k, v, **good, max_seqlen_q=4, max_seqlen_k=4, **given).isfinite().all()
    wrong = {"must start at 0": (2, 4, 8), "must not decrease": (0, 8, 4), "must end within the 8 rows": (0, 4, 40)}
    for name in good:
        for message, cu_seqlens in wrong.items():
            with pytest.raises(RuntimeError, match=f"{name} {message}"):
                call = {**good, name: int32(*cu_seqlens)}
                fa3.flash_attn_varlen_func(q, k, v, **call, max_seqlen_q=40, max_seqlen_k=40, **given)


def packed(q, k, v, cu_seqlens_q=CU, cu_seqlens_k=CU, **options):
    return fa3.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, 2, 2, **options)


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("function", [fa3.flash_attn_func, packed, fa3.flash_attn_with_kvcache])
def test_errors_name_the_argument(function, chunk):
    dims = 3 if function is packed else 4
    names = ("q", "k_cache", "v_cache") if function is fa3.flash_attn_with_kvcache else ("q", "k", "v")
    good = dict(zip(names, torch.ones(3, *(2,) * (dims - 1), 16)))
    function(**good, attention_chunk=chunk)
    for name in names:
        with pytest.raises(TypeError, match=f"{name} is None"):
            function(**{**good, name: None}, attention_chunk=chunk)
        with pytest.raises(RuntimeError, match=f"\\b{name[0]}(_cache)? (must have|has)\\b"):
            function(**{**good, name: torch.ones(16)}, attention_chunk=chunk)
    if function is packed:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            with pytest.raises(TypeError, match=f"{name} is None"):
                packed(**good, **{name: None}, attention_chunk=chunk)
            for wrong in (int32(0, 2), CU[None], CU[0]):
                with pytest.raises(RuntimeError, match="cu_seqlens_[qk] must have"):
                    packed(**good, **{name: wrong}, attention_chunk=chunk)


@pytest.mark.parametrize("chunk", [0, 3])
def test_both_ways_to_a_cache_refuse_the_same(chunk):
    cache, new, table = torch.zeros(2, 8, HK, D), torch.zeros(2, 2, HK, D), torch.ones(9, 4)
    for name, wrong in (
        ("cache_seqlens", {"cache_seqlens": 9, "k": None, "v": None, "rotary_cos": None, "rotary_sin": None}),
        ("rotary_cos", {"rotary_cos": torch.ones(9, 9), "rotary_sin": torch.ones(9, 9)}),
        ("rotary_cos", {"rotary_cos": table.double(), "rotary_sin": table.double()}),
    ):
        call = {"k": new, "v": new, "cache_seqlens": 3, "rotary_cos": table, "rotary_sin": table}
        fa3.flash_attn_with_kvcache(torch.zeros(2, 2, H, D), cache, cache.clone(), **call, attention_chunk=chunk)
        with pytest.raises(RuntimeError, match=name):
            call.update(wrong)
            fa3.flash_attn_with_kvcache(torch.zeros(2, 2, H, D), cache, cache.clone(), **call, attention_chunk=chunk)


@pytest.mark.parametrize("function", [fa3.flash_attn_func, packed, fa3.flash_attn_with_kvcache])
def test_every_function_checks_hints(function):
    tensors = torch.randn(3, *(2,) * (2 if function is packed else 3), 16)
    plain = function(*tensors)
    for hint in ({"num_splits": 0}, {"num_splits": 256}, {"pack_gqa": False}, {"sm_margin": 4}):
        assert torch.equal(function(*tensors, **hint), plain)
    for name, wrong in (("num_splits", (257, True)), ("pack_gqa", (1,)), ("sm_margin", (-1, 1.5))):
        for value in (*wrong, "1"):
            with pytest.raises(RuntimeError, match=f"{name} is {value!r}"):
                function(*tensors, **{name: value})
    for value in (-2, True, 1.0):
        with pytest.raises(RuntimeError, match=f"attention_chunk is {value!r}"):
            function(*tensors, attention_chunk=value)


@pytest.mark.parametrize("function", [fa3.flash_attn_func, packed, fa3.flash_attn_with_kvcache])
def test_chunks_that_no_int32_holds_are_longer_than_any_row(function):
    tensors = torch.randn(3, *(2,) * (2 if function is packed else 3), 16)
    for chunk in (2**31 - 1, 2**31, 2**40):
        torch.testing.assert_close(function(*tensors, attention_chunk=chunk), function(*tensors))


def test_packed_projections_take_every_argument():
    qkv = torch.randn(2, 7, 3, H, D)
    plain, q, k, v = fa3.flash_attn_qkvpacked_func(qkv), *qkv.unbind(2)
    for option in ({"softmax_scale": 0.4}, {"window_size": (2, 1)}, {"softcap": 0.5}, {"attention_chunk": 3}):
        out = fa3.flash_attn_qkvpacked_func(qkv, **option)
        assert torch.equal(out, fa3.flash_attn_func(q, k, v, **option)) and not torch.equal(out, plain)
    for name in ("q_descale", "k_descale", "v_descale"):
        with pytest.raises(NotImplementedError, match=name):
            fa3.flash_attn_qkvpacked_func(qkv, **{name: torch.ones(2, H)})
    with pytest.raises(RuntimeError, match="sm_margin"):
        fa3.flash_attn_qkvpacked_func(qkv, sm_margin=-1)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=H), plain)
    for wrong, heads in ((qkv, H + 1), (qkv, 0), (qkv.flatten(2, 3), 0), (qkv.flatten(2, 3), -2)):
        with pytest.raises(RuntimeError, match=f"num_heads_q is {heads}"):
            fa3.flash_attn_qkvpacked_func(wrong, num_heads_q=heads)


@pytest.mark.parametrize("leaf, with_qv", [*((leaf, True) for leaf in range(4)), *((leaf, False) for leaf in range(3))])
def test_one_gradient_alone_beside_used_keys(leaf, with_qv):
    tensors = [torch.randn(8, *shape) for shape in ((H, D), (HK, D), (HK, D), (H, D))]

    def gradient(leaves):
        given = [x.clone().requires_grad_(n in leaves) for n, x in enumerate(tensors)]
        q, k, v, qv = given
        used = {"seqused_q": int32(4, 1), "seqused_k": int32(2, 3), "qv": qv if with_qv else None}
        out = fa3.flash_attn_varlen_func(q, k, v, int32(0, 4, 8), int32(0, 4, 8), 4, 4, **used)
        return torch.autograd.grad(out.square().sum(), given[leaf])[0]

    torch.testing.assert_close(gradient([leaf]), gradient(range(4)))


@pytest.mark.parametrize("name", ["qv", "k", "v"])
def test_dtypes_beside_qv_are_told_by_name(name):
    call = dict(zip(("q", "k", "v", "qv"), torch.ones(4, 2, 2, 2, 16)))
    fa3.flash_attn_func(**call)
    with pytest.raises(RuntimeError, match=rf"^{name} is torch.float64; with qv"):
        fa3.flash_attn_func(**{**call, name: call[name].double()})


def test_deterministic_is_passed_on(monkeypatch):
    given = []

    def noted(function, *tensors, **options):
        given.append(options["deterministic"])
        return function(*tensors, **options)

    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        monkeypatch.setattr(_attention, name, partial(noted, getattr(_attention, name)))
    x = torch.ones(2, 2, 2, 16)
    for deterministic in (True, False):
        fa3.flash_attn_func(x, x, x, deterministic=deterministic)
        fa3.flash_attn_qkvpacked_func(torch.stack((x, x, x), 2), deterministic=deterministic)
        packed(x[0], x[0], x[0], deterministic=deterministic)
    assert given == [True] * 3 + [False] * 3


def test_num_splits_is_passed_on(monkeypatch):
    """As far as the operators take it: FlashAttention-3 allows 256 parts."""
    given = []

    def noted(function, *tensors, **options):
        given.append(options["num_splits"])
        return function(*tensors, **options)

    for module, name in ((_attention, "flash_attn_varlen_func"), (_kvcache, "flash_attn_with_kvcache")):
        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))
    x = torch.ones(2, 2, 2, 16)
    for num_splits in (3, 256):
        packed(x[0], x[0], x[0], num_splits=num_splits)
        for chunk in (0, 2):
            fa3.flash_attn_with_kvcache(x, x, x, num_splits=num_splits, attention_chunk=chunk)
    assert given == [3] * 3 + [128] * 3


def test_combine_without_parts_and_without_gradient():
    out, lse = torch.randn(2, 1, 3, H, D, requires_grad=True), torch.randn(2, 1, 3, H, requires_grad=True)
    assert not any(x.requires_grad for x in fa3.flash_attn_combine(out, lse))
    for splits in (0, 257):
        with pytest.raises(RuntimeError, match="1 to 256 splits"):
            fa3.flash_attn_combine(out[:1].expand(splits, *out.shape[1:]), lse[:1].expand(splits, *lse.shape[1:]))
    with pytest.raises(RuntimeError, match="out is"):
        fa3.flash_attn_combine(out, lse, torch.empty(1, 3, H, D, dtype=torch.float64))


ROTARY = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(9, 4))
NO_NEW = dict.fromkeys(("k", "v"))
RAGGED_NEW = dict.fromkeys(("k", "v"), torch.zeros(4, HK, D))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"cache_batch_idx": None}, "k_cache has 3 sequences and q 2"),
        ({"page_table": int32(0, 1)[:, None]}, "page_table and cache_batch_idx"),
        ({"v": torch.zeros(2, 2, HK, D).double()}, "v is torch.float64"),
        ({"v": torch.zeros(2, 2, 1, D)}, "v is .*v_cache"),
        ({"rotary_seqlens": int32(0, -1), **ROTARY}, "rotary_cos has 9 positions"),
        ({"rotary_seqlens": int32(8, 0), **ROTARY}, "rotary_cos has 9 positions"),
        (dict.fromkeys(ROTARY, torch.ones(9, 4, 1)), "rotary_cos is .*positions,R/2"),
        ({**NO_NEW, **ROTARY}, "rotary_cos, rotary_sin, k and v come together"),
        ({**NO_NEW, "cache_seqlens": int32(-1, 3)}, "cache_seqlens is"),
        ({"cache_seqlens": torch.tensor([3, 3])}, "cache_seqlens is torch.int64"),
        ({"cache_batch_idx": int32(-1, 0)}, "new keys go to pages"),
        ({"page_table": int32(0, 1, 2)[:, None], "cache_batch_idx": None}, "page_table is .*B = 2"),
        ({**RAGGED_NEW, "cu_seqlens_k_new": int32(1, 2, 4)}, "cu_seqlens of k is"),
        ({**RAGGED_NEW, "cu_seqlens_k_new": int32(0, 5, 4)}, "cu_seqlens of k is"),
        ({**RAGGED_NEW, "cu_seqlens_k_new": int32(0, 2, 3)}, "cu_seqlens of k is"),
        ({**RAGGED_NEW, "cu_seqlens_k_new": int32(0, 2, 4)[None]}, "cu_seqlens of k is"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_packed_batches_over_a_cache_refuse(wrong, message):
    caches = torch.randn(3, 8, HK, D), torch.randn(3, 8, HK, D)
    before = [x.clone() for x in caches]
    call = {"k": torch.zeros(2, 2, HK, D), "v": torch.zeros(2, 2, HK, D), "cache_seqlens": 3, "attention_chunk": 3}
    call.update(cache_batch_idx=int32(2, 0))
    fa3.flash_attn_with_kvcache(torch.zeros(2, 2, H, D), *(x.clone() for x in caches), **call)
    with pytest.raises(RuntimeError, match=message):
        fa3.flash_attn_with_kvcache(torch.zeros(2, 2, H, D), *caches, **{**call, **wrong})
    assert all(map(torch.equal, caches, before))


def test_a_cache_gives_no_gradient_and_may_have_no_slots():
    q, cache = torch.randn(2, 2, H, D, requires_grad=True), torch.randn(2, 8, HK, D, requires_grad=True)
    for chunk in (0, 3):
        results = fa3.flash_attn_with_kvcache(q, cache, cache, attention_chunk=chunk, return_softmax_lse=True)
        assert not any(x.requires_grad for x in results)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, cache[:, :0], cache[:, :0], return_softmax_lse=True)
    assert not out.any() and (lse == math.inf).all()


@pytest.mark.parametrize("chunk", [0, 3])
def test_lse_of_rows_over_an_empty_part_of_a_cache(chunk):
    q, cache = torch.randn(2, 2, H, D), torch.randn(2, 8, HK, D)
    call = {"cache_seqlens": int32(0, 3), "attention_chunk": chunk, "return_softmax_lse": True}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, cache, cache, **call)
    assert (lse[0] == -math.inf).all() and not out[0].any() and lse[1].isfinite().all()


def test_metadata_checks_the_call():
    call = dict(batch_size=2, max_seqlen_q=5, max_seqlen_k=8, num_heads_q=H, num_heads_kv=HK, headdim=D)
    call["cache_seqlens"] = int32(8, 7)
    for wrong, error in (
        ({"num_heads_q": 0}, RuntimeError),
        ({"num_heads_kv": 0}, RuntimeError),
        ({"num_heads_kv": -2}, RuntimeError),
        ({"headdim_v": 577}, RuntimeError),
        ({"headdim_v": 0}, RuntimeError),
        ({"page_size": 0}, RuntimeError),
        ({"max_seqlen_k_new": -1}, RuntimeError),
        ({"attention_chunk": -1}, RuntimeError),
        ({"num_splits": 257}, RuntimeError),
        ({"window_size": (1,)}, ValueError),
        ({"cu_seqlens_q": int32(0, 1)}, RuntimeError),
        ({"cu_seqlens_k_new": int32(0, 1)}, RuntimeError),
        ({"cache_leftpad": int32(0)}, RuntimeError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            fa3.get_scheduler_metadata(**{**call, **wrong})
