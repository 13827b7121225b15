"""Few rows per key head, as in decoding, where tiles take rows of K and V from where they are."""

from __future__ import annotations

from dataclasses import replace

import harness
import pytest
import same_bits
import torch
from cases import Case
from instruction_sets import with_tiles

import flash_attn
from flash_attn import flash_attn_with_kvcache

ONE = Case(dtype="bf16", lengths=((1, 300),), H=8, Hk=2)

# One half of a strip and two, and their ends; tiles of keys and of features, whole or not.
FEW = [
    replace(ONE, lengths=((Sq, Sk),), H=H, D=D, Dv=Dv)
    for Sq, H in ((5, 2), (1, 40), (17, 2), (2, 32), (16, 4))
    for Sk in (1, 15, 33, 1100)
    for D, Dv in ((64, None), (96, 32), (40, 72))
]
FEW += [replace(ONE, lengths=((5, 700),), D=D, Dv=Dv) for D, Dv in ((1, 1), (16, 31), (128, 8), (257, 40), (576, 512))]
FEW += [
    replace(ONE, lengths=((5, 300),), D=D, strides=strides) for D in (64, 80) for strides in ("heads first", "sliced")
]
FEW += [
    replace(ONE, lengths=((4, 1100), (7, 41), (3, 0), (2, 129)), varlen=True, **settings)
    for settings in (
        {"causal": True},
        {"window": (100, 7)},
        {"softcap": 15.0},
        {"alibi": "BH"},
        {"dropout_p": 0.17},
        {"bias": "H", "mask": "3-D", "sink": True, "bounds": "heads", "lse_gradient": True},
    )
]


@with_tiles
@pytest.mark.parametrize("case", [c.param() for c in FEW])
def test_few_rows(case, isa):
    harness.check(case)


@with_tiles
@pytest.mark.parametrize("D", [64, 80])
def test_few_rows_same_bits_for_every_thread_count(D, isa):
    same_bits.check_every_thread_count(replace(ONE, lengths=((6, 2100), (6, 2100)), D=D, causal=True))


@with_tiles
@pytest.mark.parametrize("queries, D", [(2, 64), (3, 80), (8, 128)])
@pytest.mark.parametrize("page", [1, 5, 16, 24, 256])
def test_pages_give_the_bits_of_one_piece(page, queries, D, isa):
    """Tiles of rows at equal distances, and others, which are copied; nothing past a sequence's keys is read."""
    B, Hk, lengths = 2, 2, [331, 77]
    g = torch.Generator().manual_seed(page + queries)
    pages = -(-max(lengths) // page)
    table = torch.randperm(B * pages, generator=g).view(B, pages).to(torch.int32)
    pool = torch.full((2, B * pages, page, Hk, D), float("nan"), dtype=torch.bfloat16)
    whole = torch.randn(2, B, pages * page, Hk, D, generator=g).bfloat16()
    for b, length in enumerate(lengths):
        for n in range(length):
            pool[:, table[b, n // page], n % page] = whole[:, b, n]
    q = torch.randn(B, queries, 4 * Hk, D, generator=g).bfloat16()
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    in_pages = flash_attn_with_kvcache(q, *pool, cache_seqlens=seqlens, block_table=table, causal=True)
    in_one = flash_attn_with_kvcache(q, *whole, cache_seqlens=seqlens, causal=True)
    assert torch.isfinite(in_one).all() and torch.equal(in_pages, in_one)
    for b, length in enumerate(lengths):
        alone = flash_attn.flash_attn_func(q[b : b + 1], *whole[:, b : b + 1, :length], causal=True)
        assert torch.equal(alone, in_one[b : b + 1])
