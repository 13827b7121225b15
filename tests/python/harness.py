"""Calls the package on a case and compares with the oracle at the contract's tolerances."""

from __future__ import annotations

import functools
import math
from typing import List, Optional, Sequence, Tuple

import oracle
import philox
import torch
from cases import Case, describe
from devices import CPU, Device
from tensors import TORCH_DTYPES, Inputs, make_inputs, placed
from tolerances import UNIT_ROUNDOFF, Deviation, judge, largest, measured, rounding_floors, summed_score
from torch import Tensor

import flash_attn
from flash_attn import flash_attn_interface as interface

DROPOUT_SEED = 20


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


def check(case: Case, slack: float = 1.0, device: Device = CPU, draws: int = 1, few_keys: bool = False) -> None:
    """Forward and backward of the public function against the oracle; `slack` multiplies the multiples of E_pt.

    With several draws, whose numbers differ, the largest errors of all are compared. few_keys: see rounding_floors.
    """
    judge([deviations(case, slack, device, seed, few_keys) for seed in range(draws)], describe(case))


def deviations(case: Case, slack: float, device: Device, seed: int, few_keys: bool) -> List[Deviation]:
    inputs = make_inputs(case, seed)
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
    if case.dropout_p:
        check_s_dmask(inputs, s_dmask, keep)
    else:
        assert s_dmask.shape == (0,) and s_dmask.dtype == out.dtype
    return deviations_of(inputs, out, lse, grads, ref, pt, slack, few_keys)


def compare(inputs: Inputs, out, lse, grads, ref: oracle.Result, pt: oracle.Result) -> None:
    """Results of one call against the oracle's."""
    judge([deviations_of(inputs, out, lse, grads, ref, pt)], describe(inputs.case))


def deviations_of(
    inputs: Inputs, out, lse, grads, ref: oracle.Result, pt: oracle.Result, slack: float = 1.0, few_keys: bool = False
) -> List[Deviation]:
    """The contract's rules: out 2 * E_pt; gradients 3 * E_pt, 2 * E_pt of a packed qkv."""
    case = inputs.case
    context = describe(case)
    dtype = TORCH_DTYPES[case.dtype]
    floors = rounding_floors(inputs, ref, pt, few_keys)
    if case.dtype == "fp64":
        # The reference is fp64 as well, so both differences hold its rounding beside their own.
        slack *= 1.5
    assert out.dtype == dtype and all(g.dtype == dtype for g in grads[:3]), context
    found = [measured("out", out, ref.out, pt.out, 2 * slack, floors["out"], context)]
    multiple = slack * (2 if case.packing == "qkv" else 3)
    assert len(grads) == len(ref.grads), context
    for name, got, expected, plain in zip(list(floors)[1:], grads, ref.grads, pt.grads):
        found.append(measured(name, got, expected, plain, multiple, floors[name], context))
    return [*found, deviation_of_lse(inputs, lse, ref, few_keys)]


def deviation_of_lse(inputs: Inputs, lse: Tensor, ref: oracle.Result, few_keys: bool) -> Deviation:
    """The LSE is never rounded to the inputs' dtype, so it is held to fp32 arithmetic on the same inputs.

    The floor: a few roundings of the LSE itself, and of a score that is summed one product after the other. Of few
    keys, E_pt does not have those of a score of any size, nor in fp64 those of the reference.
    """
    case, context = inputs.case, describe(inputs.case)
    wide = torch.float64 if case.dtype == "fp64" else torch.float32
    assert lse.dtype == wide
    pt = reference(inputs, None, oracle.same_precision(wide), backward=False)
    score = summed_score(case) if few_keys else case.D**0.5
    floor = 2 * UNIT_ROUNDOFF[case.dtype] * (largest(ref.lse[torch.isfinite(ref.lse)]) + score)
    if few_keys and case.dtype == "fp64":
        floor *= 2
    assert torch.equal(torch.isposinf(lse), torch.isposinf(ref.lse)), f"LSE of rows without keys, {context}"
    return measured("softmax_lse", lse, ref.lse, pt.lse, 2, floor, context)


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
