"""Kinds of tensors that the attention functions cannot take, refused with what to pass instead."""

from __future__ import annotations

import torch

# Any other subclass meets the operators through its own __torch_dispatch__ or __torch_function__.
_INSTEAD = {
    "DTensor": "{name}.to_local(), sharded over the batch or the heads, and wrap the result again",
    "MaskedTensor": "its data, and which keys count as attn_mask",
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_kinds(names, tensors):
    """Raises TypeError where a tensor is None, nested, distributed or masked."""
    for name, x in zip(names, tensors):
        if type(x) not in _PLAIN or x.is_nested:
            _refuse(name, x)


def _refuse(name, x):
    if x is None:
        raise TypeError(f"flash_attn: {name} is None; it must be a tensor.")
    if getattr(x, "is_nested", False):
        raise TypeError(
            f"flash_attn: {name} is a nested tensor; pass its packed rows with cu_seqlens to a varlen function: in the "
            f"jagged layout {name}.values() and {name}.offsets().int()."
        )
    for kind in type(x).__mro__:
        if kind.__name__ in _INSTEAD:
            instead = _INSTEAD[kind.__name__].format(name=name)
            raise TypeError(f"flash_attn: {name} is a {kind.__name__}; pass {instead}.")
