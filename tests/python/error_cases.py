"""Calls that raise, at least one for each error text of the package: of them tools/error_page.py makes docs/errors.md.

The bad inputs of test_inputs.py and test_kvcache_errors.py are among them; error_cases_layers.py has those of layers,
modules and operations, error_cases_environment.py those of the installation.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List

import bad_inputs
import error_cases_environment
import error_cases_layers
import test_kvcache_errors
import torch
from functions import good_arguments
from test_kvcache import make_call

import flash_attn
import flash_attn_interface as fa3
from flash_attn import _raw
from flash_attn._function_classes import FlashAttnFunc

H, HK, D, DV = 4, 2, 16, 24
ops = torch.ops.flash_attn
raw = _raw.flash_attn_gpu


@dataclass(frozen=True)
class Case:
    function: str  # as documentation calls it
    argument: str
    call: Callable[[], Any]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def _listed() -> Iterator[Case]:
    """What the other tests' lists hold."""
    for function, bad in bad_inputs.all_bad():

        def call(function=function, bad=bad):
            values = good_arguments(function)
            values.update(bad.change(values))
            function.call(values)

        yield Case(function.name, bad.argument, call)
    for row, change, _ in test_kvcache_errors.BAD.values():

        def call(row=row, change=change):
            cache_call = make_call(row)
            flash_attn.flash_attn_with_kvcache(**{**cache_call.arguments(), **change(cache_call)})

        changed = ", ".join(change(make_call(row)))
        yield Case("flash_attn_with_kvcache", changed, call)


def _dense(argument: str, **changes) -> Case:
    """flash_attn_func with q (2,5,4,16), k and v (2,6,2,16)."""

    def call():
        g = torch.Generator().manual_seed(0)
        shapes = {"q": (2, 5, H, D), "k": (2, 6, HK, D), "v": (2, 6, HK, D)}
        arguments = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
        arguments.update({name: x(arguments) if callable(x) else x for name, x in changes.items()})
        flash_attn.flash_attn_func(**arguments)

    return Case("flash_attn_func", argument, call)


def _varlen(argument: str, **changes) -> Case:
    """flash_attn_varlen_func of two sequences with 3 and 4 rows."""

    def call():
        q, k = torch.zeros(7, H, D), torch.zeros(7, HK, D)
        arguments = dict(q=q, k=k, v=k, cu_seqlens_q=int32(0, 3, 7), cu_seqlens_k=int32(0, 3, 7))
        arguments.update(max_seqlen_q=4, max_seqlen_k=4)
        flash_attn.flash_attn_varlen_func(**{**arguments, **changes})

    return Case("flash_attn_varlen_func", argument, call)


def _meta_tensors_of_negative_length():
    x, cu = torch.zeros(7, H, D, device="meta"), int32(0, 3, 7).to("meta")
    flash_attn.flash_attn_varlen_func(x, x, x, cu, cu, -1, 4, dropout_p=0.5, return_attn_probs=True)


def _attention() -> Iterator[Case]:
    yield _dense("attn_bias", attn_bias=torch.zeros(2, H, 5, 6).half().double())
    yield _dense("attn_bias", attn_bias=torch.zeros(H, 5, 6))
    yield _dense("attn_mask", attn_mask=torch.zeros(2, 6))
    yield _dense("attn_mask", attn_mask=torch.ones(2, 7, dtype=torch.bool))
    yield _dense("key_begin", key_begin=torch.zeros(2, 5))
    yield _dense("key_begin", key_begin=torch.zeros(5).int())
    yield _varlen("key_end", key_end=torch.zeros(2, 4).int())
    yield _dense("learnable_sink", learnable_sink=torch.zeros(H).double())
    yield _dense("learnable_sink", learnable_sink=torch.zeros(H + 1))
    yield _dense("window_size", window_size=(1, 2, 3))
    yield _dense("q", q=lambda a: a["q"].to_sparse())
    yield Case("flash_attn_2_cuda.fwd", "q", lambda: _raw_forward(torch.zeros(1, 3, H, D)._neg_view()))
    yield _varlen("num_splits", num_splits=-1)
    yield _varlen("max_seqlen_q", max_seqlen_q=-1)
    yield Case("flash_attn_varlen_func", "max_seqlen_q", _meta_tensors_of_negative_length)
    yield _varlen("max_seqlen_q", max_seqlen_q=1 << 31)
    yield _dense("softcap", softcap=1e-40)
    yield Case("flash_attn_2_cuda.varlen_fwd", "num_splits", _splits_of_pages)
    pages = torch.zeros(3, 4, HK, D)
    used = dict(block_table=int32(0, 1).view(2, 1))
    yield _varlen("seqused_k", k=pages, v=pages, **used, seqused_k=int32(3, 9))
    yield _varlen("seqused_k", k=pages, v=pages, **used, seqused_k=int32(3, 4), max_seqlen_k=3)
    yield _varlen("seqused_k", seqused_k=int32(3, 5))
    yield _varlen("block_table", k=pages[:, :0], v=pages[:, :0], **used)
    yield _dense("D", q=lambda a: torch.zeros(2, 5, H, 577), k=lambda a: torch.zeros(2, 6, HK, 577))
    for name in ("block_table", "seqused_k"):
        yield Case("flash_attn_varlen_func", name, lambda name=name: _differentiate_storage(name))
    yield Case("flash_attn_func", "create_graph", _twice)
    yield Case("flash_attn_func", "torch.func transforms", _transformed)
    yield Case("flash_attn_func", "forward-mode derivatives", _forward_mode)
    yield Case("flash_attn_func", "device", _on_two_devices)
    yield Case("flash_attn_func", "fake tensors", _without_memory)
    yield Case("FlashAttnFunc.apply", "args", lambda: FlashAttnFunc.apply(1, 2))
    yield Case("_get_block_size_n", "head_dim", lambda: _raw._get_block_size_n(torch.device("cpu"), 577, False, False))


def _raw_forward(q):
    raw.fwd(q, q, q, None, None, 0.0, 1.0, False, -1, -1, 0.0, False, None)


def _splits_of_pages():
    pages = torch.zeros(3, 4, HK, D)
    cu, table = int32(0, 3, 7), int32(0, 1).view(2, 1)
    raw.varlen_fwd(torch.zeros(7, H, D), pages, pages, None, cu, cu, None, None, table, None, 4, 4, 0.0, 1.0, False,
                   False, -1, -1, 0.0, False, None, 2)  # fmt: skip


def _differentiate_storage(name):
    k = torch.zeros(7, HK, D) if name == "seqused_k" else torch.zeros(3, 4, HK, D)
    given = {"seqused_k": int32(3, 4), "block_table": int32(0, 1).view(2, 1)}[name]
    q, cu = torch.zeros(7, H, D, requires_grad=True), int32(0, 3, 7)
    flash_attn.flash_attn_varlen_func(q, k, k, cu, cu, 4, 4, **{name: given}).sum().backward()


def _twice():
    q = torch.randn(1, 3, H, D, requires_grad=True)
    (grad,) = torch.autograd.grad(flash_attn.flash_attn_func(q, q, q).square().sum(), q, create_graph=True)
    grad.sum().backward()


def _transformed():
    q = torch.randn(2, 1, 3, H, D)
    torch.func.vmap(flash_attn.flash_attn_func)(q, q, q)


def _forward_mode():
    q, forward_ad = torch.randn(1, 3, H, D), torch.autograd.forward_ad
    with forward_ad.dual_level():
        flash_attn.flash_attn_func(forward_ad.make_dual(q, q), q, q)


def _on_two_devices():
    q = torch.zeros(1, 3, H, D)
    flash_attn.flash_attn_func(q, q.to("meta"), q)


def _without_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        _raw_forward(torch.zeros(1, 3, H, D))


def _kinds() -> Iterator[Case]:
    """Tensors that are not plain ones."""
    x = torch.zeros(2, 5, HK, D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls both prototypes
        nested = torch.nested.nested_tensor([x[0], x[1, :3]])
        masked = torch.masked.masked_tensor(x, torch.ones_like(x).bool())
    yield _dense("q", q=None)
    yield _dense("q", q=nested)
    yield _dense("k", k=masked)


def _operators() -> Iterator[Case]:
    """torch.ops.flash_attn.*, which compiled graphs call."""

    def backward(**changes):
        x = torch.zeros(1, 3, H, D)
        arguments = dict(dout=x, q=x, k=x, v=x, out=x, softmax_lse=torch.zeros(1, H, 3), cu_seqlens_q=None)
        arguments.update(cu_seqlens_k=None, rng_state=None, max_seqlen_q=0, max_seqlen_k=0, dropout_p=0.0)
        arguments.update(softmax_scale=1.0, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0)
        arguments.update(alibi_slopes=None, deterministic=False, packing=0)
        return lambda: ops.attention_backward(**{**arguments, **changes})

    def forward(**changes):
        x = torch.zeros(1, 3, H, D)
        arguments = dict(q=x, k=x, v=x, cu_seqlens_q=None, cu_seqlens_k=None, rng_state=None, max_seqlen_q=0)
        arguments.update(max_seqlen_k=0, dropout_p=0.0, softmax_scale=1.0, causal=False, window_size_left=-1)
        arguments.update(window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False)
        return lambda: ops.attention_forward(**{**arguments, **changes})

    name = "torch.ops.flash_attn.attention_backward"
    yield Case(name, "packing", backward(packing=3))
    yield Case(name, "bias_gradient", backward(bias_gradient=True))
    x = torch.zeros(1, 3, H, D)
    score = (0.0, 1.0, False, -1, -1, 0.0, None, False)
    raw_forward = torch.ops.flash_attn._flash_attn_forward
    yield Case("torch.ops.flash_attn._flash_attn_forward", "q", lambda: raw_forward(None, x, x, *score))
    name = "torch.ops.flash_attn.attention_forward"
    packed = torch.zeros(3, H, D)
    yield Case(name, "cu_seqlens_k", forward(q=packed, k=packed, v=packed, cu_seqlens_q=int32(0, 3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of quantized tensors
        quantized = torch.quantize_per_tensor(torch.zeros(1, 3, H, D), 1.0, 0, torch.qint8)
    yield Case(name, "q", forward(q=quantized, k=quantized, v=quantized))


def _explain() -> Iterator[Case]:
    q = torch.zeros(1, 3, H, D)
    explain = flash_attn.explain
    yield Case("explain", "function", lambda: explain(print, q, q, q))
    yield Case("explain", "q", lambda: explain(1.0, q, q))
    yield Case("explain", "kv", lambda: explain(flash_attn.flash_attn_kvpacked_func, q, q))
    function = flash_attn.flash_attn_with_kvcache
    yield Case("explain", "cache_seqlens", lambda: explain(function, q, q, q, cache_seqlens=10))


def _cache() -> Iterator[Case]:
    q, cache = torch.zeros(2, 3, H, D), torch.zeros(2, 8, HK, D)
    new, cos = torch.zeros(2, 3, HK, D), torch.ones(8, 8)
    rotated = dict(k=new, v=new, rotary_cos=cos, rotary_sin=cos, cache_seqlens=int32(2, 5))
    good = dict(q=q, k_cache=cache, v_cache=cache.clone())
    for argument, changes in {
        "v_cache": {"v_cache": torch.zeros(2, 8, HK, 2 * D)[..., ::2]},
        "k": {**rotated, "k": new[0]},
        "rotary_cos": {**rotated, "causal": True, "q": torch.zeros(2, 5, H, D)},
        "block_table": {"block_table": torch.zeros(2, 1).int(), "k_cache": cache[:, :0], "v_cache": cache[:, :0]},
    }.items():
        given = {**good, **changes}
        yield Case("flash_attn_with_kvcache", argument, lambda g=given: flash_attn.flash_attn_with_kvcache(**g))


def _fa3_attention() -> Iterator[Case]:
    name = "flash_attn_interface.flash_attn_func"
    q, k, v = torch.randn(2, 5, H, D), torch.randn(2, 8, HK, D), torch.randn(2, 8, HK, DV)
    qv = torch.randn(2, 5, H, DV)
    wide = torch.randn(2, 8, HK, 576)
    table: Dict[str, List[Dict[str, Any]]] = {
        "q_descale": [dict(q_descale=torch.ones(2, HK))],
        "num_splits": [dict(num_splits=257)],
        "pack_gqa": [dict(pack_gqa=1)],
        "sm_margin": [dict(sm_margin=-1)],
        "attention_chunk": [dict(attention_chunk=-2)],
        "qv": [dict(qv=q), dict(qv=qv.double()), dict(qv=torch.randn(2, 5, H, 576), v=wide), dict(qv=qv, k=k[:, :7])],
    }
    if hasattr(torch, "float8_e4m3fn"):
        table["q"] = [dict(q=q.to(torch.float8_e4m3fn))]
    for argument, changes in table.items():
        for change in changes:
            yield Case(name, argument, lambda c=change: fa3.flash_attn_func(**{**dict(q=q, k=k, v=v), **c}))
    packed = "flash_attn_interface.flash_attn_qkvpacked_func"
    yield Case(packed, "qkv", lambda: fa3.flash_attn_qkvpacked_func(torch.zeros(2, 5, 2, H, D)))
    yield Case(packed, "num_heads_q", lambda: fa3.flash_attn_qkvpacked_func(torch.zeros(2, 5, 8, D), num_heads_q=3))
    for used in (int32(3, 4).long(), int32(3, 9)):
        rows, cu = torch.zeros(7, H, D), int32(0, 3, 7)

        def call(used=used, rows=rows, cu=cu):
            fa3.flash_attn_varlen_func(rows, rows, rows, cu, cu, 4, 4, seqused_q=used)

        yield Case("flash_attn_interface.flash_attn_varlen_func", "seqused_q", call)


def _fa3_cache() -> Iterator[Case]:
    good = dict(q=torch.zeros(2, 2, H, D), k_cache=torch.zeros(2, 8, HK, D), v_cache=torch.zeros(2, 8, HK, DV))
    good.update(k=torch.zeros(4, HK, D), v=torch.zeros(4, HK, DV), cu_seqlens_k_new=int32(0, 2, 4))
    good.update(cache_seqlens=int32(3, 4), attention_chunk=3)
    ones, table = torch.ones(9, 4), int32(0, 1).view(2, 1)
    for argument, changes in (
        ("q", dict(q=torch.zeros(2, 2, 2, H, D))),
        ("cu_seqlens_q", dict(q=torch.zeros(2, 2, H, D), cu_seqlens_q=int32(0, 2, 4))),
        ("cu_seqlens_k_new", dict(cu_seqlens_k_new=int32(0, 2, 4).long())),
        ("cu_seqlens_k_new", dict(cu_seqlens_k_new=int32(0, 1, 9))),
        ("cu_seqlens_k_new", dict(cu_seqlens_k_new=int32(0, 1, 2, 4))),
        ("cu_seqlens_k_new", dict(k=None, v=None)),
        ("cache_leftpad", dict(cache_leftpad=int32(0).long())),
        ("k_cache", dict(k_cache=torch.zeros(3, 8, HK, D), v_cache=torch.zeros(3, 8, HK, DV))),
        ("page_table", dict(page_table=table, cache_batch_idx=int32(0, 1))),
        ("page_table", dict(page_table=table.long())),
        ("page_table", dict(page_table=table + 5)),
        ("cache_seqlens", dict(cache_seqlens=int32(7, 2))),
        ("cache_seqlens", dict(cache_seqlens=None)),
        ("cache_seqlens", dict(k=None, v=None, cu_seqlens_k_new=None, cache_seqlens=9)),
        ("v_cache", dict(v_cache=torch.zeros(8, HK, DV))),
        ("k_cache", dict(k_cache=torch.zeros(2, 0, HK, D), v_cache=torch.zeros(2, 0, HK, DV))),
        ("rotary_sin", dict(rotary_cos=ones, rotary_sin=ones.double())),
        ("rotary_cos", dict(rotary_cos=ones[:2], rotary_sin=ones[:2])),
        ("rotary_cos", dict(rotary_cos=ones)),
        ("rotary_seqlens", dict(rotary_seqlens=int32(1, 2))),
        ("k", dict(k=torch.zeros(4, HK, D + 1))),
        ("v", dict(v=torch.zeros(3, HK, DV))),
        ("v", dict(v=None)),
        ("max_seqlen_q", dict(q=torch.zeros(4, H, D), cu_seqlens_q=int32(0, 2, 4))),
        ("max_seqlen_q", dict(max_seqlen_q=1)),
        ("scheduler_metadata", dict(scheduler_metadata=torch.zeros(1))),
    ):
        given = {**good, **changes}
        name = "flash_attn_interface.flash_attn_with_kvcache"
        yield Case(name, argument, lambda g=given: fa3.flash_attn_with_kvcache(**g))


def _fa3_rest() -> Iterator[Case]:
    out, lse = torch.randn(2, 1, 3, H, D), torch.randn(2, 1, 3, H)
    for argument, given in (
        ("out_partial", (out[0], lse)),
        ("lse_partial", (out, lse[:1])),
        ("out_partial", (out.half(), lse)),
        ("out_dtype", (out, lse, None, torch.float64)),
        ("out", (out, lse, out)),
        ("out_dtype", (out, lse, out[0].clone(), torch.float16)),
    ):
        yield Case("flash_attn_interface.flash_attn_combine", argument, lambda g=given: fa3.flash_attn_combine(*g))
    sizes = dict(batch_size=2, max_seqlen_q=5, max_seqlen_k=8, num_heads_q=H, num_heads_kv=HK, headdim=D)
    changes = [("max_seqlen_q", -1), ("num_heads_q", 3), ("num_heads_q", 0), ("headdim", 577), ("page_size", 0)]
    changes += [("cache_seqlens", None), ("cache_seqlens", 3)]
    if hasattr(torch, "float8_e4m3fn"):
        changes += [("qkv_dtype", torch.float8_e4m3fn)]
    for argument, value in changes:
        given = {**sizes, "cache_seqlens": int32(8, 7), argument: value}
        name = "flash_attn_interface.get_scheduler_metadata"
        yield Case(name, argument, lambda g=given: fa3.get_scheduler_metadata(**g))


def all_cases() -> List[Case]:
    groups = (_listed, _attention, _kinds, _operators, _explain, _cache, _fa3_attention, _fa3_cache, _fa3_rest)
    cases = [case for group in groups for case in group()]
    elsewhere = (error_cases_layers, error_cases_environment)
    return cases + [Case(*values) for module in elsewhere for values in module.all_cases()]


def provoke(case: Case) -> Exception:
    """What the call raises; AssertionError where it raises nothing."""
    try:
        case.call()
    except Exception as error:
        return error
    raise AssertionError(f"{case.function} raises nothing for its bad {case.argument}")
