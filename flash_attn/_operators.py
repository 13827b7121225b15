"""torch.ops.flash_attn.* as the public functions call them, by the shortest way that a call allows."""

from __future__ import annotations

import torch

from flash_attn import _native
from flash_attn._tensor_kinds import check_kinds

# torch 2.0 compiles, but has no way to ask.
_TELLS = hasattr(torch, "compiler") and hasattr(torch.compiler, "is_compiling")
_MAY_COMPILE = hasattr(torch, "compile") and not _TELLS
is_compiling = torch.compiler.is_compiling if _TELLS else lambda: False


class Operator:
    """An operator and the names of its first tensors whose kinds are checked. Arguments are positional.

    `call` is what to call, now: a function that takes less time where all arguments are plain (no subclasses, no
    function modes) and else calls `general`, which a compiler, who does not see through the other, gets at once.
    """

    def __init__(self, name, tensors=()):
        overload = getattr(torch.ops.flash_attn, name).default

        def general(*args):
            check_kinds(tensors, args)
            return overload(*args)

        self.general = general
        self._plain = _native.load()._plain_call(f"flash_attn::{name}", general)

    @property
    def call(self):
        return self.general if _MAY_COMPILE or is_compiling() else self._plain
