"""Builds a case's tensors, calls the package on them, and compares with the oracle at the contract's tolerances."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Dict, List, Optional, Sequence, Tuple

import oracle
import philox
import torch
from cases import Case, describe
from devices import CPU, Device
from torch import Tensor

import flash_attn
from flash_attn import flash_attn_interface as interface

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
DROPOUT_SEED = 20

# Rounding of the arithmetic inside a kernel: fp16 and bf16 inputs are multiplied and summed in fp32.
UNIT_ROUNDOFF = {"fp16": 2.0**-24, "bf16": 2.0**-24, "fp32": 2.0**-24, "fp64": 2.0**-53}


@dataclass
class Inputs:
    """Tensors of a case. `leaves` are what the call gets and what gradients go to: [q, k, v], [q, kv] or [qkv].

    `scores` are the keyword arguments of the tables; `hidden` is what mask and bounds leave, bool (B|1,H|1,Sq,Sk).
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


def public_call(inputs: Inputs, **overrides):
    """The public function that the case's packing and layout select."""
    case = inputs.case
    kwargs = dict(
        dropout_p=case.dropout_p,
        softmax_scale=case.scale,
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        alibi_slopes=inputs.alibi_slopes,
        deterministic=case.deterministic,
        return_attn_probs=True,
        **inputs.scores,
    )
    kwargs.update(overrides)
    name = "flash_attn_" + ("varlen_" if case.varlen else "")
    name += {"separate": "func", "kv": "kvpacked_func", "qkv": "qkvpacked_func"}[case.packing]
    args: List = list(inputs.leaves)
    if case.varlen and case.packing == "qkv":
        args += [inputs.cu_seqlens_q, inputs.max_seqlens[0]]
    elif case.varlen:
        args += [inputs.cu_seqlens_q, inputs.cu_seqlens_k, *inputs.max_seqlens]
    return getattr(flash_attn, name)(*args, **kwargs)


def unpack_grads(case: Case, grads: Sequence[Tensor]) -> Tuple[Tensor, ...]:
    """dq, dk, dv and those of bias and sink, from the gradients of all leaves."""
    if case.packing == "kv":
        return (grads[0], *grads[1].unbind(-3), *grads[2:])
    return (*grads[0].unbind(-3), *grads[1:]) if case.packing == "qkv" else tuple(grads)


def gradients(inputs: Inputs, out: Tensor, lse: Tensor) -> Tuple[Tensor, ...]:
    """Of sum(out * dout) and, where the case has it, sum(lse * dlse)."""
    outputs, weights = [out], [inputs.dout]
    if inputs.dlse is not None:
        outputs.append(lse)
        weights.append(inputs.dlse.to(lse.dtype))
    return unpack_grads(inputs.case, torch.autograd.grad(outputs, inputs.all_leaves, weights))


@functools.cache
def rng_state_after(seed: int, device: str = "cpu") -> Tuple[int, int]:
    """(seed, offset) that the first call with dropout draws after torch.manual_seed(seed), from the raw function."""
    q = torch.zeros(1, 1, 1, 8, device=device)
    with torch.random.fork_rng(devices=[0] if device == "cuda" else []):
        torch.manual_seed(seed)
        state = interface._flash_attn_forward(q, q, q, 0.5, 1.0, False, -1, -1, 0.0, None, False)[3]
    return tuple(state.tolist())


def score_of(inputs: Inputs, keep: Optional[Tensor] = None) -> oracle.Score:
    case = inputs.case
    return oracle.Score(
        case.scale,
        case.causal,
        case.window,
        case.softcap,
        inputs.alibi_slopes,
        case.dropout_p,
        keep,
        inputs.scores.get("attn_bias"),
        inputs.kept,
        inputs.scores.get("learnable_sink"),
    )


def rebuilt_mask(case: Case, rng_state: Sequence[int]) -> Optional[Tensor]:
    if not case.dropout_p:
        return None
    Sq, Sk = (max(side) for side in zip(*case.lengths))
    return philox.keep_mask(rng_state, case.dropout_p, case.B, case.H, Sq, Sk)


def reference(inputs: Inputs, keep: Optional[Tensor], arith: oracle.Arithmetic, backward: bool = True) -> oracle.Result:
    case, dout = inputs.case, inputs.dout if backward else None
    qkv = (inputs.q, inputs.k, inputs.v)
    score = score_of(inputs, keep)
    if case.varlen:
        return oracle.run_varlen(*qkv, dout, list(case.lengths), score, arith, dlse=inputs.dlse)
    return oracle.run(*qkv, dout, score, arith, dlse=inputs.dlse)


def arithmetics(case: Case) -> Tuple[oracle.Arithmetic, oracle.Arithmetic]:
    """Those of the reference and of the same-precision evaluation that sets the tolerance."""
    return oracle.EXACT, oracle.same_precision(TORCH_DTYPES[case.dtype])


def error(x: Tensor, ref: Tensor) -> float:
    """Largest deviation; equal infinities agree."""
    if x.numel() == 0:
        return 0.0
    return (x.double() - ref.double()).masked_fill(x.double() == ref.double(), 0.0).abs().max().item()


def assert_within(name: str, got: Tensor, ref: Tensor, pt: Tensor, multiple: float, floor: float, context: str) -> None:
    """E(got) <= multiple * E_pt + floor (contract, section 8), and got is finite wherever ref is."""
    assert got.shape == ref.shape, f"{name} of {context}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert torch.equal(torch.isfinite(got), torch.isfinite(ref)), f"{name} of {context}: NaN or infinity"
    e, e_pt = error(got, ref), error(pt, ref)
    assert e <= multiple * e_pt + floor, (
        f"{name} of {context}: error {e:.3g} exceeds {multiple:g} * {e_pt:.3g} + {floor:.3g}"
    )


def rounding_floors(inputs: Inputs, ref: oracle.Result, pt: oracle.Result) -> Dict[str, float]:
    """What the arithmetic of a tiled kernel adds to the contract's multiples of E_pt, in units of its own rounding u.

    These matter to fp32 and fp64, and to calls where E_pt is 0: for fp16 and bf16, u is 2^-13 or 2^-16 of E_pt's scale.
    - An output carries about four roundings of its own size: of exp(s - m), of l, of 1 / l and of their product. Even
      with one visible key P is not exactly 1.
    - Backward recomputes P from the rounded LSE, so each P carries a relative error of about 2 u |LSE|, alike in a row.
    - With one visible key dS = dP - D vanishes and so does E_pt; a kernel sums dP = dO.V and D = rowsum(dO * O) in
      different orders, which leaves 2 sqrt(Dv) roundings in each dS, of which a row of dK sums one per query. Here O is
      what forward stored: V itself, or with dropout V / (1 - p) rounded to the inputs' dtype.
    - The gradient of a sink sums rows whose terms cancel. Scores are scaled by softmax_scale * log2(e) rounded once per
      call, which moves every LSE the same way, so this error stays where the terms do not. It is one number per head,
      rounded to the sink's dtype: so few that E_pt may by chance be far below what that rounding takes.
    """
    case, u = inputs.case, UNIT_ROUNDOFF[inputs.case.dtype]
    lse = ref.lse[torch.isfinite(ref.lse)]
    recomputed = 2 * u * (1 + largest(lse))
    floors = {"out": 4 * u * largest(ref.out)}
    names = ["dq", "dk", "dv", *(n for n in ("attn_bias", "learnable_sink") if n in inputs.scores)]
    floors.update({name: recomputed * largest(grad) for name, grad in zip(names, ref.grads)})
    if "learnable_sink" in floors:
        # A sum over the rows of a head, of all sequences, whose terms cancel, each with its row's error of P.
        delta = (inputs.dout.double() * ref.out).sum(-1).transpose(-1, -2)
        terms = (inputs.scores["learnable_sink"].detach().double()[:, None] - ref.lse).exp() * delta
        terms = torch.where(torch.isfinite(ref.lse), terms, 0.0)
        norms = terms.transpose(0, -2).flatten(1).norm(dim=1)
        floors["learnable_sink"] = max(floors["learnable_sink"], recomputed * largest(norms))
        dtype = inputs.scores["learnable_sink"].dtype
        floors["learnable_sink"] += torch.finfo(dtype).eps / 2 * largest(ref.grads[names.index("learnable_sink")])
    scale = case.D**-0.5 if case.scale is None else abs(case.scale)
    u_out = torch.finfo(inputs.dout.dtype).eps / 2 if case.dropout_p else u
    dS = 2 * u_out * case.head_dim_v**0.5 * scale * largest(inputs.dout) * largest(inputs.v) / (1 - case.dropout_p)
    queries = max(Sq for Sq, _ in case.lengths) * case.H / case.Hk
    for name, operand, summed, index in (("dq", inputs.k, 1, 0), ("dk", inputs.q, queries, 1)):
        # A gradient of the LSE or tables leave E_pt tiny rather than 0.
        if error(pt.grads[index], ref.grads[index]) == 0 or case.window == (0, 0):
            floors[name] += dS * largest(operand) * summed**0.5
    if "attn_bias" in floors and case.window == (0, 0):
        rows = case.B * case.H * max(Sq for Sq, _ in case.lengths)
        floors["attn_bias"] += dS / scale * (rows / inputs.scores["attn_bias"][..., 0].numel()) ** 0.5
    return floors


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def check(case: Case, slack: float = 1.0, device: Device = CPU) -> None:
    """Forward and backward of the public function against the oracle; `slack` multiplies the multiples of E_pt."""
    inputs = make_inputs(case)
    there = placed(inputs, device)
    rng_state = rng_state_after(DROPOUT_SEED, device.torch_name) if case.dropout_p else (0, 0)
    with device.scope():
        torch.manual_seed(DROPOUT_SEED)
        out, lse, s_dmask = public_call(there)
        grads = gradients(there, out, lse)
    out, lse, s_dmask = (x.to("cpu") for x in (out, lse, s_dmask))
    grads = tuple(x.to("cpu") for x in grads)
    keep = rebuilt_mask(case, rng_state) if case.dropout_p else None
    ref, pt = (reference(inputs, keep, arith) for arith in arithmetics(case))
    compare(case, inputs, out, lse, grads, ref, pt, slack)
    if case.dropout_p:
        check_s_dmask(inputs, s_dmask, keep)
    else:
        assert s_dmask.shape == (0,) and s_dmask.dtype == out.dtype


def compare(
    case: Case, inputs: Inputs, out, lse, grads, ref: oracle.Result, pt: oracle.Result, slack: float = 1.0
) -> None:
    """The contract's rules: out 2 * E_pt; gradients 3 * E_pt, 2 * E_pt of a packed qkv."""
    context = describe(case)
    dtype = TORCH_DTYPES[case.dtype]
    floors = rounding_floors(inputs, ref, pt)
    if case.dtype == "fp64":
        # The reference is fp64 as well, so both differences hold its rounding beside their own.
        slack *= 1.5
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads[:3]), context
    assert_within("out", out, ref.out, pt.out, 2 * slack, floors["out"], context)
    multiple = slack * (2 if case.packing == "qkv" else 3)
    assert len(grads) == len(ref.grads), context
    for name, got, expected, plain in zip(list(floors)[1:], grads, ref.grads, pt.grads):
        assert_within(name, got, expected, plain, multiple, floors[name], context)
    check_lse(case, inputs, lse, ref)


def check_lse(case: Case, inputs: Inputs, lse: Tensor, ref: oracle.Result) -> None:
    """The LSE is never rounded to the inputs' dtype, so it is held to fp32 arithmetic on the same inputs.

    The floor: a few roundings of the LSE itself, and of a score that is summed one product after the other.
    """
    wide = torch.float64 if case.dtype == "fp64" else torch.float32
    assert lse.dtype == wide
    pt = reference(inputs, None, oracle.same_precision(wide), backward=False)
    floor = 2 * UNIT_ROUNDOFF[case.dtype] * (largest(ref.lse[torch.isfinite(ref.lse)]) + case.D**0.5)
    assert torch.equal(torch.isposinf(lse), torch.isposinf(ref.lse)), f"LSE of rows without keys, {describe(case)}"
    assert_within("softmax_lse", lse, ref.lse, pt.lse, 2, floor, describe(case))


def check_s_dmask(inputs: Inputs, s_dmask: Tensor, keep: Tensor) -> None:
    """Shape, dtype and signs where the mask lets anything through; values are test_dropout.py's business."""
    case = inputs.case
    assert s_dmask.dtype == TORCH_DTYPES[case.dtype] and s_dmask.shape == keep.shape
    for b, (Sq, Sk) in enumerate(case.lengths):
        seen = oracle.visible(Sq, Sk, case.causal, case.window, max(k for _, k in case.lengths))
        values = s_dmask[b, :, :Sq, :Sk]
        for table, hides in ((inputs.kept, False), (inputs.scores.get("attn_bias"), -math.inf)):
            if table is not None:
                table = table.expand(case.B, case.H, *table.shape[2:])[b, :, :Sq, :Sk]
                seen = seen & (table != hides)
        seen = seen.expand(values.shape)
        told = seen & (values != 0)  # the sign of a weight that underflowed says nothing
        assert torch.equal(values[told] > 0, keep[b, :, :Sq, :Sk][told]), describe(case)
        if case.alibi is None and case.dtype != "fp16":
            assert told.sum() == seen.sum(), describe(case)
