"""Tensors of a case: what a call gets, and what the oracle reads."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Dict, List, Optional, Sequence, Tuple

import torch
from cases import Case
from devices import Device
from torch import Tensor

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass
class Inputs:
    """Tensors of a case. `leaves` are what the call gets and what gradients go to: [q, k, v], [q, kv] or [qkv].

    `scores` are the keyword arguments of the tables; `kept` is what mask and bounds leave, bool (B|1,H|1,Sq,Sk).
    """

    case: Case
    leaves: List[Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    alibi_slopes: Optional[Tensor]
    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_k: Optional[Tensor] = None
    scores: Dict[str, Tensor] = field(default_factory=dict)
    kept: Optional[Tensor] = None
    dlse: Optional[Tensor] = None

    @property
    def all_leaves(self) -> List[Tensor]:
        return [*self.leaves, *(x for x in self.scores.values() if x.requires_grad)]

    @property
    def max_seqlens(self) -> Tuple[int, int]:
        return tuple(max(side) for side in zip(*self.case.lengths))


def strided(x: Tensor, strides: str) -> Tensor:
    """A leaf with the values of x (..., rows, heads, features) and the given layout in memory."""
    if strides == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if strides == "sliced":
        # A window into a larger buffer in which every other dimension has neighbours.
        sizes = [n + 2 for n in x.shape[:-1]] + [x.shape[-1] + 8]
        whole = torch.full(sizes, math.nan, dtype=x.dtype, device=x.device)
        window = whole[tuple(slice(1, n + 1) for n in x.shape[:-1])][..., : x.shape[-1]]
        window.copy_(x)
        return window
    assert strides == "contiguous", strides
    return x.contiguous()


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[case.dtype]

    def randn(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    Sq, Sk = case.lengths[0]
    if case.varlen:
        rows, keys = ((sum(side) + extra,) for side, extra in zip(zip(*case.lengths), case.slack))
    else:
        rows, keys = (case.B, Sq), (case.B, Sk)
    q = randn(*rows, case.H, case.D)
    if case.softcap:
        # Scores of the cap's size, where it bends most.
        q *= case.softcap / (1.0 if case.scale is None else case.scale * case.D**0.5)
    k, v = randn(*keys, case.Hk, case.D), randn(*keys, case.Hk, case.head_dim_v)
    dout = strided(randn(*rows, case.H, case.head_dim_v), case.strides)
    if case.packing == "separate":
        leaves = [strided(x, case.strides) for x in (q, k, v)]
    elif case.packing == "kv":
        leaves = [strided(x, case.strides) for x in (q, torch.stack((k, v), dim=-3))]
    else:
        leaves = [strided(torch.stack((q, k, v), dim=-3), case.strides)]
    slopes = None
    if case.alibi:
        # Cubed, so that some heads look far back and others only at their neighbours.
        slopes = 0.3 * torch.rand((case.B, case.H) if case.alibi == "BH" else (case.H,), generator=g) ** 3
    cu = [cumulative(side) for side in zip(*case.lengths)] if case.varlen else [None, None]
    inputs = Inputs(case, [x.requires_grad_() for x in leaves], q, k, v, dout, slopes, *cu)
    add_score_tables(inputs, g)
    return inputs


def add_score_tables(inputs: Inputs, g: torch.Generator) -> None:
    """bias, mask, bounds and sink of the case, and the gradient of the LSE."""
    case = inputs.case
    (Sq, Sk), B, H = inputs.max_seqlens, case.B, case.H
    if case.bias is not None:
        shape = [n if letter in case.bias else 1 for n, letter in ((B, "B"), (H, "H"), (Sq, "Q"))] + [Sk]
        bias = torch.randn(shape, generator=g).masked_fill(torch.rand(shape, generator=g) < 0.05, -math.inf)
        inputs.scores["attn_bias"] = bias.to(TORCH_DTYPES[case.bias_dtype or case.dtype]).requires_grad_()
    if case.sink:
        inputs.scores["learnable_sink"] = torch.randn(H, generator=g).to(TORCH_DTYPES[case.dtype]).requires_grad_()
    if case.mask is not None:
        shape = {"padding": (B, Sk), "3-D": (B, Sq, Sk), "4-D": (B, H, Sq, Sk), "heads": (1, H, 1, Sk)}[case.mask]
        mask = inputs.scores["attn_mask"] = torch.rand(shape, generator=g) < 0.7
        inputs.kept = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
    if case.bounds is not None:
        begin, end = key_bounds(case, g)
        inputs.scores["key_begin"], inputs.scores["key_end"] = (
            torch.cat([x[b, ..., :n] for b, (n, _) in enumerate(case.lengths)], -1) if case.varlen else x
            for x in (begin, end)
        )
        if case.varlen and sum(n for n, _ in case.lengths) < len(inputs.q):
            for name in ("key_begin", "key_end"):
                x = inputs.scores[name]
                inputs.scores[name] = torch.cat((x, x.new_zeros(*x.shape[:-1], len(inputs.q) - x.shape[-1])), -1)
        j = torch.arange(Sk)
        begin, end = (x[:, None, :, None] if x.dim() == 2 else x[..., None] for x in (begin, end))
        kept = (begin <= j) & (j < end)
        inputs.kept = kept if inputs.kept is None else inputs.kept & kept
    if case.lse_gradient:
        rows = (case.H, inputs.q.shape[0]) if case.varlen else (B, H, Sq)
        inputs.dlse = torch.randn(rows, generator=g)


def key_bounds(case: Case, g: torch.Generator) -> Tuple[Tensor, Tensor]:
    """key_begin and key_end, int32 (B,Sq) or for "heads" (B,H,Sq): what documents and prefixes use, or anything."""
    Sq, Sk = (max(side) for side in zip(*case.lengths))
    if case.bounds == "documents":
        begin = torch.arange(Sq).expand(case.B, Sq) // 50 * 50
        return begin.int(), (begin + 50 + torch.arange(case.B)[:, None]).int()
    if case.bounds == "prefix":
        return torch.zeros(1, Sq).int().expand(case.B, Sq), torch.arange(1, Sq + 1).clamp(min=20).int().expand(
            case.B, Sq
        )
    begin = torch.randint(-5, Sk + 1, (case.B, case.H, Sq), generator=g)
    return begin.int(), (begin + torch.randint(-20, Sk + 1, begin.shape, generator=g)).int()


def placed(inputs: Inputs, device: Device) -> Inputs:
    """The same with what a call gets in the device's memory; q, k and v stay where the oracle is."""
    if device.torch_name == "cpu":
        return inputs

    def move(x: Optional[Tensor]) -> Optional[Tensor]:
        return None if x is None else x.to(device.torch_name)

    layout = inputs.case.strides
    return replace(
        inputs,
        leaves=[strided(move(x.detach()), layout).requires_grad_() for x in inputs.leaves],
        dout=strided(move(inputs.dout), layout),
        alibi_slopes=move(inputs.alibi_slopes),
        cu_seqlens_q=move(inputs.cu_seqlens_q),
        cu_seqlens_k=move(inputs.cu_seqlens_k),
        scores={name: move(x.detach()).requires_grad_(x.requires_grad) for name, x in inputs.scores.items()},
        dlse=move(inputs.dlse),
    )
