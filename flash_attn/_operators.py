"""torch.ops.flash_attn.* as the public functions call them, by the shortest way that a call allows."""

from __future__ import annotations

import torch

from flash_attn import _native
from flash_attn._tensor_kinds import check_kinds

# torch 2.0 compiles, but has no way to ask.
_TELLS = hasattr(torch, "compiler") and hasattr(torch.compiler, "is_compiling")
_MAY_COMPILE = hasattr(torch, "compile") and not _TELLS
is_compiling = torch.compiler.is_compiling if _TELLS else lambda: False
# Whether Python itself is being compiled: who else compiles passes no plain tensors. A newer torch answers at once.
_is_traced = getattr(torch.compiler, "is_dynamo_compiling", is_compiling) if _TELLS else lambda: _MAY_COMPILE


def window_bounds(window_size):
    """(left, right) as the operators take them: -1 for None, an int for an item that is a tensor."""
    if window_size is None or type(window_size) is tuple and window_size == (-1, -1):
        return -1, -1
    if not hasattr(window_size, "__getitem__") or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}; it must have two items, (left, right), -1 being unbounded.")
    left, right = window_size[0], window_size[1]
    return -1 if left is None else as_int(left), -1 if right is None else as_int(right)


def as_int(value):
    """A one-item tensor's value. Anything else passes unchanged, so that a SymInt stays symbolic.

    So does the item of a tensor in a non-strict export, for which int() would ask for a number.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return int(value) if value.is_floating_point() else value.item()


def scale_or_default(softmax_scale, packed_or_q):
    """softmax_scale, or D ** -0.5 for None. The operators refuse what has no D, whatever the scale."""
    if softmax_scale is not None:
        return softmax_scale
    has_shape = isinstance(packed_or_q, torch.Tensor) and not packed_or_q.is_nested
    shape = packed_or_q.shape if has_shape else ()
    return shape[-1] ** -0.5 if len(shape) > 0 and shape[-1] > 0 else 1.0


class Operator:
    """An operator and the names of its first tensors whose kinds are checked. Arguments are positional, and those of
    the public functions: softmax_scale may be None, window_size is one argument, and where return_softmax is there and
    False the first result is returned alone.

    `call` is what to call, now: a function that takes less time where all arguments are plain (no subclasses, no
    function modes) and else calls `general`, which a compiler, who does not see through the other, gets at once.
    """

    def __init__(self, name, tensors=()):
        overload = getattr(torch.ops.flash_attn, name).default
        # Of the public arguments, where a window takes one place instead of two.
        names = [a.name for a in overload._schema.arguments if a.name != "window_size_right"]
        places = {name: n for n, name in enumerate(names)}
        scale, window, all_results = map(places.get, ("softmax_scale", "window_size_left", "return_softmax"))

        def general(*args):
            given = list(args)
            if window is not None and window < len(args):  # What is missing torch tells.
                given[window : window + 1] = window_bounds(args[window])
                given[scale] = scale_or_default(args[scale], args[0])
            check_kinds(tensors, args)
            for name, x in zip(names[len(tensors) :], args[len(tensors) :]):
                if isinstance(x, torch.Tensor):  # these may be None, or no tensors at all
                    check_kinds((name,), (x,))
            results = overload(*given)
            return results if all_results is None or args[all_results] else results[0]

        self.general = general
        self._plain = _native.load()._plain_call(f"flash_attn::{name}", general)

    @property
    def call(self):
        return self.general if _is_traced() else self._plain
