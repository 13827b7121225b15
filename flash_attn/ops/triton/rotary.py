"""Rotary position embedding: pairs of channels are turned by an angle that grows with the position.

RoFormer (Su et al. 2021, https://arxiv.org/abs/2104.09864). Letters: B batch, S length, T tokens of a packed batch, H
heads, D head dim, R <= D channels that turn, P rows of the tables.
"""

from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor

from flash_attn import _native
from flash_attn._operators import Operator, is_compiling

_native.load()  # registers the operators rotate and rotate_
_out_of_place, _in_place = Operator("rotate"), Operator("rotate_")


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: Union[int, Tensor] = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
    interleaved=False,
    inplace=False,
    conjugate=False,
) -> Tensor:
    """Rotates the first R channels of x by the angles of its positions; the others pass through.

    Differentiable in x, unless x is a view and inplace: `flash_attn.layers.rotary.apply_rotary_emb` serves there too.

    x: (B,S,H,D), or (T,H,D) with cu_seqlens; any floating dtype, any strides. A pair (a, b) of channels becomes
        (a cos - b sin, a sin + b cos), computed in fp32 (fp64 for fp64).
    cos, sin: (P, R/2), any floating dtype.
    seqlen_offsets: int, or int32 or int64 (B): row s of sequence b is at position s + offset. Positions without a row
        in the tables, which only a tensor can ask for, are not rotated.
    cu_seqlens: int32 or int64 (B+1): sequence b is rows cu_seqlens[b] to cu_seqlens[b+1] - 1; rows behind the last one
        are not rotated.
    max_seqlen: int, needed with cu_seqlens: at least the longest sequence.
    interleaved: pairs are channels (0,1), (2,3), ...; otherwise (i, i + R/2).
    inplace: write into x and return it.
    conjugate: rotate the other way.

    Raises AssertionError when shapes, dtypes or lengths do not fit together, and RuntimeError, on the CPU alone, when
    the numbers in cu_seqlens do not describe rows of x: other devices would have to be waited for.
    """
    offset, offsets = _split_offset(seqlen_offsets)
    _check(x, cos, sin, offset, offsets, cu_seqlens, max_seqlen)
    arguments = (cos, sin, offset, offsets, cu_seqlens, bool(interleaved), bool(conjugate), max_seqlen)
    if not inplace:
        return _out_of_place.call(x, *arguments)
    if is_compiling():
        # Inductor 2.13 drops one of two custom operators that write to views of one tensor; its own copies are safe.
        # An exported graph would lose what is written through .data.
        (x if _is_exporting() else x.data).copy_(_out_of_place.call(x, *arguments))
    else:
        # A view is written to behind autograd's back: otherwise the other views that split or unbind gave could not be
        # used any more, each complaining that its base was modified.
        _in_place.call(x.data if x._is_view() else x, *arguments)
    return x


# torch >= 2.7. Before, nothing tells an export from a compilation; both then write to x itself, as an export has to.
_is_exporting = getattr(getattr(torch, "compiler", None), "is_exporting", lambda: True)


def _split_offset(seqlen_offsets):
    """(int, None) or (0, tensor): operators have no argument that is either."""
    return (0, seqlen_offsets) if isinstance(seqlen_offsets, Tensor) else (seqlen_offsets, None)


def _check(x, cos, sin, offset, offsets, cu_seqlens, max_seqlen):
    dims, layout = (4, "(B,S,H,D)") if cu_seqlens is None else (3, "(T,H,D), as cu_seqlens is given")
    assert x.dim() == dims, f"x has shape {tuple(x.shape)}; it must be {layout}."
    assert x.dtype.is_floating_point, f"x is {x.dtype}; it must have a floating-point dtype."
    assert cos.dim() == 2 and cos.shape == sin.shape, (
        f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}; both must be (positions, rotary_dim / 2)."
    )
    positions, pairs = cos.shape
    assert 2 * pairs <= x.shape[-1], (
        f"cos has {pairs} columns, which turn {2 * pairs} channels, and x has head dim {x.shape[-1]}; shorten them."
    )
    if cu_seqlens is None:
        batch, length, name = x.shape[0], x.shape[1], "the length of x"
    else:
        assert max_seqlen is not None, "cu_seqlens was given without max_seqlen; pass the longest sequence's length."
        assert cu_seqlens.dim() == 1 and not cu_seqlens.dtype.is_floating_point, (
            f"cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; it must be int32 of shape (B+1,)."
        )
        batch, length, name = cu_seqlens.shape[0] - 1, max_seqlen, "max_seqlen"
    assert positions >= length, f"cos has {positions} rows and {name} is {length}; build tables at least that long."
    if offsets is None:
        assert 0 <= offset and offset + length <= positions, (
            f"seqlen_offsets is {offset}, {name} is {length} and cos has {positions} rows; give an offset of at least "
            "0 with which the rows suffice."
        )
    else:
        assert offsets.shape == (batch,), f"seqlen_offsets has shape {tuple(offsets.shape)}; it must be ({batch},)."
        assert offsets.dtype in (torch.int32, torch.int64), (
            f"seqlen_offsets is {offsets.dtype}; it must be int32 or int64."
        )


def _positions(rows, offset, offsets, cu_seqlens):
    """The position of every row, -1 for one behind the last sequence: (1,S), (B,S) or (T)."""
    if cu_seqlens is None:
        return rows[None] + offset + (0 if offsets is None else offsets[:, None])
    sequence = torch.searchsorted(cu_seqlens.to(rows.dtype), rows, right=True) - 1
    sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
    positions = rows - cu_seqlens[sequence] + offset + (0 if offsets is None else offsets[sequence])
    return torch.where(rows < cu_seqlens[-1], positions, -1)


def _angles(x, cos, sin, offset, offsets, cu_seqlens, dtype):
    """cos and sin in `dtype` for every row of x, with a dim for the heads: (1,S,1,R/2), (B,S,1,R/2) or (T,1,R/2)."""
    rows = torch.arange(x.shape[-3], device=x.device)
    positions = _positions(rows, offset, offsets, cu_seqlens)
    inside = ((positions >= 0) & (positions < cos.shape[0]))[..., None, None]
    nearest = positions.clamp(0, cos.shape[0] - 1)
    ones = torch.ones((), dtype=dtype, device=x.device)
    return (
        torch.where(inside, cos[nearest][..., None, :].to(dtype), ones),
        torch.where(inside, sin[nearest][..., None, :].to(dtype), 0 * ones),
    )


def _rotated(x, cos, sin, offset, offsets, cu_seqlens, interleaved, conjugate):
    """The first R channels of x after rotation, contiguous."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = _angles(x, cos, sin, offset, offsets, cu_seqlens, dtype)
    sin = -sin if conjugate else sin
    turning = x[..., : 2 * cos.shape[-1]].to(dtype)
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    pairs = (a * cos - b * sin, a * sin + b * cos)
    return (torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)).to(x.dtype)


# ---- The operators on devices other than the CPU, whose kernel is the core's: torch's arithmetic.


def _rotate_(x, cos, sin, offset, offsets, cu_seqlens, interleaved, conjugate, max_seqlen=None):
    x[..., : 2 * cos.shape[-1]] = _rotated(x, cos, sin, offset, offsets, cu_seqlens, interleaved, conjugate)


def _rotate(x, *arguments):
    out = x.clone(memory_format=torch.contiguous_format)
    _rotate_(out, *arguments)
    return out


_kernels = torch.library.Library("flash_attn", "IMPL")
_kernels.impl("rotate", _rotate, "CompositeExplicitAutograd")
_kernels.impl("rotate_", _rotate_, "CompositeExplicitAutograd")
