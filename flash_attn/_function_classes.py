"""Upstream's autograd class names. Only `.apply(...)` is theirs: it takes upstream's positional arguments.

Differentiation itself belongs to the operators (C++), so these are not torch.autograd.Function subclasses and have no
forward(ctx, ...) or backward(ctx, ...).
"""

from __future__ import annotations

import inspect

import torch

from flash_attn import _attention


def _function_class(name, function):
    """A class whose apply takes upstream's arguments of the function, positionally, then is_grad_enabled."""
    parameters = inspect.signature(function).parameters
    names = [*(n for n in parameters if n not in _attention.EXTENSIONS), "is_grad_enabled"]
    names = ["return_softmax" if n == "return_attn_probs" else n for n in names]  # as upstream calls it here
    count, listed = len(names), ", ".join(names)

    def apply(*args):
        if len(args) != count:
            raise TypeError(f"{name}.apply was given {len(args)} arguments; it takes {count}: {listed}.")
        # A false is_grad_enabled saves nothing for backward; a true one does not undo the caller's no_grad.
        with torch.set_grad_enabled(bool(args[-1]) and torch.is_grad_enabled()):
            return function(*args[:-1])

    apply.__qualname__ = f"{name}.apply"  # so that it can be pickled
    apply.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names])
    doc = f"`{function.__name__}` by upstream's class name: apply({listed})."
    return type(name, (), {"apply": staticmethod(apply), "__doc__": doc, "__module__": __name__})


FlashAttnFunc = _function_class("FlashAttnFunc", _attention.flash_attn_func)
FlashAttnKVPackedFunc = _function_class("FlashAttnKVPackedFunc", _attention.flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = _function_class("FlashAttnQKVPackedFunc", _attention.flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = _function_class("FlashAttnVarlenFunc", _attention.flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc = _function_class("FlashAttnVarlenKVPackedFunc", _attention.flash_attn_varlen_kvpacked_func)
FlashAttnVarlenQKVPackedFunc = _function_class(
    "FlashAttnVarlenQKVPackedFunc", _attention.flash_attn_varlen_qkvpacked_func
)
