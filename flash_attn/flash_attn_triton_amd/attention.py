"""Forward and backward pass of one `Problem`: results are allocated, kernels launched."""

from __future__ import annotations

import math
from typing import Optional, Tuple

import torch
import triton
from torch import Tensor

from flash_attn.flash_attn_triton_amd import backward as backward_kernels
from flash_attn.flash_attn_triton_amd.dropout import signed_weights
from flash_attn.flash_attn_triton_amd.forward import attention_forward
from flash_attn.flash_attn_triton_amd.launch import head_blocks, head_dims, launch, target_of
from flash_attn.flash_attn_triton_amd.problem import Problem, check, check_shape, head_block, strides_of
from flash_attn.flash_attn_triton_amd.tuning import Kind, loads_again


def kind_of(problem: Problem, kernel: str) -> Kind:
    q, v = problem.q, problem.v
    return Kind(kernel, q.dtype, *head_blocks(q, v), problem.window != (None, None), problem.dropout_p > 0)


def _rows_grid(problem: Problem):
    """A program for each tile of queries, each head, each sequence."""
    longest_q, H, B = problem.longest[0], problem.q.shape[-2], problem.batch
    return lambda tiles: (triton.cdiv(longest_q, tiles["BLOCK_M"]), H, B)


def forward(
    problem: Problem, out: Optional[Tensor] = None, return_softmax: bool = False
) -> Tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask). Where the problem has dropout, its rng_state is drawn."""
    problem.validate().check_contents()
    q, k, v = problem.q, problem.k, problem.v
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    check_shape("out", out, q, problem.letters("H", "Dv"), shape, q.dtype)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
    if problem.packed:
        # Rows past the last sequence belong to no program.
        out.zero_()
        lse.fill_(math.inf)
    launch(
        attention_forward,
        kind_of(problem, "forward"),
        q,
        _rows_grid(problem),
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        q_strides=strides_of(q),
        k_strides=strides_of(k),
        v_strides=strides_of(v),
        out_strides=strides_of(out),
        lse_strides=problem.lse_strides(lse),
        used_k=problem.seqused_k,
        leftpad_k=problem.leftpad_k,
        **problem.lengths(),
        **problem.score_arguments(),
        **problem.dropout_arguments(),
        **head_dims(q, v),
    )
    return out, lse, _s_dmask(problem) if return_softmax else q.new_empty((0,))


def _s_dmask(problem: Problem) -> Tensor:
    q, k = problem.q, problem.k
    weights = torch.zeros((problem.batch, q.shape[-2], *problem.longest), dtype=q.dtype, device=q.device)
    dropout = problem.dropout_arguments()
    launch(
        signed_weights,
        kind_of(problem, "signed_weights"),
        q,
        _rows_grid(problem),
        q=q,
        k=k,
        weights=weights,
        q_strides=strides_of(q),
        k_strides=strides_of(k),
        weights_strides=(weights.stride(0), weights.stride(2), weights.stride(1)),
        used_k=problem.seqused_k,
        leftpad_k=problem.leftpad_k,
        rng_state=dropout["rng_state"],
        threshold=dropout["threshold"],
        **problem.lengths(),
        **problem.score_arguments(),
        D=q.shape[-1],
        BLOCK_D=head_block(q.shape[-1]),
    )
    return weights


def backward(
    problem: Problem,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Tuple[Tensor, Tensor, Tensor],
    dlse: Optional[Tensor] = None,
) -> Tensor:
    """Writes dq, dk and dv; returns softmax_d = rowsum(dout * out) - dlse, shaped as the lse."""
    problem.validate().check_contents()
    q, k, v = problem.q, problem.k, problem.v
    for name, x in (("out", out), ("dout", dout)):
        check_shape(name, x, q, problem.letters("H", "Dv"), (*q.shape[:-1], v.shape[-1]), q.dtype)
    for name, x, of in zip(("dq", "dk", "dv"), grads, (q, k, v)):
        check_shape(name, x, q, f"of {name[1]}", of.shape, q.dtype)
    check_shape("softmax_lse", lse, q, problem.lse_letters, problem.lse_shape, torch.float32)
    check(
        problem.dropout_p == 0 or problem.rng_state is not None,
        f"rng_state is None and dropout_p = {problem.dropout_p}; pass the int64 (2,) that the forward pass returned",
    )
    lse, delta = lse.contiguous(), torch.zeros(lse.shape, dtype=lse.dtype, device=lse.device)
    if dlse is not None:
        check_shape("dlse", dlse, q, problem.lse_letters, problem.lse_shape, torch.float32)
        dlse = dlse.contiguous()
    if problem.packed or q.numel() == 0 or k.numel() == 0:
        for x in grads:
            x.zero_()
    _row_sums(problem, dout, out, dlse, delta)
    _gradients(problem, dout, lse, delta, grads)
    return delta


def _row_sums(problem: Problem, dout: Tensor, out: Tensor, dlse: Optional[Tensor], delta: Tensor) -> None:
    launch(
        backward_kernels.row_sums,
        kind_of(problem, "row_sums"),
        problem.q,
        _rows_grid(problem),
        out=out,
        dout=dout,
        dlse=dlse,
        delta=delta,
        out_strides=strides_of(out),
        dout_strides=strides_of(dout),
        lse_strides=problem.lse_strides(delta),
        cu_seqlens_q=problem.cu_seqlens_q,
        longest_q=problem.longest[0],
        DV=out.shape[-1],
        BLOCK_DV=head_block(out.shape[-1]),
    )


def _gradients(problem: Problem, dout: Tensor, lse: Tensor, delta: Tensor, grads) -> None:
    q, k, v = problem.q, problem.k, problem.v
    dq, dk, dv = grads
    shared = dict(
        q=q,
        k=k,
        v=v,
        dout=dout,
        lse=lse,
        delta=delta,
        q_strides=strides_of(q),
        k_strides=strides_of(k),
        v_strides=strides_of(v),
        dout_strides=strides_of(dout),
        lse_strides=problem.lse_strides(lse),
        **problem.lengths(),
        **problem.score_arguments(),
        **problem.dropout_arguments(),
        **head_dims(q, v),
        AGAIN=loads_again(kind_of(problem, "key_gradients"), target_of(q.device)),
    )
    longest_k, Hk, B = problem.longest[1], k.shape[-2], problem.batch
    launch(
        backward_kernels.key_gradients,
        kind_of(problem, "key_gradients"),
        q,
        lambda tiles: (triton.cdiv(longest_k, tiles["BLOCK_N"]), Hk, B),
        dk=dk,
        dv=dv,
        dk_strides=strides_of(dk),
        dv_strides=strides_of(dv),
        **shared,
    )
    launch(
        backward_kernels.query_gradients,
        kind_of(problem, "query_gradients"),
        q,
        _rows_grid(problem),
        dq=dq,
        dq_strides=strides_of(dq),
        **shared,
    )
