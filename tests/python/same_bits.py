"""Checks that what must not change a result changes no bit of it."""

from __future__ import annotations

import harness
import torch
from cases import Case

from flash_attn import flash_attn_func


def check_equals_dense_per_sequence(case: Case) -> None:
    """Packing sequences changes where they lie, not what is computed."""
    inputs = harness.make_inputs(case)
    out, lse, _ = harness.public_call(inputs)
    grads = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    q0 = k0 = 0
    for b, (Sq, Sk) in enumerate(case.lengths):
        rows, keys = slice(q0, q0 + Sq), slice(k0, k0 + Sk)
        leaves = [x.detach()[None, where].requires_grad_() for x, where in zip(inputs.leaves, (rows, keys, keys))]
        slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes[b]
        one, one_lse, _ = flash_attn_func(
            *leaves, causal=case.causal, window_size=case.window, alibi_slopes=slopes, return_attn_probs=True
        )
        assert torch.equal(out[rows], one[0]) and torch.equal(lse[:, rows], one_lse[0])
        for whole, where, part in zip(
            grads, (rows, keys, keys), torch.autograd.grad(one, leaves, inputs.dout[None, rows])
        ):
            assert torch.equal(whole[where], part[0])
        q0, k0 = q0 + Sq, k0 + Sk


def check_every_thread_count(case: Case) -> None:
    """Forward and backward with 1, 2, 3 and 7 threads."""
    inputs = harness.make_inputs(case)

    def results(threads):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        out, lse, s_dmask = harness.public_call(inputs)
        return [out, lse, s_dmask, *torch.autograd.grad(out, inputs.leaves, inputs.dout)]

    before = torch.get_num_threads()
    try:
        expected = results(1)
        for n in (2, 3, 7):
            assert all(torch.equal(a, b) for a, b in zip(results(n), expected)), f"{n} threads"
    finally:
        torch.set_num_threads(before)
