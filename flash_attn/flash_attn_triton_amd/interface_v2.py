"""Upstream's later name for `interface_fa`: the same five raw functions, without arguments for fp8.

varlen_fwd takes 21 or 22 arguments: num_splits came later.
"""

from __future__ import annotations

import functools
import inspect

from flash_attn.flash_attn_triton_amd import interface_fa


def _without_descales(function):
    """The function with the parameters before its first descale."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if not p.name.startswith("descale_")]
    narrow = signature.replace(parameters=kept)

    @functools.wraps(function)
    def raw(*args, **kwargs):
        return function(**narrow.bind(*args, **kwargs).arguments)

    raw.__signature__ = narrow
    raw.__module__ = __name__
    return raw


fwd = _without_descales(interface_fa.fwd)
varlen_fwd = _without_descales(interface_fa.varlen_fwd)
bwd = _without_descales(interface_fa.bwd)
varlen_bwd = _without_descales(interface_fa.varlen_bwd)
fwd_kvcache = interface_fa.fwd_kvcache
