"""How far a result may be from the oracle: the contract's multiples of E_pt, and what rounding adds to them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Dict, Sequence

import oracle
import torch
from cases import Case
from tensors import Inputs
from torch import Tensor

# Rounding of the arithmetic inside a kernel: fp16 and bf16 inputs are multiplied and summed in fp32.
UNIT_ROUNDOFF = {"fp16": 2.0**-24, "bf16": 2.0**-24, "fp32": 2.0**-24, "fp64": 2.0**-53}


def error(x: Tensor, ref: Tensor) -> float:
    """Largest deviation; equal infinities agree."""
    if x.numel() == 0:
        return 0.0
    return (x.double() - ref.double()).masked_fill(x.double() == ref.double(), 0.0).abs().max().item()


@dataclass(frozen=True)
class Deviation:
    """E and E_pt of a result, and what they are held to: E <= multiple * E_pt + floor (contract, section 8)."""

    name: str
    error: float
    plain: float
    multiple: float
    floor: float

    def together(self, other: Deviation) -> Deviation:
        """The largest of both: of few numbers E_pt may be small by chance, of many draws of them it is not."""
        assert self.name == other.name and self.multiple == other.multiple
        return Deviation(
            self.name,
            max(self.error, other.error),
            max(self.plain, other.plain),
            self.multiple,
            max(self.floor, other.floor),
        )

    def assert_small(self, context: str) -> None:
        assert self.error <= self.multiple * self.plain + self.floor, (
            f"{self.name} of {context}: error {self.error:.3g} exceeds "
            f"{self.multiple:g} * {self.plain:.3g} + {self.floor:.3g}"
        )


def measured(name: str, got: Tensor, ref: Tensor, pt: Tensor, multiple: float, floor: float, context: str) -> Deviation:
    """How far `got` is from `ref`, whose shape it has, and it is finite wherever ref is."""
    assert got.shape == ref.shape, f"{name} of {context}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert torch.equal(torch.isfinite(got), torch.isfinite(ref)), f"{name} of {context}: NaN or infinity"
    return Deviation(name, error(got, ref), error(pt, ref), multiple, floor)


def judge(draws: Sequence[Sequence[Deviation]], context: str) -> None:
    """Each result of one or more calls, whose deviations come in the same order."""
    for of_one_result in zip(*draws):
        functools.reduce(Deviation.together, of_one_result).assert_small(context)


def assert_within(name: str, got: Tensor, ref: Tensor, pt: Tensor, multiple: float, floor: float, context: str) -> None:
    """One result of one call."""
    measured(name, got, ref, pt, multiple, floor, context).assert_small(context)


def rounding_floors(inputs: Inputs, ref: oracle.Result, pt: oracle.Result, few_keys: bool = False) -> Dict[str, float]:
    """What the arithmetic of a tiled kernel adds to the contract's multiples of E_pt, in units of its own rounding u.

    These matter to fp32 and fp64, and to calls where E_pt is 0: for fp16 and bf16, u is 2^-13 or 2^-16 of E_pt's scale.
    - An output carries about four roundings of its own size: of exp(s - m), of l, of 1 / l and of their product. Even
      with one visible key P is not exactly 1.
    - Backward recomputes P from the rounded LSE, so each P carries a relative error of about 2 u |LSE|, alike in a row.
    - With one visible key dS = dP - D vanishes and so does E_pt; a kernel sums dP = dO.V and D = rowsum(dO * O) in
      different orders, which leaves 2 sqrt(Dv) roundings in each dS, of which a row of dK sums one per query. Here O is
      what forward stored: V itself, or with dropout V / (1 - p) rounded to the inputs' dtype.
    - `few_keys`: rows may see one or two of them for any reason, so that O, which is of V's size, is rounded; and P,
      which is nearly 1, is recomputed from a score whose products are summed in an order of backward's own.
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
    u_out = torch.finfo(inputs.dout.dtype).eps / 2 if case.dropout_p or few_keys else u
    dS = 2 * u_out * case.head_dim_v**0.5 * scale * largest(inputs.dout) * largest(inputs.v) / (1 - case.dropout_p)
    queries = max(Sq for Sq, _ in case.lengths) * case.H / case.Hk
    one_key = few_keys or case.window == (0, 0)
    for name, operand, summed, index in (("dq", inputs.k, 1, 0), ("dk", inputs.q, queries, 1)):
        # A gradient of the LSE or tables leave E_pt tiny rather than 0.
        if error(pt.grads[index], ref.grads[index]) == 0 or one_key:
            floors[name] += dS * largest(operand) * summed**0.5
    rows = case.B * case.H * max(Sq for Sq, _ in case.lengths)
    if "attn_bias" in floors and one_key:
        floors["attn_bias"] += dS / scale * (rows / max(1, inputs.scores["attn_bias"].shape[:-1].numel())) ** 0.5
    if few_keys:
        floors["dv"] += 2 * u * summed_score(case) * largest(ref.grads[2])
        if "learnable_sink" in floors:
            floors["learnable_sink"] += dS / scale * (rows / case.H) ** 0.5
    return floors


def summed_score(case: Case) -> float:
    """Roundings of a score of usual size (make_inputs), before its cap, that is summed one product after the other."""
    size = case.softcap or (1.0 if case.scale is None else abs(case.scale) * case.D**0.5)
    return size * case.D**0.5


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
