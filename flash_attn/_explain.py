"""Which backend, kernel, tile and instruction set a call would use, and why."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import List, Optional

import torch

from flash_attn import _attention, _kvcache, _native, _operators, _raw


@dataclass(frozen=True)
class Explanation:
    """One pass of one call. `str()` of it is readable text."""

    kernel: str  # such as "cpu.forward.bfloat16.avx512_bf16"
    backend: str  # "cpu", "gpu" or "triton"
    instruction_set: str  # such as "avx512_bf16"
    tile: str  # such as "4 queries x 64 keys"
    reasons: List[str]
    backward: Optional[Explanation] = None  # of the forward, when gradients would be recorded

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {self.backend} backend, instruction set {self.instruction_set}, tile {self.tile}"]
        lines += [f"  because {reason}" for reason in self.reasons]
        return "\n".join(lines if self.backward is None else [*lines, str(self.backward)])


def explain(*args, **kwargs) -> Explanation:
    """What a call with these arguments would run; nothing is computed and no random number is drawn.

    Takes the arguments of `flash_attn_func`, or of `flash_attn_varlen_func` when cu_seqlens_q is among them; with one
    of the public functions as the first argument, that function's:

        explain(q, k, v, causal=True)
        explain(flash_attn_qkvpacked_func, qkv, dropout_p=0.1)

    Returns an `Explanation` of the forward, whose `backward` is that of the gradient if one would be recorded.
    Raises what the call would raise for malformed arguments.
    """
    if args and callable(args[0]):
        function, args = args[0], args[1:]
    else:
        function = _attention.flash_attn_varlen_func if _has_cu_seqlens(args, kwargs) else _attention.flash_attn_func
    public = [f for name, f in vars(_attention).items() if name.startswith("flash_attn_")]
    public.append(_kvcache.flash_attn_with_kvcache)
    if function not in public:
        raise TypeError(
            f"{function!r} is not one of flash_attn's functions; pass one of {', '.join(f.__name__ for f in public)}."
        )
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return (_explain_cache_call if function is _kvcache.flash_attn_with_kvcache else _explain_call)(bound.arguments)


def _has_cu_seqlens(args, kwargs) -> bool:
    """q, k, v are followed by cu_seqlens_q in the varlen function, by the number dropout_p in the dense one."""
    return "cu_seqlens_q" in kwargs or (len(args) > 3 and isinstance(args[3], torch.Tensor) and args[3].dim() == 1)


def _explainers():
    """What explains attention and attention over a cache, of the backend that is selected."""
    if _raw.USE_TRITON_ROCM:
        from flash_attn.flash_attn_triton_amd import explanation

        return explanation.explain, explanation.explain_cache
    native = _native.load()
    return native._explain, native._explain_kvcache


def _explain_cache_call(call) -> Explanation:
    """call: the bound arguments of flash_attn_with_kvcache, by name."""
    q, k_cache, v_cache = _unpacked(call)
    _kvcache.check_caches(k_cache, v_cache)
    names = ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table", "alibi_slopes")
    explained = _explainers()[1](
        q,
        k_cache,
        v_cache,
        call["k"],
        call["v"],
        _kvcache.lengths(call["cache_seqlens"], q),
        *(call[name] for name in names),
        None,
        _operators.scale_or_default(call["softmax_scale"], q),
        call["causal"],
        *_operators.window_bounds(call["window_size"]),
        call["softcap"],
        call["rotary_interleaved"],
        call["num_splits"],
    )
    return Explanation(**explained)


def _explain_call(call) -> Explanation:
    """call: the bound arguments of any other public function, by name."""
    q, k, v = _unpacked(call)
    left, right = _operators.window_bounds(call["window_size"])
    problem = (
        q,
        k,
        v,
        call.get("cu_seqlens_q", call.get("cu_seqlens")),
        call.get("cu_seqlens_k", call.get("cu_seqlens")),
        _operators.as_int(call.get("max_seqlen_q", call.get("max_seqlen", 0))),
        _operators.as_int(call.get("max_seqlen_k", call.get("max_seqlen", 0))),
        call.get("dropout_p", 0.0),
        _operators.scale_or_default(call["softmax_scale"], q),
        call["causal"],
        left,
        right,
        call["softcap"],
        call["alibi_slopes"],
        *(call.get(name) for name in ("attn_bias", "attn_mask", "learnable_sink", "key_begin", "key_end")),
        *(call.get(name) for name in ("block_table", "seqused_k", "leftpad_k")),
    )
    explain_pass = _explainers()[0]
    stored = any(call.get(name) is not None for name in ("block_table", "seqused_k", "leftpad_k"))
    differentiated = (x for x in (q, k, v, call.get("attn_bias"), call.get("learnable_sink")) if x is not None)
    records_gradient = not stored and torch.is_grad_enabled() and any(x.requires_grad for x in differentiated)
    return_softmax = bool(call.get("return_attn_probs")) and call.get("dropout_p", 0.0) > 0
    backward = Explanation(**explain_pass(*problem, return_softmax, True)) if records_gradient else None
    return Explanation(**explain_pass(*problem, return_softmax, False), backward=backward)


def _unpacked(call):
    """(q, k, v), as views where they came packed along dim -3."""
    names = ("q", "k_cache", "v_cache") if "k_cache" in call else ("q", "k", "v", "kv", "qkv")
    packed = {name: call[name] for name in names if name in call}
    tensors = []
    for name, x in packed.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {x!r}; it must be a tensor.")
        count = {"kv": 2, "qkv": 3}.get(name)
        if count is not None and (x.dim() < 4 or x.shape[-3] != count):
            raise RuntimeError(
                f"{name} has shape {tuple(x.shape)}; dim -3 must be {count}, one for each packed tensor."
            )
        tensors += [x] if count is None else x.unbind(-3)
    return tensors
