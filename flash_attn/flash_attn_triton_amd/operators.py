"""Puts the Triton backend under `torch.ops.flash_attn`: schemas, shapes and autograd stay those of the binding, the
kernels of one dispatch key are replaced."""

from __future__ import annotations

import warnings
from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from flash_attn.flash_attn_triton_amd import attention, interface_fa, raw
from flash_attn.flash_attn_triton_amd.language import IS_INTERPRETED
from flash_attn.flash_attn_triton_amd.problem import Problem, check_dims, draw_rng_state, refuse_tables
from flash_attn.flash_attn_triton_amd.stored import attend_pages


def _rows(x: Optional[Tensor]) -> Optional[Tensor]:
    """x, or a copy if its last stride is not 1."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def _problem(named: Dict, q: Tensor, k: Tensor, v: Tensor) -> Problem:
    refuse_tables(named)
    return Problem(
        _rows(q),
        _rows(k),
        _rows(v),
        named["dropout_p"],
        named["softmax_scale"],
        named["causal"],
        named["window_size_left"],
        named["window_size_right"],
        named["softcap"],
        named["alibi_slopes"],
        named.get("cu_seqlens_q"),
        named.get("cu_seqlens_k"),
        named.get("max_seqlen_q", 0),
        named.get("max_seqlen_k", 0),
        named.get("seqused_k"),
        named.get("leftpad_k"),
        named.get("rng_state"),
    )


def _forward(named: Dict, problem: Problem) -> Tuple[Tensor, Tensor, Tensor]:
    return_softmax = named["return_softmax"] and problem.dropout_p > 0
    if named.get("block_table") is not None:
        table, splits = named["block_table"], named.get("num_splits", 0)
        return tuple(attend_pages(problem, table, None, splits, return_softmax)[:3])
    return attention.forward(problem, None, return_softmax)


def _attention(named: Dict):
    """The public operators, where autograd is not in the way (inference mode)."""
    varlen = named["cu_seqlens_q"] is not None
    if "qkv" in named:
        check_dims("qkv", named["qkv"], "(T, 3, H, D)" if varlen else "(B, S, 3, H, D)")
        q, k, v = named["qkv"].unbind(-3)
    elif "kv" in named:
        check_dims("kv", named["kv"], "(Tk, 2, Hk, D)" if varlen else "(B, Sk, 2, Hk, D)")
        q, (k, v) = named["q"], named["kv"].unbind(-3)
    else:
        q, k, v = named["q"], named["k"], named["v"]
    problem = _problem(named, q, k, v)
    problem.rng_state = draw_rng_state(problem.q, problem.dropout_p)
    return _forward(named, problem)


def _attention_forward(named: Dict):
    return _forward(named, _problem(named, named["q"], named["k"], named["v"]))


def _packed_gradients(problem: Problem, packing: int) -> Tuple[List[Tensor], Tuple[Tensor, Tensor, Tensor]]:
    """Buffers to return and dq, dk, dv in them. packing: 0 none, 1 keys with values, 2 all three, along dim -3."""

    def packed(x: Tensor, parts: int) -> Tensor:
        return x.new_empty((*x.shape[:-2], parts, *x.shape[-2:]))

    q, k, v = problem.q, problem.k, problem.v
    if packing == 2:
        dqkv = packed(q, 3)
        return [dqkv], dqkv.unbind(-3)
    dq = q.new_empty(q.shape)
    if packing == 1:
        dkv = packed(k, 2)
        return [dq, dkv], (dq, *dkv.unbind(-3))
    grads = (dq, k.new_empty(k.shape), v.new_empty(v.shape))
    return list(grads), grads


def _attention_backward(named: Dict):
    problem = _problem(named, named["q"], named["k"], named["v"])
    buffers, grads = _packed_gradients(problem, named["packing"])
    saved = (_rows(named["dout"]), _rows(named["out"]), named["softmax_lse"])
    attention.backward(problem, *saved, grads, named["dlse"])
    return buffers


def _raw_forward(named: Dict):
    problem = _problem(named, named["q"], named["k"], named["v"])
    if named.get("block_table") is not None:
        return tuple(attend_pages(problem, named["block_table"], None, 0, named["return_softmax"]))
    return tuple(raw.run_forward(problem, None, named["return_softmax"]))


def _raw_backward(named: Dict):
    problem = _problem(named, named["q"], named["k"], named["v"])
    saved = (_rows(named["dout"]), _rows(named["out"]), named["softmax_lse"])
    return raw.run_backward(problem, *saved, named["dq"], named["dk"], named["dv"])[3]


def _with_kvcache(named: Dict):
    q, k, v = (_rows(named[name]) for name in ("q", "k", "v"))
    caches = (named["k_cache"], named["v_cache"])
    storage = ("cache_seqlens", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table")
    score = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "rotary_interleaved")
    return tuple(
        interface_fa.fwd_kvcache(
            q,
            *caches,
            k,
            v,
            *(named[name] for name in (*storage, "alibi_slopes")),
            None,
            *(named[name] for name in (*score, "num_splits")),
        )
    )


KERNELS: Dict[str, Callable[[Dict], object]] = {
    "attention": _attention,
    "attention_kvpacked": _attention,
    "attention_qkvpacked": _attention,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "_flash_attn_forward": _raw_forward,
    "_flash_attn_varlen_forward": _raw_forward,
    "_flash_attn_backward": _raw_backward,
    "_flash_attn_varlen_backward": _raw_backward,
    "attention_with_kvcache": _with_kvcache,
}


def _kernel(name: str, function: Callable[[Dict], object]):
    """function with the operator's arguments by the names in its schema."""
    arguments = getattr(torch.ops.flash_attn, name).default._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    names = [a.name for a in arguments]

    def kernel(*args, **kwargs):
        return function({**defaults, **dict(zip(names, args)), **kwargs})

    return kernel


def register() -> torch.library.Library:
    """Replaces the kernels of the GPU or, where Triton interprets, of the CPU. They stay while the result lives."""
    library = torch.library.Library("flash_attn", "IMPL", "CPU" if IS_INTERPRETED else "CUDA")
    with warnings.catch_warnings():
        # torch warns of a kernel that is registered a second time, which is the point here.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, function in KERNELS.items():
            library.impl(name, _kernel(name, function))
    return library
