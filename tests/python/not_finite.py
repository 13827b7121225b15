"""Calls with a NaN among their inputs, and what of their results depends on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict

import oracle
import torch
from devices import CPU, Device

from flash_attn import flash_attn_func

MASKS: Dict[str, Dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (64, 3)}}
COLUMN = 5  # The feature that is NaN.


def features_of_a_gpu(H):
    return {"softcap": 20.0}, {"alibi_slopes": torch.full((H,), 0.1)}, {"dropout_p": 0.2}


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
        self.inputs = [x.to(self.dtype) for x in tensors.values()]
        self.dout = torch.randn(2, Sq, H, self.D, generator=g).to(self.dtype)
        seen = oracle.visible(Sq, Sk, self.mask.get("causal", False), self.mask.get("window_size", (-1, -1)))
        assert seen.any(1).all()  # The LSE of a row that sees no key is infinite.
        # Rows of O that depend on it, and keys that these rows see.
        self.rows = seen[:, self.place] if self.where != "q" else torch.arange(Sq) == self.place
        self.keys = seen[self.rows].any(0)
        self.heads = 1 if self.where == "q" else H // Hk

    def results(self, device: Device, **options):
        leaves = [x.to(device.torch_name).requires_grad_() for x in self.inputs]
        options = {k: x.to(device.torch_name) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
        with device.scope():
            out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True, **self.mask, **options)
            grads = torch.autograd.grad(out, leaves, self.dout.to(device.torch_name))
        results = (out.detach(), lse.transpose(1, 2)[..., None], *grads)
        return {name: x.cpu() for name, x in zip(("out", "lse", "dq", "dk", "dv"), results)}

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

    def check_on_a_gpu(self, device: Device) -> None:
        """And with each score feature that its kernels have; with dropout a row may lose the NaN of a value."""
        self.check(device)
        for options in features_of_a_gpu(self.shape[2]) if self.where != "v" else ():
            self.check(device, **options)
