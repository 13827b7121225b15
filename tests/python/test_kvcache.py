"""flash_attn_with_kvcache against the plain model of kvcache_model.py, over a pairwise grid of its arguments."""

from __future__ import annotations

import inspect
import itertools
from typing import Any, Dict

import cases
import harness
import kvcache_model as model
import oracle
import pytest
import tensors
import tolerances
import torch
from devices import CPU, Device
from functions import raw_module

import flash_attn
import flash_attn_interface as fa3
from flash_attn import _kvcache, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

FACTORS: Dict[str, Any] = {
    "storage": ("rows", "cache_batch_idx", "permuted", "page 1", "page 3", "page 16", "page 256"),
    "dtype": cases.DTYPES,
    "Sq": (1, 3, 70),
    "new": (0, 1, 3, 70),
    "rotary": (None, "interleaved", "halves", "part"),
    "leftpad": (False, True),
    "mask": ("full", "causal", "both", "narrow"),
    "extra": ("none", "softcap", "alibi"),
    "heads": ("one", "gqa", "mqa"),
    "D": (16, 59, 64, 111),
    "num_splits": (0, 1, 5),
}  # fmt: skip


def allowed(row) -> bool:
    return not (row.get("rotary") and row.get("new", 1) == 0)


def make_call(row, seed: int = 0) -> model.Call:
    g = torch.Generator().manual_seed(seed)
    dtype, D, B, Sq, new = harness.TORCH_DTYPES[row["dtype"]], row["D"], 3, row["Sq"], row["new"]
    (H, Hk), slots = cases.HEADS[row["heads"]], 290

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    lengths = torch.tensor([slots - 75, 0 if new else 1, 130], dtype=torch.int32)
    call = model.Call(randn(B, Sq, H, D), *(None,) * 2, cache_seqlens=lengths)
    if row["storage"].startswith("page"):
        page = int(row["storage"].split()[1])
        per_sequence = -(-slots // page)
        pages = B * per_sequence + 2
        order = torch.randperm(pages, generator=g)[: B * per_sequence]
        call.block_table = order.view(B, per_sequence).int()
        call.block_table[1, -(-(new + 1) // page) :] = -7  # not needed, so never read
        call.k_cache, call.v_cache = randn(pages, page, Hk, D), randn(pages, page, Hk, D)
    else:
        rows = 5 if row["storage"] == "cache_batch_idx" else B
        call.k_cache, call.v_cache = randn(rows, slots, Hk, D), randn(rows, slots, Hk, D)
        if row["storage"] == "cache_batch_idx":
            call.cache_batch_idx = torch.tensor([4, 0, 2], dtype=torch.int32)
        if row["storage"] == "permuted":
            call.k_cache = call.k_cache.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
            call.v_cache = call.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    if new:
        call.k, call.v = randn(B, new, Hk, D), randn(B, new, Hk, D)
    if row["rotary"]:
        half = D // 4 if row["rotary"] == "part" else D // 2
        angle = torch.rand(call.slots + 8, half, generator=g) * 6
        call.rotary_cos, call.rotary_sin = angle.cos().to(dtype), angle.sin().to(dtype)
        call.rotary_interleaved = row["rotary"] != "halves"
    if row["leftpad"]:
        call.cache_leftpad = torch.tensor([17, 0, 130], dtype=torch.int32)
    settings = dict(cases.MASKS[row["mask"]])
    call.options = {"num_splits": row["num_splits"], "window_size": settings.pop("window", (-1, -1)), **settings}
    if row["extra"] == "softcap":
        call.options["softcap"] = 9.0
    if row["extra"] == "alibi":
        call.options["alibi_slopes"] = 0.2 * torch.rand(B, H, generator=g)
    return call


def check(call: model.Call, dtype: str, device: Device = CPU) -> None:
    expected = model.appended(call)
    ref, pt = (model.attend(call, expected, a) for a in (oracle.EXACT, oracle.same_precision(call.q.dtype)))
    there = call.to(device.torch_name)
    storages = there.k_cache.data_ptr(), there.v_cache.data_ptr()
    with device.scope():
        out, lse = flash_attn_with_kvcache(**there.arguments(), return_softmax_lse=True)
    assert storages == (there.k_cache.data_ptr(), there.v_cache.data_ptr())
    out, lse, k_cache, v_cache = (x.cpu() for x in (out, lse, there.k_cache, there.v_cache))
    assert torch.equal(v_cache, expected[1])
    if call.rotary_cos is None:
        assert torch.equal(k_cache, expected[0])
    else:
        torch.testing.assert_close(k_cache, expected[0], rtol=1e-3, atol=1e-3)
    tolerances.assert_within("out", out, ref[0], pt[0], 3, 1e-5 if dtype != "fp64" else 1e-13, "kv cache")
    finite = torch.isfinite(ref[1])
    assert torch.equal(torch.isposinf(lse), ~finite)
    tolerance = {"fp64": 1e-12, "fp32": 1e-4}.get(dtype, 2e-2 if call.rotary_cos is not None else 1e-4)
    torch.testing.assert_close(lse[finite].double(), ref[1][finite], rtol=tolerance, atol=tolerance)


def params():
    for n, row in enumerate(cases.covering(FACTORS, allowed)):
        name = "-".join(f"{key}={value}".replace(" ", "") for key, value in row.items())
        yield pytest.param(row, id=f"{n}-{name}", marks=pytest.mark.feature(*model.features(row), dtype=row["dtype"]))


@pytest.mark.parametrize("row", list(params()))
def test_grid(row):
    check(make_call(row), row["dtype"])


PLAIN = {"storage": "rows", "dtype": "fp32", "Sq": 1, "new": 1, "rotary": None, "leftpad": False, "mask": "causal",
         "extra": "none", "heads": "gqa", "D": 64, "num_splits": 0}  # fmt: skip


@pytest.mark.second_torch
@pytest.mark.parametrize(
    "change",
    [{}, {"storage": "page 3", "rotary": "halves"}, {"storage": "cache_batch_idx", "dtype": "bf16", "leftpad": True}],
    ids=str,
)
def test_a_few(change):
    row = {**PLAIN, **change}
    check(make_call(row), row["dtype"])


@pytest.mark.second_torch
def test_cache_seqlens_as_int_and_none():
    call = make_call({**PLAIN, "new": 0, "Sq": 3})
    call.cache_seqlens = torch.full((3,), 77, dtype=torch.int32)
    expected = flash_attn_with_kvcache(**call.arguments())
    assert torch.equal(flash_attn_with_kvcache(**{**call.arguments(), "cache_seqlens": 77}), expected)
    whole = flash_attn_with_kvcache(call.q, call.k_cache, call.v_cache, causal=True)
    torch.testing.assert_close(whole, flash_attn_func(call.q, call.k_cache, call.v_cache, causal=True))


def test_values_of_another_head_dim():
    q, k, v = torch.randn(2, 3, 4, 40), torch.randn(2, 90, 2, 40), torch.randn(2, 90, 2, 24)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v), flash_attn_func(q, k, v))


def test_shared_slots_keep_the_last():
    """Of sequences that append to one row of the cache, the last one's keys stay, always."""
    call = make_call({**PLAIN, "storage": "cache_batch_idx", "new": 3})
    call.cache_batch_idx[:] = 1
    call.cache_seqlens[:] = 5
    flash_attn_with_kvcache(**call.arguments())
    assert torch.equal(call.k_cache[1, 5:8], call.k[2]) and torch.equal(call.v_cache[1, 5:8], call.v[2])


def test_sequences_without_keys():
    call = make_call({**PLAIN, "new": 0})
    call.cache_seqlens[:] = torch.tensor([0, 40, 0])
    out, lse = flash_attn_with_kvcache(**call.arguments(), return_softmax_lse=True)
    assert (out[::2] == 0).all() and torch.isposinf(lse[::2]).all() and torch.isfinite(lse[1]).all()


@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_raw_function(dtype):
    """Upstream's twenty positional arguments, into a given buffer."""
    row = {**PLAIN, "dtype": dtype, "rotary": "interleaved", "leftpad": True, "Sq": 3, "new": 3}
    call, same = make_call(row), make_call(row)
    expected, expected_lse = flash_attn_with_kvcache(**same.arguments(), return_softmax_lse=True)
    buffer = torch.empty_like(call.q)
    results = raw_module.fwd_kvcache(
        call.q, call.k_cache, call.v_cache, call.k, call.v, call.cache_seqlens, call.rotary_cos, call.rotary_sin, None,
        call.cache_leftpad, None, None, buffer, 64**-0.5, True, -1, -1, 0.0, True, 0,
    )  # fmt: skip
    assert type(results) is list and len(results) == 2 and results[0].data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, expected) and torch.equal(results[1], expected_lse)
    assert torch.equal(call.k_cache, same.k_cache) and torch.equal(call.v_cache, same.v_cache)
    for count in (19, 21):
        with pytest.raises(TypeError):
            raw_module.fwd_kvcache(*[None] * count)


def check_paged_varlen(page: int, dtype: str, device: Device = CPU) -> None:
    """Bit for bit what packed keys give: pages change where keys lie."""
    g = torch.Generator().manual_seed(0)
    torch_dtype, lengths = harness.TORCH_DTYPES[dtype], [300, 0, 41]
    q, packed_k, packed_v = (
        torch.randn(n, h, 40, generator=g).to(torch_dtype) for n, h in ((70, 4), (341, 2), (341, 2))
    )
    cu_q, cu_k = torch.tensor([0, 3, 9, 70], dtype=torch.int32), tensors.cumulative(lengths)
    per_sequence = -(-300 // page)
    table = torch.randperm(3 * per_sequence, generator=g).view(3, per_sequence).int()
    k, v = (torch.full((3 * per_sequence, page, 2, 40), float("nan"), dtype=torch_dtype) for _ in range(2))
    for b, j in itertools.chain(*([(b, j) for j in range(n)] for b, n in enumerate(lengths))):
        at = int(table[b, j // page]), j % page
        k[at], v[at] = packed_k[cu_k[b] + j], packed_v[cu_k[b] + j]
    settings = dict(causal=True, window_size=(200, 0), return_attn_probs=True)
    tensors_there = (q, packed_k, packed_v, k, v, table, cu_q, cu_k, torch.tensor(lengths, dtype=torch.int32))
    q, packed_k, packed_v, k, v, table, cu_q, cu_k, used = (x.to(device.torch_name) for x in tensors_there)
    with device.scope():
        expected = flash_attn_varlen_func(q, packed_k, packed_v, cu_q, cu_k, 61, 300, **settings)
        for more in ({}, {"seqused_k": used}, {"num_splits": 0}):
            paged = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 61, 300, block_table=table, **settings, **more)
            assert torch.equal(paged[0], expected[0]) and torch.equal(paged[1], expected[1])


@pytest.mark.feature("paged varlen forward")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("page", (1, 5, 16, 256))
def test_paged_varlen(page, dtype):
    check_paged_varlen(page, dtype)


def check_used_and_padded_keys(dtype: str, device: Device = CPU) -> None:
    """The same as a packed batch without the slots that are not used; they may hold anything."""
    torch_dtype = harness.TORCH_DTYPES[dtype]
    q, k, v = (torch.randn(n, h, 24).to(torch_dtype) for n, h in ((9, 4), (130, 2), (130, 2)))
    cu_q, cu_k = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 100, 130], dtype=torch.int32)
    used, leftpad = torch.tensor([90, 10], dtype=torch.int32), torch.tensor([20, 10], dtype=torch.int32)
    seen = torch.tensor([0, 70, 70], dtype=torch.int32)
    q, k, v, cu_q, cu_k, used, leftpad, seen = (
        x.to(device.torch_name) for x in (q, k, v, cu_q, cu_k, used, leftpad, seen)
    )
    with device.scope():
        expected = flash_attn_varlen_func(q, k[20:90], v[20:90], cu_q, seen, 6, 70, causal=True, window_size=(200, 0))
        for x in (k, v):
            x[:20] = x[90:] = float("nan")
        out = flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 6, 100, causal=True, window_size=(200, 0), seqused_k=used, leftpad_k=leftpad
        )
    assert torch.equal(out, expected)


@pytest.mark.feature("seqused_k, leftpad_k in varlen")
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_used_and_padded_keys_in_varlen(dtype):
    check_used_and_padded_keys(dtype)


def test_no_gradient_through_storage():
    q, k, v = (torch.randn(4, 2, 8, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 4, 4, seqused_k=torch.tensor([3], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="seqused_k has no backward pass"):
        out.sum().backward()
    call = make_call(PLAIN)
    assert not flash_attn_with_kvcache(**{**call.arguments(), "q": call.q.requires_grad_()}).requires_grad


@pytest.mark.requires_torch(2, 4, "torch.compile and torch.library.opcheck as used here came with torch 2.4")
def test_under_compile():
    def step(q, k_cache, v_cache, k, v, cache_seqlens):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, causal=True) * 2

    torch._dynamo.reset()
    calls = [make_call({**PLAIN, "new": 3, "Sq": 3}) for _ in range(2)]
    fast = torch.compile(step, fullgraph=True, backend="aot_eager")
    a, b = (f(c.q, c.k_cache, c.v_cache, c.k, c.v, c.cache_seqlens) for f, c in zip((fast, step), calls))
    assert torch.equal(a, b) and torch.equal(calls[0].k_cache, calls[1].k_cache)
    c = calls[0]
    tables = (None, None, c.cache_seqlens, None, None, None)
    args = (c.q, c.k_cache, c.v_cache, c.k, c.v, *tables, 0.125, True, -1, -1, 0.0, True, None, 0)
    torch.library.opcheck(torch.ops.flash_attn.attention_with_kvcache.default, args)


LAYOUTS = {  # Of a tensor with both caches: its shape, and the caches (B,S,Hk,D).
    "(2,B,S,H,D)": (lambda S: (2, 2, S, 2, 16), lambda kv: (kv[0], kv[1])),
    "(B,S,2,H,D)": (lambda S: (2, S, 2, 2, 16), lambda kv: (kv[:, :, 0], kv[:, :, 1])),
    "(2,B,H,S,D)": (lambda S: (2, 2, 2, S, 16), lambda kv: kv.transpose(2, 3).unbind(0)),
}


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [flash_attn_with_kvcache, fa3.flash_attn_with_kvcache], ids=["fa2", "fa3"])
def test_compiled_appending_reaches_views(function, layout, dynamic):
    """Inductor keeps what is written to caches that lie in one tensor, of which it makes a graph for every length."""
    shape, split = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(0)

    def step(kv, q, k, v, lengths, cos, sin):
        new = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin}
        return function(q, *split(kv), cache_seqlens=lengths, causal=True, **new)

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, dynamic=dynamic)
    cos, sin, lengths = torch.rand(40, 4), torch.rand(40, 4), torch.tensor([3, 5], dtype=torch.int32)
    for S in (32, 40):
        q, k, v = (torch.randn(2, 2, 2, 16, generator=generator) for _ in range(3))
        ours = torch.randn(shape(S), generator=generator)
        theirs, before = ours.clone(), ours.clone()
        out, expected = fast(ours, q, k, v, lengths, cos, sin), step(theirs, q, k, v, lengths, cos, sin)
        assert torch.equal(out, expected) and torch.equal(ours, theirs) and not torch.equal(ours, before)
    too_long, kept = torch.tensor([3, 39], dtype=torch.int32), ours.clone()
    with pytest.raises(RuntimeError, match="cache_seqlens and 2 new keys need 41 slots in sequence 1"):
        fast(ours, q, k, v, too_long, cos, sin)
    assert torch.equal(ours, kept)


def arguments_of_operator(call: model.Call):
    """The arguments of torch.ops.flash_attn.attention_with_kvcache."""
    call.options.setdefault("softmax_scale", 0.25)
    bound = inspect.signature(flash_attn_with_kvcache).bind(**call.arguments())
    bound.apply_defaults()
    left, right = bound.arguments.pop("window_size")
    bound.arguments.update(window_left=left, window_right=right)
    names = (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_left window_right softcap rotary_interleaved alibi_slopes num_splits"
    )
    return [bound.arguments[name] for name in names.split()]


STORED = [
    {"new": 3, "Sq": 3, "rotary": "part", "leftpad": True, "mask": "both", "extra": "alibi"},
    {"storage": "page 3", "new": 70, "Sq": 1, "rotary": "halves", "mask": "full", "dtype": "bf16"},
    {"storage": "page 16", "new": 1, "Sq": 3, "rotary": "interleaved", "mask": "narrow", "extra": "softcap"},
    {"storage": "cache_batch_idx", "new": 3, "Sq": 70, "num_splits": 5, "dtype": "fp64"},
    {"storage": "permuted", "new": 0, "Sq": 3, "leftpad": True},
    {"storage": "page 1", "new": 0, "Sq": 1},
]


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
@pytest.mark.parametrize("row", STORED, ids=str)
def test_appending_by_torch_gives_the_same_bits(row, monkeypatch):
    """What compilers get for caches at symbolic offsets, and what the operator does by itself."""
    monkeypatch.setattr(_kvcache, "_is_symbolic", lambda number: True)
    ours, theirs = make_call({**PLAIN, **row}), make_call({**PLAIN, **row})
    if row.get("storage") == "cache_batch_idx":  # Several sequences append to the same slots: the last one's keys stay.
        for call in (ours, theirs):
            call.cache_batch_idx[:] = 1
            call.cache_seqlens[:] = torch.tensor([5, 6, 5])
    results = _kvcache._traced(*arguments_of_operator(ours))
    expected = torch.ops.flash_attn.attention_with_kvcache(*arguments_of_operator(theirs))
    assert all(torch.equal(a, b) for a, b in zip(results, expected))
    assert torch.equal(ours.k_cache, theirs.k_cache) and torch.equal(ours.v_cache, theirs.v_cache)


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
def test_appending_by_torch_where_values_lie_in_the_keys(monkeypatch):
    """The latent of absorbed attention is both: its first features are the values, and the new values stay."""
    monkeypatch.setattr(_kvcache, "_is_symbolic", lambda number: True)
    caches = [torch.ones(3, 290, 2, 64) for _ in range(2)]
    for cache, append in zip(caches, (_kvcache._traced, torch.ops.flash_attn.attention_with_kvcache)):
        call = make_call({**PLAIN, "new": 3})
        call.k_cache, call.v_cache, call.v = cache, cache[..., :40], call.v[..., :40]
        append(*arguments_of_operator(call))
    assert torch.equal(*caches) and not torch.equal(caches[0], torch.ones_like(caches[0]))


def test_explained():
    """The caches are what is read, and gradients are never recorded."""
    call = make_call({**PLAIN, "storage": "page 16"})
    explanation = flash_attn.explain(flash_attn_with_kvcache, **call.arguments())
    assert explanation.kernel.startswith("cpu.forward.float32") and explanation.backward is None


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("Sq", [1, 20])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_other_sequences_change_no_bit(dtype, Sq, num_splits):
    """A server that batches requests gives each what it would get by itself, however long the others are."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2722, 2362, 1500, 1024, 60], dtype=torch.int32)
    q, k, v = (
        torch.randn(5, S, H, 40, generator=g).to(harness.TORCH_DTYPES[dtype]) for S, H in ((Sq, 4), *[(2800, 2)] * 2)
    )

    def attend(part):
        options = {"causal": True, "num_splits": num_splits, "return_softmax_lse": True}
        return flash_attn_with_kvcache(q[part], k[part], v[part], cache_seqlens=lengths[part], **options)

    out, lse = attend(slice(None))
    for b in range(5):
        one, one_lse = attend(slice(b, b + 1))
        assert torch.equal(one[0], out[b]) and torch.equal(one_lse[0], lse[b]), f"sequence {b}"
