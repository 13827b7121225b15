"""Grids of the Triton backend's suite, tests/test_flash_attn_triton_amd.py: small, since an interpreter runs them."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import harness
import kvcache_model as model
import pytest
import torch
from cases import Case

DTYPES = ("fp32", "fp16", "bf16")
BACKEND = "Triton (interpreted)"
LENGTHS = {
    "wide": ((70, 150),),
    "tall": ((150, 70),),
    "one": ((1, 147),),
    "packed": ((70, 90), (0, 5), (7, 0), (33, 65)),
}
EXTRAS = {
    "none": {},
    "softcap": {"softcap": 12.0},
    "alibi": {"alibi": "BH"},
    "dropout": {"dropout_p": 0.3},
    "lse": {"lse_gradient": True},
}
FACTORS = {
    "dtype": DTYPES,
    "lengths": tuple(LENGTHS),
    "mask": ("full", "causal", "left", "both", "narrow"),
    "D": (8, 59, 64, 80),
    "heads": ("one", "gqa", "mqa"),
    "extra": tuple(EXTRAS),
    "strides": ("contiguous", "heads first", "sliced"),
}


HEAD_DIMS = (
    Case("bf16", ((20, 70),), H=2, Hk=1, D=40, Dv=24, causal=True),
    Case("fp16", ((1, 1),), H=2, Hk=1, D=40, Dv=8),
    Case("bf16", ((70, 90),), H=2, Hk=2, D=24, Dv=56, window=(40, -1)),
    Case("fp32", ((20, 70),), H=1, Hk=1, D=256, Dv=16),
    Case("fp16", ((70, 70),), H=2, Hk=2, D=32, causal=True, packing="qkv"),
    Case("bf16", ((70, 70), (5, 5)), True, H=2, Hk=2, D=32, packing="qkv"),
    Case("fp16", ((70, 30),), H=2, Hk=1, D=32, packing="kv", scale=0.3),
    Case("bf16", ((30, 70), (5, 9)), True, H=2, Hk=1, D=32, packing="kv", window=(9, -1)),
    Case("fp32", ((20, 33),), H=2, Hk=2, D=1, window=(-1, 4), alibi="H"),
)


def case_of(row) -> Case:
    H, Hk = {"one": (1, 1), "gqa": (4, 2), "mqa": (2, 1)}[row["heads"]]
    lengths, varlen = LENGTHS[row["lengths"]], row["lengths"] == "packed"
    case = Case(row["dtype"], lengths, varlen, (3, 2) if varlen else (0, 0), H, Hk, row["D"], strides=row["strides"])
    return replace(case, **cases.MASKS[row["mask"]], **EXTRAS[row["extra"]])


CACHES = {
    "storage": ("rows", "cache_batch_idx", "page 3", "page 16"),
    "dtype": DTYPES,
    "Sq": (1, 5),
    "new": (0, 1, 5),
    "rotary": (None, "interleaved", "halves"),
    "leftpad": (False, True),
    "mask": ("full", "causal", "both", "narrow"),
    "extra": ("none", "softcap", "alibi"),
    "heads": ("gqa", "mqa"),
    "num_splits": (0, 3),
}


def cache_call(row) -> model.Call:
    g = torch.Generator().manual_seed(0)
    dtype, D, B, slots, new = harness.TORCH_DTYPES[row["dtype"]], 24, 2, 90, row["new"]
    H, Hk = {"gqa": (4, 2), "mqa": (3, 1)}[row["heads"]]

    def tensor(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    call = model.Call(tensor(B, row["Sq"], H, D), *(None,) * 2)
    call.cache_seqlens = torch.tensor([70, 0 if new else 1], dtype=torch.int32)
    if row["storage"].startswith("page"):
        page = int(row["storage"].split()[1])
        count = -(-slots // page)
        call.block_table = torch.randperm(B * count + 2, generator=g)[: B * count].view(B, count).int()
        call.k_cache, call.v_cache = tensor(B * count + 2, page, Hk, D), tensor(B * count + 2, page, Hk, D)
    else:
        rows = 4 if row["storage"] == "cache_batch_idx" else B
        call.k_cache, call.v_cache = tensor(rows, slots, Hk, D), tensor(rows, slots, Hk, D)
        call.cache_batch_idx = torch.tensor([3, 0], dtype=torch.int32) if rows == 4 else None
    if new:
        call.k, call.v = tensor(B, new, Hk, D), tensor(B, new, Hk, D)
    if row["rotary"]:
        angle = torch.rand(call.slots + 8, 8, generator=g) * 6
        call.rotary_cos, call.rotary_sin = angle.cos().to(dtype), angle.sin().to(dtype)
        call.rotary_interleaved = row["rotary"] == "interleaved"
    call.cache_leftpad = torch.tensor([17, 0], dtype=torch.int32) if row["leftpad"] else None
    settings = dict(cases.MASKS[row["mask"]])
    call.options = {"num_splits": row["num_splits"], "window_size": settings.pop("window", (-1, -1)), **settings}
    if row["extra"] == "softcap":
        call.options["softcap"] = 9.0
    if row["extra"] == "alibi":
        call.options["alibi_slopes"] = 0.2 * torch.rand(B, H, generator=g)
    return call


def in_pages(k, v, lengths, page: int):
    """Packed keys and values in pages of a shuffled table, whose room beyond a sequence's end is NaN."""
    each = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * each).view(len(lengths), each).int()
    pages_k, pages_v = (torch.full((table.numel(), page, *x.shape[1:]), math.nan) for x in (k, v))
    begin = 0
    for n, pages in zip(lengths, table.tolist()):
        for j in range(n):
            at = pages[j // page], j % page
            pages_k[at], pages_v[at] = k[begin + j].cpu(), v[begin + j].cpu()
        begin += n
    return pages_k, pages_v, table


def broken_cache_call(storage: str):
    """A call some of whose pages or cache rows are not there: (arguments, which sequences see such, rows appended)."""
    g, bad = torch.Generator().manual_seed(0), 2**30
    q, new = torch.randn(3, 2, 2, 16, generator=g), torch.randn(3, 2, 1, 16, generator=g)
    shape = (4, 16, 1, 16) if storage == "pages" else (3, 32, 1, 16)
    k_cache, v_cache = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    call = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=new, v=new, num_splits=2)
    call["cache_seqlens"] = torch.tensor([18, 16, 30], dtype=torch.int32)
    if storage == "pages":
        # Sequence 0 has good pages, 1 a bad one where it appends, 2 a bad one that its last rows do not see.
        call["block_table"] = torch.tensor([[0, 1], [2, -1], [bad, 3]], dtype=torch.int32)
        return {**call, "window_size": (3, 0)}, [False, True, False], 4
    call["cache_batch_idx"] = torch.tensor([2, -1, bad], dtype=torch.int32)
    return call, [False, True, True], 2


PLAIN_CACHE = {"storage": "rows", "dtype": "fp32", "Sq": 1, "new": 1, "rotary": None, "leftpad": False,
               "mask": "causal", "extra": "none", "heads": "gqa", "num_splits": 0}  # fmt: skip


GRID = cases.covering(FACTORS)
CACHE_GRID = cases.covering(CACHES, lambda row: not (row.get("rotary") and row.get("new", 1) == 0))


def proves(*rows, dtype="fp32", missing=False):
    """The mark of a test that proves rows of the support matrix."""
    return pytest.mark.feature(*rows, dtype=dtype, backend=BACKEND, missing=missing)


def _named(rows):
    """(name of its values, row)"""
    return [(f"{n}-" + "-".join(str(v).replace(" ", "") for v in row.values()), row) for n, row in enumerate(rows)]


def grid_params():
    for name, row in _named(GRID):
        case = case_of(row)
        both = ["strided inputs"] if case.strides != "contiguous" else []
        both += ["zero lengths and rows without keys"] if case.varlen else []
        more = [f"{feature} {way}" for feature in both for way in ("forward", "backward")]
        yield pytest.param(case, id=name, marks=proves(*case.features(), *more, dtype=case.dtype))


def head_dim_params():
    return [pytest.param(case, id=case.id, marks=proves(*case.features(), dtype=case.dtype)) for case in HEAD_DIMS]


def cache_params():
    for name, row in _named(CACHE_GRID):
        yield pytest.param(row, id=name, marks=proves(*model.features(row), dtype=row["dtype"]))


def lacking_params():
    """Beginnings of what a refusal names."""
    rows = {name: [name] for name in ("attn_bias", "attn_mask", "learnable_sink")}
    rows.update({"key_begin": ["key_begin and key_end"], "head dim above 256": ["head dim 257 to 576"]})
    for words, features in rows.items():
        cells = [f"{feature} {way}" for feature in features for way in ("forward", "backward")]
        yield pytest.param(words, id=words, marks=[proves(*cells, dtype=dtype, missing=True) for dtype in DTYPES])
