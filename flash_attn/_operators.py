"""torch.ops.flash_attn.* as the public functions call them, by the shortest way that a call allows."""

from __future__ import annotations

import torch

from flash_attn import _native
from flash_attn._tensor_kinds import check_kinds

# torch 2.0 compiles, but has no way to ask.
is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: hasattr(torch, "compile"))


class Operator:
    """An operator and the names of its first tensors whose kinds are checked. Arguments are positional.

    general: any call, a compiler's too.
    plain: the same in a third of the time where all arguments are plain (no subclasses, no function modes), else it
        calls `general`. Compilers do not see through it.
    """

    def __init__(self, name, tensors=()):
        overload = getattr(torch.ops.flash_attn, name).default

        def general(*args):
            check_kinds(tensors, args)
            return overload(*args)

        self.general = general
        self.plain = _native.load()._plain_call(f"flash_attn::{name}", general)
