"""Linear layers and feed-forward blocks, also split over ranks, with upstream's names. Plain torch on every device.

Megatron's scheme of tensor and sequence parallelism: Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198).
W is the number of ranks. With sequence_parallel, activations between blocks are split over ranks along their first dim.
"""

from __future__ import annotations

from functools import partial
from typing import Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from flash_attn.ops.activations import sqrelu_fwd
from flash_attn.utils.distributed import all_gather, all_reduce, all_reduce_raw, get_dim_for_local_rank, reduce_scatter

ACTIVATIONS = {"gelu_approx": partial(F.gelu, approximate="tanh"), "relu": F.relu, "sqrelu": sqrelu_fwd}


class _SumGradient(torch.autograd.Function):
    """The identity; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce_raw(grad.clone(), ctx.process_group)[0], None


def _enter(x, process_group, sequence_parallel):
    """What a layer whose outputs are split over ranks multiplies: all rows, with gradients of all ranks."""
    if process_group is None:
        return x
    return all_gather(x, process_group) if sequence_parallel else _SumGradient.apply(x, process_group)


def _leave(x, process_group, sequence_parallel):
    """The sum over ranks of what a layer whose inputs are split has: this rank's rows of it, or all."""
    return (reduce_scatter if sequence_parallel else all_reduce)(x, process_group)


def fused_dense_func(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    return_residual: bool = False,
    process_group: Optional[ProcessGroup] = None,
    sequence_parallel: bool = True,
):
    """x (...,N), weight (M,N), bias (M) -> (...,M); with return_residual also what was multiplied.

    process_group: weight is this rank's part. With sequence_parallel the rows of all ranks' x are multiplied, so that
        the first dim grows by W.
    """
    x = _enter(x, process_group, sequence_parallel)
    out = F.linear(x, weight, bias)
    return (out, x) if return_residual else out


class FusedDense(nn.Linear):
    """nn.Linear; with return_residual it also returns its input."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_residual: bool = False,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.return_residual = return_residual

    def forward(self, x, process_group=None):
        """x (...,in) -> (...,out). process_group: x is split over its ranks along the first dim; all of it is used."""
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)


def _share(name, features, process_group, multiple_of):
    """This rank's number of features."""
    if features % multiple_of:
        raise ValueError(f"{name} is {features}; it must be a multiple of multiple_of, {multiple_of}.")
    world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    return get_dim_for_local_rank(features, world_size, rank, multiple_of)


class ColumnParallelLinear(nn.Linear):
    """A linear layer whose outputs are split over ranks, in units of multiple_of; each rank has every input."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: ProcessGroup,
        bias: bool = True,
        sequence_parallel=True,
        multiple_of=1,
        device=None,
        dtype=None,
    ) -> None:
        share = _share("out_features", out_features, process_group, multiple_of)
        super().__init__(in_features, share, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x):
        """x (...,in) -> (...,this rank's out); the first dim grows by W with sequence_parallel."""
        return fused_dense_func(x, self.weight, self.bias, False, self.process_group, self.sequence_parallel)


class RowParallelLinear(nn.Linear):
    """A linear layer whose inputs are split over ranks, in units of multiple_of. The first rank has the bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        process_group: ProcessGroup,
        bias: bool = True,
        sequence_parallel=True,
        multiple_of=1,
        device=None,
        dtype=None,
    ) -> None:
        share = _share("in_features", in_features, process_group, multiple_of)
        bias = bias and dist.get_rank(process_group) == 0
        super().__init__(share, out_features, bias=bias, device=device, dtype=dtype)
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel

    def forward(self, x):
        """x (...,this rank's in) -> (...,out); the first dim shrinks by W with sequence_parallel."""
        return _leave(F.linear(x, self.weight, self.bias), self.process_group, self.sequence_parallel)


def _check_mlp(activation, checkpoint_lvl, heuristic):
    assert activation in ACTIVATIONS, f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}."
    assert checkpoint_lvl in (0, 1, 2), f"checkpoint_lvl is {checkpoint_lvl}; it must be 0, 1 or 2."
    assert heuristic == "auto" or heuristic in range(-1, 5), (
        f"heuristic is {heuristic!r}; it must be 'auto' or -1 to 4. It chooses upstream's kernel and "
        "makes no difference here."
    )


def fused_mlp_func(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    bias1: Optional[Tensor] = None,
    bias2: Optional[Tensor] = None,
    activation: str = "gelu_approx",
    save_pre_act: bool = True,
    return_residual: bool = False,
    checkpoint_lvl: int = 0,
    heuristic: int = 0,
    process_group: Optional[ProcessGroup] = None,
    sequence_parallel: bool = True,
):
    """activation(x weight1^T + bias1) weight2^T + bias2: x (...,N), weight1 (K,N), weight2 (M,K), bias1 (K), bias2 (M).

    activation: gelu_approx, relu or sqrelu.
    checkpoint_lvl: what backward recomputes to save memory: 0 nothing, 1 the activation, 2 the first product too.
    save_pre_act: False keeps no first product for backward, whatever checkpoint_lvl says.
    heuristic: -1 to 4, checked and without effect: torch chooses how to multiply.
    return_residual: also return x, with process_group and sequence_parallel all of it.
    process_group: weight1 and bias1 are this rank's part, weight2 too; the result is this rank's summand.
    """
    _check_mlp(activation, checkpoint_lvl, heuristic)
    x = _enter(x, process_group, sequence_parallel)

    def second(hidden):
        return F.linear(ACTIVATIONS[activation](hidden), weight2, bias2)

    def both(x):
        return second(F.linear(x, weight1, bias1))

    recomputed = checkpoint_lvl if save_pre_act else 2
    if recomputed == 0 or not torch.is_grad_enabled():
        out = both(x)
    elif recomputed == 1:
        out = checkpoint(second, F.linear(x, weight1, bias1), use_reentrant=False)
    else:
        out = checkpoint(both, x, use_reentrant=False)
    return (out, x) if return_residual else out


class FusedMLP(nn.Module):
    """Linear, activation, linear.

    hidden_features: None is four times in_features. out_features: None is in_features.
    activation, checkpoint_lvl, heuristic: see `fused_mlp_func`; heuristic may also be "auto".
    """

    def __init__(
        self,
        in_features,
        hidden_features=None,
        out_features=None,
        bias1=True,
        bias2=True,
        activation="gelu_approx",
        return_residual=False,
        checkpoint_lvl=0,
        heuristic="auto",
        device=None,
        dtype=None,
    ):
        _check_mlp(activation, checkpoint_lvl, heuristic)
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        self.activation = activation
        self.return_residual = return_residual
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x, process_group=None):
        """x (...,in) -> (...,out), or (that, x) with return_residual; see `fused_mlp_func`."""
        out, x = fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            activation=self.activation,
            return_residual=True,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=process_group,
        )
        out = out if process_group is None else reduce_scatter(out, process_group)
        return (out, x) if self.return_residual else out


class ParallelFusedMLP(nn.Module):
    """`FusedMLP` with its hidden features split over ranks."""

    def __init__(
        self,
        in_features,
        hidden_features=None,
        out_features=None,
        activation="gelu_approx",
        process_group: ProcessGroup = None,
        bias1=True,
        bias2=True,
        sequence_parallel=True,
        checkpoint_lvl=0,
        heuristic="auto",
        device=None,
        dtype=None,
    ):
        _check_mlp(activation, checkpoint_lvl, heuristic)
        assert process_group is not None, "process_group is None; pass the group whose ranks share the layer."
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        self.activation = activation
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.checkpoint_lvl = checkpoint_lvl
        self.heuristic = heuristic
        common = dict(device=device, dtype=dtype)
        self.fc1 = ColumnParallelLinear(in_features, hidden_features, process_group, bias=bias1, **common)
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **common)

    def forward(self, x):
        """x (...,in) -> (...,out); with sequence_parallel both are split over ranks along the first dim."""
        out = fused_mlp_func(
            x,
            self.fc1.weight,
            self.fc2.weight,
            self.fc1.bias,
            self.fc2.bias,
            activation=self.activation,
            checkpoint_lvl=self.checkpoint_lvl,
            process_group=self.process_group,
            sequence_parallel=self.sequence_parallel,
        )
        return _leave(out, self.process_group, self.sequence_parallel)
