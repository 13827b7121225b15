"""Feed-forward blocks, plain, gated and split over ranks, with upstream's names and state_dict keys."""

from __future__ import annotations

import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from flash_attn.ops.activations import swiglu
from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedMLP, ParallelFusedMLP, RowParallelLinear  # noqa: F401


def _gated(y, activation):
    """y (...,2K), values then gates -> values * activation(gates), (...,K)."""
    if activation is F.sigmoid:
        return F.glu(y, dim=-1)
    values, gates = y.chunk(2, dim=-1)
    return swiglu(gates, values) if activation is F.silu else values * activation(gates)


def _gated_features(in_features, hidden_features, multiple_of):
    """Hidden features of a gated block: 8/3 of the input's, which gives it the size of a plain one, rounded up."""
    hidden_features = int(8 * in_features / 3) if hidden_features is None else hidden_features
    return (hidden_features + multiple_of - 1) // multiple_of * multiple_of


class Mlp(nn.Module):
    """Linear, activation, linear.

    hidden_features: None is four times in_features. out_features: None is in_features.
    """

    def __init__(
        self,
        in_features,
        hidden_features=None,
        out_features=None,
        activation=F.gelu,
        bias1=True,
        bias2=True,
        return_residual=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x):
        """x (...,in) -> (...,out), or (that, x) with return_residual."""
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class ParallelMLP(nn.Module):
    """`Mlp` with its hidden features split over ranks; with sequence_parallel x and the result are split by rows."""

    def __init__(
        self,
        in_features,
        hidden_features=None,
        out_features=None,
        activation=F.gelu,
        process_group: ProcessGroup = None,
        sequence_parallel=True,
        bias1=True,
        bias2=True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = 4 * in_features if hidden_features is None else hidden_features
        common = dict(sequence_parallel=sequence_parallel, device=device, dtype=dtype)
        self.fc1 = ColumnParallelLinear(in_features, hidden_features, process_group, bias=bias1, **common)
        self.activation = activation
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **common)

    def forward(self, x):
        """x (...,in) -> (...,out)."""
        return self.fc2(self.activation(self.fc1(x)))


class GatedMlp(nn.Module):
    """Linear to values and gates, values * activation(gates), linear: Shazeer 2020 (https://arxiv.org/abs/2002.05202).

    hidden_features: None is 8/3 of in_features; rounded up to a multiple of multiple_of.
    activation: F.sigmoid gives GLU, F.silu SwiGLU, F.gelu GEGLU.
    """

    def __init__(
        self,
        in_features,
        hidden_features=None,
        out_features=None,
        activation=F.sigmoid,
        bias1=True,
        bias2=True,
        multiple_of=128,
        return_residual=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = _gated_features(in_features, hidden_features, multiple_of)
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden_features, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden_features, out_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x):
        """x (...,in) -> (...,out), or (that, x) with return_residual."""
        y = self.fc2(_gated(self.fc1(x), self.activation))
        return (y, x) if self.return_residual else y


class ParallelGatedMlp(nn.Module):
    """`GatedMlp` with its hidden features split over ranks: each rank's fc1 has its values, then its gates."""

    def __init__(
        self,
        in_features,
        process_group,
        hidden_features=None,
        out_features=None,
        activation=F.sigmoid,
        bias1=True,
        bias2=True,
        multiple_of=128,
        sequence_parallel=True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        out_features = in_features if out_features is None else out_features
        hidden_features = _gated_features(in_features, hidden_features, multiple_of)
        common = dict(sequence_parallel=sequence_parallel, device=device, dtype=dtype)
        self.fc1 = ColumnParallelLinear(in_features, 2 * hidden_features, process_group, bias=bias1, **common)
        self.activation = activation
        self.fc2 = RowParallelLinear(hidden_features, out_features, process_group, bias=bias2, **common)

    def forward(self, x):
        """x (...,in) -> (...,out)."""
        return self.fc2(_gated(self.fc1(x), self.activation))
