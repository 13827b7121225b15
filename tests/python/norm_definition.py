"""Norms by their definition in fp64, and the comparison of results and gradients with it."""

import torch
from harness import TORCH_DTYPES

EPS = 1e-5
B, S, N = 3, 4, 10
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2, "fp64": 1e-11}
DTYPES = list(TOLERANCE)


def randn(*shape, dtype="fp32"):
    return torch.randn(shape).to(TORCH_DTYPES[dtype])


def weight_dtype(dtype):
    """As in training: weights stay fp32 where x is narrower."""
    return "fp64" if dtype == "fp64" else "fp32"


def norm(x, weight, bias, rms):
    """The definition, in fp64."""
    x = x.double()
    centred = x if rms else x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


def check(function, reference, leaves, tolerance):
    """Results and gradients of all leaves, for one random direction per result."""
    ours = [x.detach().clone().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got, wanted = function(*ours), reference(*exact)
    got, wanted = (list(r) if isinstance(r, (tuple, list)) else [r] for r in (got, wanted))
    assert len(got) == len(wanted)
    directions = [torch.randn_like(r) for r in got]
    grads = torch.autograd.grad(got, ours, directions)
    wanted_grads = torch.autograd.grad(wanted, exact, [d.double() for d in directions])
    for a, b in zip([*got, *grads], [*wanted, *wanted_grads]):
        error = (a.double() - b).abs().max()
        assert a.shape == b.shape and error <= tolerance * (1 + b.abs().max()), error
    return got
