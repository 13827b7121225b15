"""The raw functions: one kernel launch each, no autograd. Ring-attention and context-parallel libraries call these.

Names, parameters, order and defaults are upstream's; each is also the operator `torch.ops.flash_attn.<name>`.
Wider than upstream: fp32 and fp64 too, any D and Dv from 1 to 576 without padding. Letters as in `flash_attn_func`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Callable, Optional, Tuple

import torch

from flash_attn import _backend_choice, _native
from flash_attn._operators import is_compiling

USE_TRITON_ROCM = _backend_choice.use_triton()

# The module with upstream's five positional functions. Loading the native one registers the operators used below.
flash_attn_gpu = _native.load()
if USE_TRITON_ROCM:
    from flash_attn.flash_attn_triton_amd import interface_fa, operators

    flash_attn_gpu = interface_fa
    _triton_kernels = operators.register()  # registered while this lives

MAX_HEAD_DIM = 576

_wrapped_flash_attn_forward = torch.ops.flash_attn._flash_attn_forward
_wrapped_flash_attn_varlen_forward = torch.ops.flash_attn._flash_attn_varlen_forward
_wrapped_flash_attn_backward = torch.ops.flash_attn._flash_attn_backward
_wrapped_flash_attn_varlen_backward = torch.ops.flash_attn._flash_attn_varlen_backward


def maybe_contiguous(x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """x itself when its last stride is 1 (or x is None), else a contiguous copy."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """The smallest multiple of m that is not below x."""
    return (x + m - 1) // m * m


def _get_block_size_n(device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Key columns that share one row maximum in S_dmask.

    Ours holds exp(score - maximum of the whole row) whatever the arguments, so one block is longer than any row.
    Accepts head_dim to 576, where upstream stops at 256.
    """
    assert head_dim <= MAX_HEAD_DIM, f"head_dim is {head_dim}; it must be at most {MAX_HEAD_DIM}."
    return 2**31 - 1


def _passthrough_decorator(name, fn=None, /, **options):
    """torch.library.custom_op / register_fake on a torch that lacks them: returns the function unchanged."""
    return (lambda function: function) if fn is None else fn


# Upstream's names for the decorators (torch >= 2.4). The operators here are registered from C++ and do not use them.
_torch_custom_op_wrapper = getattr(torch.library, "custom_op", _passthrough_decorator)
_torch_register_fake_wrapper = getattr(torch.library, "register_fake", _passthrough_decorator)


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    return_softmax: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense forward.

    q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv) -> out (B,Sq,H,Dv), softmax_lse (B,H,Sq), S_dmask, rng_state (2) int64.
    softmax_scale must be a number. S_dmask is (B,H,Sq,Sk) with return_softmax, which needs dropout_p > 0, else (0).
    rng_state goes to the backward; it is zeros without dropout.
    """
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _wrapped_flash_attn_forward.default(q, k, v, *score, return_softmax)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed forward.

    q (Tq,H,D), k (Tk,Hk,D), v (Tk,Hk,Dv) -> out (Tq,H,Dv), softmax_lse (H,Tq), S_dmask, rng_state (2) int64.
    S_dmask is (B,H,max_seqlen_q,max_seqlen_k) with return_softmax, else (0). block_table, leftpad_k, seqused_k: see
    `flash_attn_varlen_func`. Outputs are always fully written, so zero_tensors changes nothing.
    """
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    cache = (block_table, leftpad_k, seqused_k)
    return _wrapped_flash_attn_varlen_forward.default(q, k, v, *lengths, *score, return_softmax, *cache, zero_tensors)


def _backward(op, inputs, gradients, *rest):
    """The operator `op`, which writes to `gradients`."""
    if not is_compiling():
        return op(*inputs, *gradients, *rest)
    # Inductor 2.13 takes a view's symbolic offset for 0 where a custom operator writes, but not where torch copies.
    fresh = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in gradients]
    softmax_d = op(*inputs, *fresh, *rest)
    for x, computed in zip(gradients, fresh):
        if x is not None:
            x.copy_(computed)
    return softmax_d


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Dense backward: writes dq, dk, dv in place (overwrites; any strides with last stride 1).

    dout and out are shaped as the forward's out, softmax_lse (B,H,Sq) is the forward's, or one merged from several.
    Returns softmax_d = rowsum(dout * out), (B,H,Sq). With dropout, rng_state must be the forward's.
    """
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    inputs, gradients = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    return _backward(_wrapped_flash_attn_backward.default, inputs, gradients, *score, deterministic, rng_state)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Packed backward: as `_flash_attn_backward`, with softmax_lse and the returned softmax_d (H,Tq)."""
    score = (dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    inputs, gradients = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    op = _wrapped_flash_attn_varlen_backward.default
    return _backward(op, inputs, gradients, *lengths, *score, deterministic, rng_state, zero_tensors)


def _fake_of(function: Callable) -> Callable:
    """The shape function of a raw function: same parameters, results of the right shape, strides, dtype and device
    with undefined contents; no argument is read or written. The shapes come from the operator's own Meta kernel."""
    signature = inspect.signature(function)
    op = getattr(torch.ops.flash_attn, function.__name__).default

    def on_meta(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    @functools.wraps(function)
    def fake(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        with torch.inference_mode():  # torch 1.13 has no autograd fallthrough for meta tensors
            shapes = op(*[on_meta(x) if isinstance(x, torch.Tensor) else x for x in bound.args])

        def empty(meta):
            return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=bound.args[0].device)

        return empty(shapes) if isinstance(shapes, torch.Tensor) else tuple(empty(meta) for meta in shapes)

    fake.__name__ = fake.__qualname__ = function.__name__ + "_fake"
    return fake


_flash_attn_forward_fake = _fake_of(_flash_attn_forward)
_flash_attn_varlen_forward_fake = _fake_of(_flash_attn_varlen_forward)
_flash_attn_backward_fake = _fake_of(_flash_attn_backward)
_flash_attn_varlen_backward_fake = _fake_of(_flash_attn_varlen_backward)
