"""Collectives of tensor and sequence parallelism, with upstream's names.

`all_gather`, `reduce_scatter` and `all_reduce` are differentiable.

Megatron's scheme: Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198). W is the number of ranks of the group.
Functions ending in _raw return (result, handle); the handle is None, or with async_op what to wait for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _first_of(*names):
    """The collective under the newest of its names that this torch has; torch 2.13 warns of the one before."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


_all_gather_into = _first_of("all_gather_single", "all_gather_into_tensor", "_all_gather_base")
_reduce_scatter_into = _first_of("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base")


def all_gather_raw(input_: Tensor, process_group: ProcessGroup, async_op: bool = False):
    """(n,...) of every rank -> (W*n,...), in the order of ranks."""
    world_size = dist.get_world_size(process_group)
    output = input_.new_empty(world_size * input_.shape[0], *input_.shape[1:])
    return output, _all_gather_into(output, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: Tensor, process_group: ProcessGroup, async_op: bool = False):
    """(W*n,...) -> (n,...): this rank's part of the sum over ranks."""
    rows, world_size = input_.shape[0], dist.get_world_size(process_group)
    assert rows % world_size == 0, (
        f"input_ has {rows} rows, which {world_size} ranks cannot share equally; pad it to a multiple of them."
    )
    output = input_.new_empty(rows // world_size, *input_.shape[1:])
    return output, _reduce_scatter_into(output, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(input_: Tensor, process_group: ProcessGroup, async_op: bool = False):
    """(...) -> (...): the sum over ranks, written into input_ where that is contiguous."""
    output = input_.contiguous()
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)


class AllGatherFunc(torch.autograd.Function):
    """(n,...) of every rank -> (W*n,...)."""

    @staticmethod
    def forward(ctx, input_: Tensor, process_group: ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return all_gather_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return reduce_scatter_raw(grad_output, ctx.process_group)[0], None


class ReduceScatterFunc(torch.autograd.Function):
    """(W*n,...) -> this rank's (n,...) of the sum over ranks."""

    @staticmethod
    def forward(ctx, input_: Tensor, process_group: ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return reduce_scatter_raw(input_, process_group)[0]

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return all_gather_raw(grad_output, ctx.process_group)[0], None


class AllReduceFunc(torch.autograd.Function):
    """(...) -> the sum over ranks. Every rank goes on with the same values, so the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, input_: Tensor, process_group: ProcessGroup) -> Tensor:
        # A copy: callers keep their partial sums.
        return all_reduce_raw(input_.clone(), process_group)[0]

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return grad_output, None


all_gather = AllGatherFunc.apply
reduce_scatter = ReduceScatterFunc.apply
all_reduce = AllReduceFunc.apply


def _marked(model, mark):
    """Parameters with that attribute set, in the same order on every rank."""
    return [p for _, p in sorted(model.named_parameters()) if getattr(p, mark, False)]


def sync_shared_params(model: torch.nn.Module, process_group: ProcessGroup):
    """Gives parameters marked `_shared_params` the values of the group's first rank."""
    source = dist.get_process_group_ranks(process_group)[0] if hasattr(dist, "get_process_group_ranks") else 0
    for parameter in _marked(model, "_shared_params"):
        with torch.no_grad():
            dist.broadcast(parameter, src=source, group=process_group)


def allreduce_sequence_parallel_grad(model: torch.nn.Module, process_group: ProcessGroup):
    """Sums the gradients of parameters marked `_sequence_parallel`: each rank has those of its part of the sequence."""
    grads = [p.grad for p in _marked(model, "_sequence_parallel") if p.grad is not None]
    if not grads:
        return
    with torch.no_grad():
        total = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(total, group=process_group)
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """This rank's share of `dim`, in units of `multiple_of`; the first ranks take one more if they do not divide."""
    units, remainder = divmod(dim // multiple_of, world_size)
    return (units + (local_rank < remainder)) * multiple_of
