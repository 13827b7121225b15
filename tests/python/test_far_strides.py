"""Elements more than 2^32 elements apart, and tensors of more than 2^31: offsets that 32 bits do not hold."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from far_memory import reserved, spread

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_interface as interface

pytestmark = [
    pytest.mark.second_torch,
    pytest.mark.skipif(sys.platform != "linux", reason="reserves memory that is never touched by Linux's mmap"),
]

B, S, H, Hk, D = 2, 3, 2, 2, 8


@pytest.fixture(autouse=True)
def little_memory():
    """Less than 200 MB become resident, of hundreds of gigabytes that are reserved."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    before = resident()
    yield
    assert resident() - before < 200 * 2**20


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "rows", "heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense(rng, dtype, dim):
    """q, k, v, dout and the buffers of dq, dk, dv."""
    q, dout, k, v = (randn(B, S, heads, D, dtype=dtype) for heads in (H, H, Hk, Hk))
    far_q, far_k, far_v, far_dout = (spread(x, dim) for x in (q, k, v, dout))
    leaves, far_leaves = ([x.requires_grad_() for x in group] for group in ((q, k, v), (far_q, far_k, far_v)))
    out, far_out = flash_attn_func(*leaves, causal=True), flash_attn_func(*far_leaves, causal=True)
    assert torch.equal(far_out, out)
    expected = torch.autograd.grad(out, leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(far_out, far_leaves, far_dout), expected))
    score = (0.0, D**-0.5, True, -1, -1, 0.0, None)
    q, k, v = (x.detach() for x in far_leaves)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, *score, False)
    buffers = [spread(torch.full_like(x, 7.0), dim) for x in leaves]
    interface._flash_attn_backward(far_dout, q, k, v, spread(out, dim), lse, *buffers, *score, False)
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected))


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "heads"])
def test_varlen(rng, dim):
    q, k, v, dout = (randn(5, 2, D) for _ in range(4))
    lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
    results = []
    for place in (torch.clone, lambda x: spread(x, dim)):
        leaves = [place(x).requires_grad_() for x in (q, k, v)]
        out = flash_attn_varlen_func(*leaves, lengths, lengths, 3, 3, causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, place(dout))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["cache rows or pages", "slots", "heads"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_cache(rng, paged, dim):
    """Appending and attending, rotation included, by rows of the cache or by pages."""
    k_cache, v_cache = (randn(4, 4, Hk, D) for _ in range(2))
    q, k, v = (randn(2, 2, heads, D) for heads in (H, Hk, Hk))
    angles = randn(8, D // 2)
    where = dict(cache_seqlens=torch.tensor([1, 2], dtype=torch.int32), causal=True)
    if paged:
        where["block_table"] = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    else:
        where["cache_batch_idx"] = torch.tensor([3, 1], dtype=torch.int32)
    results = []
    for place in (torch.clone, lambda x: spread(x, dim)):
        caches = [place(x) for x in (k_cache, v_cache)]
        out = flash_attn_with_kvcache(q, *caches, k, v, angles.cos(), angles.sin(), **where)
        results.append([out, *caches])
    assert all(torch.equal(a, b) for a, b in zip(*results)) and not torch.equal(results[0][1], k_cache)


def test_contiguous_cache_of_more_elements_than_32_bits_count(rng):
    """One row of 2^28 slots, of which only the last are in use; then the same as pages."""
    slots, used = 2**28 + 40, 37
    assert slots * D > 2**31
    k_cache, v_cache = (reserved((1, slots, 1, D)) for _ in range(2))
    q, keys, values = randn(1, 2, 1, D), randn(1, used, 1, D), randn(1, used, 1, D)
    k_cache[:, -used:], v_cache[:, -used:] = keys, values
    expected = flash_attn_func(q, keys, values, causal=True)
    begin, end = (torch.tensor([n], dtype=torch.int32) for n in (slots - used, slots))
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=end, cache_leftpad=begin, causal=True)
    assert torch.allclose(out, expected, atol=1e-6)
    pages = [x.view(-1, 8, 1, D) for x in (k_cache, v_cache)]
    table = torch.arange(pages[0].shape[0] - 5, pages[0].shape[0], dtype=torch.int32)[None]
    leftpad, length = (torch.tensor([n], dtype=torch.int32) for n in (40 - used, 40))
    out = flash_attn_with_kvcache(
        q, *pages, cache_seqlens=length, cache_leftpad=leftpad, block_table=table, causal=True
    )
    assert torch.allclose(out, expected, atol=1e-6)


def test_packed_keys_of_more_elements_than_32_bits_count(rng):
    """One sequence of 2^28 keys; bounds leave the last ones to the queries."""
    rows, used = 2**28 + 40, 37
    k, v = (reserved((rows, 1, D)) for _ in range(2))
    q, keys, values = randn(2, 1, D), randn(used, 1, D), randn(used, 1, D)
    k[-used:], v[-used:] = keys, values
    lengths = [torch.tensor([0, n], dtype=torch.int32) for n in (2, rows)]
    leftpad = torch.tensor([rows - used], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, *lengths, 2, rows, causal=True, leftpad_k=leftpad)
    expected = flash_attn_func(q[None], keys[None], values[None], causal=True)[0]
    assert torch.allclose(out, expected, atol=1e-6)
