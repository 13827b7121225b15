"""The raw functions' common part: upstream's positional arguments to a `Problem`, and which backend computes it."""

from __future__ import annotations

from typing import Any, List, Optional

import torch
from torch import Tensor

from flash_attn import _native
from flash_attn.flash_attn_triton_amd import attention, launch
from flash_attn.flash_attn_triton_amd.language import IS_INTERPRETED
from flash_attn.flash_attn_triton_amd.problem import Problem, check, draw_rng_state, lacks


def computes(tensor: Tensor) -> bool:
    """Whether Triton computes on the tensor's device; the CPU keeps the CPU backend unless Triton interprets."""
    return tensor.is_cuda or (tensor.device.type == "cpu" and IS_INTERPRETED) or launch.is_recording()


def elsewhere(name: str, *arguments) -> List[Tensor]:
    """The native raw function of that name."""
    return getattr(_native.load(), name)(*arguments)


def refuse(generator: Any, **descales: Optional[Tensor]) -> None:
    check(
        generator is None,
        f"the `generator` argument is no longer supported, got {generator!r}; pass None, dropout follows "
        "torch.manual_seed",
    )
    for name, value in descales.items():
        lacks(value is not None, f"fp8, which {name} is for", f"pass {name}=None")


def run_forward(problem: Problem, out: Optional[Tensor], return_softmax: bool) -> List[Tensor]:
    """[out, softmax_lse, S_dmask, rng_state], rng_state zeros without dropout."""
    check(
        not return_softmax or problem.dropout_p > 0,
        f"return_softmax=True needs dropout_p > 0, got {problem.dropout_p}; pass return_softmax=False",
    )
    problem.validate()
    problem.rng_state = draw_rng_state(problem.q, problem.dropout_p)
    results = attention.forward(problem, out, return_softmax)
    rng_state = problem.rng_state
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=problem.q.device)
    return [*results, rng_state]


def run_backward(problem: Problem, dout: Tensor, out: Tensor, lse: Tensor, *buffers: Optional[Tensor]) -> List[Tensor]:
    """[dq, dk, dv, softmax_d], in the buffers that are given."""
    if problem.rng_state is None:
        problem.rng_state = draw_rng_state(problem.q, problem.dropout_p)
    like = (problem.q, problem.k, problem.v)
    grads = tuple(torch.empty_like(x) if buffer is None else buffer for x, buffer in zip(like, buffers))
    return [*grads, attention.backward(problem, dout, out, lse, grads)]
