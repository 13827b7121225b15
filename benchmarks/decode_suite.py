"""Decoding: one query per sequence over a long cache, which is a matter of reading memory."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from problems import DTYPES, SEED, plain_sum
from reference import deviation, exact_dtype, exact_head
from rows import Calls, Row

import flash_attn

H, HK, D = 32, 8, 128
PAGES = (16, 256)
SHARE, OVER_TORCH = 0.7, 2.5
GPU_CACHES = ((64, 2048), (8, 16384), (1, 16384), (1, 131072))  # (B, S)


@lru_cache(maxsize=1)  # the rows of a dtype follow each other, and one cache is 537 MB
def cache(device, dtype, B, S):
    """q (B, 1, H, D), k and v (B, S, Hk, D)."""
    generator = torch.Generator(device).manual_seed(SEED)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, device=device)

    q = drawn(B, 1, H, D).to(DTYPES[dtype])
    k, v = (torch.empty(B, S, HK, D, dtype=DTYPES[dtype], device=device) for _ in range(2))
    for sequence in (*k, *v):
        sequence.copy_(drawn(S, HK, D))
    return q, k, v


def paged(k, v, page):
    """The same memory as pages in a random order: caches (pages, page, Hk, D), and the block table."""
    B, S = k.shape[:2]
    table = torch.randperm(B * S // page, generator=torch.Generator().manual_seed(SEED)).view(B, -1).to(torch.int32)
    return [x.view(-1, page, HK, D) for x in (k, v)], table.to(k.device)


def decode_calls(device, dtype, B, S, page, peer):
    """flash_attn_with_kvcache over a full cache, next to torch's SDPA or to a plain sum over K and V."""
    q, k, v = cache(device, dtype, B, S)
    caches, arguments = [k, v], {"cache_seqlens": torch.full((B,), S, dtype=torch.int32, device=device)}
    if page:
        caches, arguments["block_table"] = paged(k, v, page)

    def call():
        return flash_attn.flash_attn_with_kvcache(q, *caches, **arguments)

    def check():
        # The last head of the last sequence: its keys are in the last pages of the table.
        keys, values = ([x[-1, :, -1]] if not page else x[arguments["block_table"][-1].long(), :, -1] for x in caches)
        exact = exact_dtype(dtype)
        keys, values = (torch.cat(tuple(x)).to(exact) for x in (keys, values))
        return deviation([call()[-1, :, -1]], exact_head(q[-1, :, -1].to(exact), keys, values))

    explanation = flash_attn.explain(flash_attn.flash_attn_with_kvcache, q, *caches, **arguments)
    other = folded(q, k, v) if peer == "torch" else plain_sum(k, v)
    return Calls(call, other, check=check, kernel=explanation.kernel, instruction_set=explanation.instruction_set)


def folded(q, k, v):
    """torch's SDPA with the H / Hk heads of a group as queries of one head, in its own layout, contiguous."""
    q = q.view(len(q), HK, H // HK, D)
    k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    return lambda: F.scaled_dot_product_attention(q, k, v)


def decode_row(device, dtype, B, S, page, peer, quantity, required):
    storage = f"pages-{page}" if page else "contiguous"
    work = B * S * HK * D * 2 * torch.finfo(DTYPES[dtype]).bits // 8
    return Row(
        "decode",
        f"decode {dtype} B{B} S{S} {storage} {peer}",
        dtype,
        partial(decode_calls, device, dtype, B, S, page, peer),
        peer="torch, group folded" if peer == "torch" else "plain sum over K and V",
        quantity=quantity,
        required=required,
        work=work,
        unit="byte",
        setting={"B": B, "S": S, "H": H, "Hk": HK, "D": D, "page": page},
        device=device,
    )


def rows_of_cache(device, dtype, B, S, required):
    """Contiguous and in pages, against a plain sum and against torch; required: (share, ratio), or two of None."""
    rows = []
    for page in (0, *PAGES):
        rows.append(decode_row(device, dtype, B, S, page, "sum", "share", required[0]))
        rows.append(decode_row(device, dtype, B, S, page, "torch", "ratio", required[1]))
    return rows


def decode_rows(options):
    """Long caches, contiguous and paged, and short ones for the record; on a GPU of several sizes."""
    rows, device = [], options.device
    if device == "cuda":
        for dtype, (B, S) in itertools.product(options.dtypes, GPU_CACHES):
            rows += rows_of_cache(device, dtype, B, S, (None, None))
        return rows
    for dtype in [dtype for dtype in options.dtypes if dtype != "fp32"]:
        rows += rows_of_cache(device, dtype, *options.cache, (SHARE, OVER_TORCH))
        rows += [decode_row(device, dtype, 1, S, 0, "torch", "ratio", None) for S in options.short_caches]
    return rows
