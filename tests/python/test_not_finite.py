"""NaN in the inputs: it reaches every result that depends on it, and no other head or sequence.

Whoever looks for the step at which a run diverged, or for a mask that came out as 0 * inf, has nothing else to go by. A
kernel can lose a NaN wherever it takes a maximum, clamps the argument of exp2 or looks a table up: `vmaxps` returns its
second operand, a conversion to an integer any number.

Rows of queries that do not see a key may still meet its NaN in V or, backward, in K, as 0 * NaN of a tile at the edge
of a mask: so it is with upstream's kernels and torch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Dict

import harness
import oracle
import pytest
import torch
from devices import CPU, OTHERS, SIMULATED, Device, needs_code

from flash_attn import flash_attn_func, flash_attn_varlen_func

# (Sq, Sk, H, Hk): rows of a cache where they are, strips and queries in the lanes, several blocks of keys.
SHAPES = ((1, 300, 4, 1), (9, 150, 4, 2), (70, 140, 4, 2), (150, 650, 2, 2))
MASKS: Dict[str, Dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (64, 3)}}
COLUMN = 5  # The feature that is NaN.


@dataclass
class Call:
    """B = 2. Of the first sequence's first key head, or first query head, one entry is NaN."""

    shape: tuple
    D: int
    dtype: torch.dtype
    mask: Dict[str, Any]
    where: str

    def __post_init__(self):
        Sq, Sk, H, Hk = self.shape
        g = torch.Generator().manual_seed(0)
        sizes = {"q": (2, Sq, H, self.D), "k": (2, Sk, Hk, self.D), "v": (2, Sk, Hk, self.D)}
        tensors = {name: torch.randn(size, generator=g) for name, size in sizes.items()}
        self.place = Sq // 2 if self.where == "q" else Sk - 30
        if self.where in tensors:
            tensors[self.where][0, self.place, 0, COLUMN] = math.nan
        self.leaves = [x.to(self.dtype).requires_grad_() for x in tensors.values()]
        self.dout = torch.randn(2, Sq, H, self.D, generator=g).to(self.dtype)
        seen = oracle.visible(Sq, Sk, self.mask.get("causal", False), self.mask.get("window_size", (-1, -1)))
        assert seen.any(1).all()  # The LSE of a row that sees no key is infinite.
        # Rows of O that depend on it, and keys that these rows see.
        self.rows = seen[:, self.place] if self.where != "q" else torch.arange(Sq) == self.place
        self.keys = seen[self.rows].any(0)
        self.heads = 1 if self.where == "q" else H // Hk

    def results(self, device: Device, **options):
        with device.scope():
            out, lse, _ = flash_attn_func(*self.leaves, return_attn_probs=True, **self.mask, **options)
            grads = torch.autograd.grad(out, self.leaves, self.dout)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.transpose(1, 2)[..., None], *grads)))

    def check(self, device: Device = CPU, **options) -> None:
        results = self.results(device, **options)
        finite = {name: torch.isfinite(x).all(-1) for name, x in results.items()}
        context = f"{self} {options}"
        assert self.rows.any(), context
        for name in ("out", "lse", "dq"):
            there = finite[name][0, self.rows, : self.heads]
            assert there.all() if (self.where, name) == ("v", "lse") else not there.any(), f"{name} of {context}"
        for name in ("dk", "dv"):
            there = finite[name][0, self.keys, 0]
            if name == "dv" and "dropout_p" in options:
                assert not there.all(), context  # weights that are dropped are 0, whatever they were
            elif (self.where, name) != ("v", "dv"):  # dV = P^T dO has nothing of V
                assert not there.any(), f"{name} of {context}"
        if self.where == "v":
            assert torch.isnan(results["out"][0, self.rows, : self.heads, COLUMN]).all(), context
        else:
            # Infinity would be the LSE of a row that sees no key, whose gradients are 0.
            assert torch.isnan(results["lse"][0, self.rows, : self.heads]).all(), context
            for name in ("out", "lse"):
                assert finite[name][0, ~self.rows, : self.heads].all(), f"{name} of rows that do not see it, {context}"
        for name, x in finite.items():
            heads = 1 if name in ("dk", "dv") else self.heads
            assert x[1].all() and x[0, :, heads:].all(), f"another head's or sequence's {name}, {context}"


def features_of_a_gpu(H):
    return {"softcap": 20.0}, {"alibi_slopes": torch.full((H,), 0.1)}, {"dropout_p": 0.2}


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
def test_nan_reaches_what_depends_on_it(dtype, where, isa):
    for shape, mask, D in itertools.product(SHAPES, MASKS.values(), (40, 128)):
        Call(shape, D, harness.TORCH_DTYPES[dtype], mask, where).check()


@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_and_score_features_do_not_hide_it(dtype, where, isa):
    for shape, mask in itertools.product(SHAPES[1:3], MASKS.values()):
        call = Call(shape, 64, harness.TORCH_DTYPES[dtype], mask, where)
        Sq, Sk, H, _ = shape
        for options in (
            *features_of_a_gpu(H),
            {"learnable_sink": torch.zeros(H)},
            {"attn_bias": torch.zeros(1, H, Sq, Sk)},
            {"attn_mask": torch.ones(2, 1, 1, Sk, dtype=torch.bool)},
        ):
            call.check(**options)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_nan_of_a_bias_reaches_its_row(dtype, isa):
    for shape, mask in itertools.product(SHAPES, MASKS.values()):
        call = Call(shape, 64, harness.TORCH_DTYPES[dtype], mask, "bias")
        Sq, Sk, H, _ = shape
        bias = torch.zeros(2, H, Sq, Sk)
        row = int(call.rows.nonzero()[0])
        bias[0, 0, row, call.place] = math.nan
        finite = {name: torch.isfinite(x).all(-1) for name, x in call.results(CPU, attn_bias=bias).items()}
        for name in ("out", "lse", "dq"):
            expected = torch.ones_like(finite[name])
            expected[0, row, 0] = False
            assert torch.equal(finite[name], expected), (name, call)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_packed_sequences_do_not_meet(dtype, isa):
    """A sequence of nothing but NaN between two others."""
    for lengths, Hk, mask, D in itertools.product(
        ((33, 70, 20), (150, 130, 60), (1, 9, 1)), (4, 1), MASKS.values(), (40, 128)
    ):
        g = torch.Generator().manual_seed(0)
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        leaves = [torch.randn(sum(lengths), heads, D, generator=g) for heads in (4, Hk, Hk)]
        middle = torch.zeros(sum(lengths), dtype=torch.bool)
        middle[ends[1] : ends[2]] = True
        for x in leaves:
            x[middle] = math.nan
        leaves = [x.to(harness.TORCH_DTYPES[dtype]).requires_grad_() for x in leaves]
        out = flash_attn_varlen_func(*leaves, ends, ends, max(lengths), max(lengths), **mask)
        for x in (out, *torch.autograd.grad(out, leaves, torch.ones_like(out))):
            finite = torch.isfinite(x).all(-1)
            assert finite[~middle].all() and not finite[middle].any(), (lengths, Hk, mask, D)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("target", SIMULATED)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_on_a_gpu_too(dtype, where, target):
    for shape, mask in (((70, 140, 4, 2), "causal"), ((9, 150, 4, 2), "window"), ((1, 300, 4, 1), "full")):
        Call(shape, 64, harness.TORCH_DTYPES[dtype], MASKS[mask], where).check(Device(target))


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("target", SIMULATED)
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_nor_do_score_features_of_a_gpu(dtype, where, target):
    call = Call((9, 150, 4, 2), 64, harness.TORCH_DTYPES[dtype], MASKS["window"], where)
    for options in features_of_a_gpu(4):
        call.check(Device(target), **options)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("target", OTHERS)
def test_on_other_gpus_too(target):
    needs_code(target)
    Call((70, 140, 4, 2), 64, torch.bfloat16, MASKS["causal"], "k").check(Device(target))
