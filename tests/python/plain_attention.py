"""Attention from its definition, and the comparison of a module with it, gradients included."""

import math

import torch


def attend(q, k, v, visible=None, scale=None, bias=0):
    """softmax(scale q k^T + bias) v in the dtype of its arguments; visible: bool, broadcasting to (B,H,Sq,Sk)."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def band(Sq, Sk, left=None, right=0):
    """(Sq,Sk): keys from `left` before to `right` behind each query's own, aligned to the bottom right corner."""
    distance = torch.arange(Sk) - (torch.arange(Sq)[:, None] + Sk - Sq)
    return (distance <= right) & (distance >= -(Sk + Sq if left is None else left))


def assert_close(got, wanted, tolerance=1e-5):
    assert got.shape == wanted.shape
    assert (got.double() - wanted).abs().max() <= tolerance * (1 + wanted.abs().max())


def check(module, inputs, reference, tolerance=1e-5, **call):
    """Result and gradients of the inputs and every parameter; reference(parameters by name, *inputs in fp64)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    p = {name: t.detach().double().requires_grad_() for name, t in module.named_parameters()}
    out, wanted = module(*leaves, **call), reference(p, *exact)
    assert_close(out, wanted, tolerance)
    g = torch.randn_like(out)
    got = torch.autograd.grad(out, [*leaves, *module.parameters()], g)
    for a, b in zip(got, torch.autograd.grad(wanted, [*exact, *p.values()], g.double())):
        assert_close(a, b, tolerance)
