"""Malformed calls of flash_attn_with_kvcache: the argument is named, and the caches hold what they held."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_kvcache import PLAIN, make_call

from flash_attn import explain, flash_attn_with_kvcache

pytestmark = pytest.mark.second_torch
ROWS = {**PLAIN, "Sq": 3, "new": 3, "rotary": "interleaved"}
PAGED = {**ROWS, "storage": "page 16"}
INDEXED = {**ROWS, "storage": "cache_batch_idx"}


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def page(call, at, value):
    call.block_table[at] = value
    return call.block_table


def tables(x):
    return {"rotary_cos": x, "rotary_sin": x}


# What is changed, and what the message must hold.
BAD = {
    "lengths past the cache": (ROWS, lambda c: {"cache_seqlens": ints(1, 288, 2)}, r"cache_seqlens.*291 slots.*290"),
    "lengths past the pages": (PAGED, lambda c: {"cache_seqlens": ints(1, 302, 2)}, r"cache_seqlens.*block_table"),
    "negative length": (ROWS, lambda c: {"cache_seqlens": ints(1, -1, 2)}, r"cache_seqlens.*negative.*-1"),
    "int length past the cache": (ROWS, lambda c: {"cache_seqlens": 291}, r"cache_seqlens.*294 slots"),
    "lengths int64": (ROWS, lambda c: {"cache_seqlens": ints(1, 1, 1, dtype=torch.int64)}, r"cache_seqlens.*int32"),
    "lengths of another batch": (ROWS, lambda c: {"cache_seqlens": ints(1, 1)}, r"cache_seqlens.*\(B,\).*\(2\)"),
    "no lengths": (ROWS, lambda c: {"cache_seqlens": None}, r"cache_seqlens is missing"),
    "page past the end": (PAGED, lambda c: {"block_table": page(c, (2, 1), 59)}, r"block_table.*0 to 58.*= 59"),
    "negative page": (PAGED, lambda c: {"block_table": page(c, (0, 0), -1)}, r"block_table.*= -1"),
    "table int64": (PAGED, lambda c: {"block_table": c.block_table.long()}, r"block_table.*int32.*int64"),
    "table of another batch": (PAGED, lambda c: {"block_table": c.block_table[:2]}, r"block_table.*\(2, 19\)"),
    "table and index": (PAGED, lambda c: {"cache_batch_idx": ints(0, 1, 2)}, r"block_table and cache_batch_idx"),
    "index past the end": (INDEXED, lambda c: {"cache_batch_idx": ints(0, 5, 1)}, r"cache_batch_idx.*0 to 4.*= 5"),
    "negative index": (INDEXED, lambda c: {"cache_batch_idx": ints(0, 1, -1)}, r"cache_batch_idx.*= -1"),
    "leftpad past the end": (ROWS, lambda c: {"cache_leftpad": ints(0, 291, 0)}, r"cache_leftpad.*291"),
    "negative leftpad": (ROWS, lambda c: {"cache_leftpad": ints(0, 0, -3)}, r"cache_leftpad.*-3"),
    "k alone": (ROWS, lambda c: {"v": None}, r"k and v come together"),
    "k of another head dim": (ROWS, lambda c: {"k": c.k[..., :8]}, r"k must have shape.*8\)"),
    "v of another length": (ROWS, lambda c: {"v": c.v[:, :2]}, r"v must have shape.*\(3, 2,"),
    "k of another dtype": (ROWS, lambda c: {"k": c.k.half()}, r"k must have dtype float32.*float16"),
    "v_cache of another dtype": (ROWS, lambda c: {"v_cache": c.v_cache.half()}, r"v_cache must have dtype"),
    "caches of another batch": (ROWS, lambda c: {"k_cache": c.k_cache[:2]}, r"k_cache must have shape"),
    "cos alone": (ROWS, lambda c: {"rotary_sin": None}, r"rotary_cos and rotary_sin come together"),
    "cos without k": (ROWS, lambda c: {"k": None, "v": None}, r"rotary_cos was given without k"),
    "cos too short": (ROWS, lambda c: tables(c.rotary_cos[:200]), r"290.*200"),
    "cos too wide": (ROWS, lambda c: tables(torch.ones(300, 33)), r"rotary_dim = 66"),
    "cos of another dtype": (ROWS, lambda c: {"rotary_cos": c.rotary_cos.double()}, r"rotary_cos.*float32.*float64"),
    "sin of another shape": (ROWS, lambda c: {"rotary_sin": c.rotary_sin[:, :3].clone()}, r"rotary_sin must have"),
    "too many splits": (ROWS, lambda c: {"num_splits": 129}, r"num_splits.*0 to 128.*129"),
    "negative splits": (ROWS, lambda c: {"num_splits": -1}, r"num_splits.*-1"),
    "q longer than the cache": (ROWS, lambda c: {"q": torch.zeros(3, 291, 6, 64)}, r"Sq = 291.*290"),
    "alibi": (ROWS, lambda c: {"alibi_slopes": torch.ones(5)}, r"alibi_slopes.*\(5\)"),
    "softcap": (ROWS, lambda c: {"softcap": float("nan")}, r"softcap.*nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_leave_the_caches_alone(name):
    row, change, says = BAD[name]
    call = make_call(row)
    arguments = {**call.arguments(), **change(call)}
    before = [x.clone() for x in (call.k_cache, call.v_cache)]
    with pytest.raises(RuntimeError, match=f"(?s){says}"):
        flash_attn_with_kvcache(**arguments)
    for x, y in zip(before, (call.k_cache, call.v_cache)):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))


@pytest.mark.parametrize("name", BAD)
def test_explain_raises_the_same(name):
    row, change, _ = BAD[name]
    arguments = {**make_call(row).arguments(), **change(make_call(row))}
    with pytest.raises(RuntimeError) as from_call:
        flash_attn_with_kvcache(**arguments)
    with pytest.raises(RuntimeError) as from_explain:
        explain(flash_attn_with_kvcache, **arguments)
    assert str(from_explain.value) == str(from_call.value)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_caches_are_never_copied(name):
    """A cache that could not be written in place is refused, as upstream does."""
    call = make_call(PLAIN)
    cache = getattr(call, name)
    strided = torch.stack((cache, cache), -1).flatten(-2)[..., ::2]
    for function in (flash_attn_with_kvcache, partial(explain, flash_attn_with_kvcache)):
        with pytest.raises(AssertionError, match=name):
            function(**{**call.arguments(), name: strided})


@pytest.mark.parametrize("extra", (0, 1))
def test_capacity_of_the_block_table(extra):
    """Full to the last slot is fine, one more is not: upstream's test."""
    pages = torch.zeros(1, 256, 2, 32)
    q, k = torch.randn(1, 1, 2, 32), torch.randn(1, 1, 2, 32)
    arguments = dict(k=k, v=k, cache_seqlens=ints(255 + extra), block_table=torch.zeros(1, 1).int())
    if extra:
        with pytest.raises(RuntimeError, match="block_table"):
            flash_attn_with_kvcache(q, pages, pages.clone(), **arguments)
        assert (pages == 0).all()
    else:
        flash_attn_with_kvcache(q, pages, pages.clone(), **arguments)
        assert torch.equal(pages[0, 255], k[0, 0])


def test_pages_before_the_first_key_may_hold_anything():
    """But for the one that a new key goes to, where fewer slots are used than are left out."""
    g = torch.Generator().manual_seed(0)
    q, new = (torch.randn(1, 1, 2, 16, generator=g) for _ in range(2))
    k_cache, v_cache = (torch.randn(8, 4, 2, 16, generator=g) for _ in range(2))
    pages, leftpad = torch.arange(8, dtype=torch.int32)[None], ints(9)
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20, cache_leftpad=leftpad, block_table=pages)
    pages[0, :2] = -1
    call = partial(flash_attn_with_kvcache, q, k_cache, v_cache, cache_leftpad=leftpad, block_table=pages)
    assert torch.equal(call(cache_seqlens=20), expected)
    before = k_cache.clone()
    with pytest.raises(RuntimeError, match=r"block_table\[0, 1\] = -1"):
        call(k=new, v=new, cache_seqlens=5)
    assert torch.equal(k_cache, before)
    pages[0, 2] = 99
    with pytest.raises(RuntimeError, match=r"block_table\[0, 2\] = 99"):
        call(cache_seqlens=20)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "cache_seqlens"])
def test_one_argument_without_memory(name):
    """It would make the call one of shapes alone, whose results are never written."""
    call = make_call(ROWS)
    arguments = call.arguments()
    before = [x.clone() for x in (call.k_cache, call.v_cache)]
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(RuntimeError, match=f"one device, got .*{name} on meta"):
        flash_attn_with_kvcache(**arguments)
    assert torch.equal(call.k_cache, before[0]) and torch.equal(call.v_cache, before[1])
