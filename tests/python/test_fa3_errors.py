"""What flash_attn_interface refuses: the error names the argument, on each way that a call may take."""

from __future__ import annotations

import pytest
import torch

import flash_attn_interface as fa3

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
