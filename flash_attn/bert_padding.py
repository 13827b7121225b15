"""Between padded batches (B,S,...) and packed ones (T,...) with cu_seqlens. Pure torch, differentiable.

Here T is the number of selected tokens, `indices` (T) int64 their positions in the flattened (B*S,...) batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat  # noqa: F401  clients import rearrange from here


class IndexFirstAxis(torch.autograd.Function):
    """input (N,...), indices (T) -> rows (T,...). Backward adds each row's gradient back to where it came from."""

    @staticmethod
    def forward(ctx, input, indices):
        _check_rows("input", input)
        ctx.save_for_backward(indices)
        ctx.first_axis_dim = input.shape[0]
        return input.index_select(0, indices)

    @staticmethod
    def backward(ctx, grad_rows):
        (indices,) = ctx.saved_tensors
        grad_input = grad_rows.new_zeros((ctx.first_axis_dim, *grad_rows.shape[1:]))
        return grad_input.index_add(0, indices, grad_rows), None


class IndexPutFirstAxis(torch.autograd.Function):
    """values (T,...), indices (T), first_axis_dim N -> (N,...): values at indices, zeros elsewhere."""

    @staticmethod
    def forward(ctx, values, indices, first_axis_dim):
        _check_rows("values", values)
        ctx.save_for_backward(indices)
        # index_copy takes no other integers, and transformers pads with int32 ones.
        return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.long(), values)

    @staticmethod
    def backward(ctx, grad_output):
        (indices,) = ctx.saved_tensors
        return grad_output.index_select(0, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """input (N,...), indices (T) -> (rows (T,...), input detached). The gradients of both results are added."""

    @staticmethod
    def forward(ctx, input, indices):
        _check_rows("input", input)
        ctx.save_for_backward(indices)
        return input.index_select(0, indices), input.detach()

    @staticmethod
    def backward(ctx, grad_rows, grad_residual):
        (indices,) = ctx.saved_tensors
        return grad_residual.index_add(0, indices, grad_rows), None


def _check_rows(name, rows):
    assert rows.dim() >= 2, f"{name} has shape {tuple(rows.shape)}; it must have at least two dims."


index_first_axis = IndexFirstAxis.apply
index_put_first_axis = IndexPutFirstAxis.apply
index_first_axis_residual = IndexFirstAxisResidual.apply


def _check_mask(name, mask, hidden_states):
    assert mask.shape == hidden_states.shape[:2], (
        f"{name} has shape {tuple(mask.shape)} and hidden_states {tuple(hidden_states.shape)}; it must be (B,S)."
    )


def _cu_seqlens(lengths):
    """lengths (B) int32 -> (B+1) int32: 0, then the running sum."""
    return F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Packs the tokens that a mask selects.

    hidden_states: (B,S,...).
    attention_mask: (B,S), bool or int, 1 is a token in use.
    unused_mask: (B,S), bool or int: tokens to keep in the packed batch although they are not in use.

    Returns (hidden (T,...), indices (T) int64, cu_seqlens (B+1) int32, max_seqlen_in_batch int, seqused (B) int32);
    T, cu_seqlens and the maximum count both masks, seqused counts attention_mask only.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
    kept = attention_mask if unused_mask is None else (attention_mask != 0) | (unused_mask != 0)
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cu_seqlens(lengths),
        lengths.max().item(),
        attention_mask.sum(dim=-1, dtype=torch.int32),
    )


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """Packs rows that hold several sequences each, keeping those sequences apart.

    hidden_states: (B,S,...).
    attention_mask_in_length: (B,S) int. Each non-zero entry is the length of one sequence; a row's sequences stand one
        after another from its start: [2, 3, 0, 0, 0, 0] is tokens 0-1, tokens 2-4 and one of padding.

    Returns (hidden (T,...), indices (T) int64, cu_seqlens (sequences + 1) int32, max_seqlen_in_batch int).
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    S = hidden_states.shape[1]
    tokens_per_row = attention_mask_in_length.sum(dim=-1, keepdim=True)
    assert (tokens_per_row <= S).all(), (
        f"attention_mask_in_length has rows of {tokens_per_row.max().item()} tokens; they must fit in the {S} of "
        "hidden_states."
    )
    positions = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    indices = torch.nonzero((positions < tokens_per_row).flatten(), as_tuple=False).flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0].to(torch.int32)
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        _cu_seqlens(lengths),
        lengths.max().item(),
    )


def pad_input(hidden_states, indices, batch, seqlen):
    """hidden_states (T,...), indices (T) -> (batch,seqlen,...), zeros elsewhere. Undoes unpad_input."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
