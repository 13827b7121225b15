"""The package's attention functions, described by the arguments they take under one set of names.

B = 2 sequences, H = 4 query heads, Hk = 2 key/value heads, head dim 16; few rows, since only the interface is at stake.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Tuple

import torch
from torch import Tensor

import flash_attn
from flash_attn import flash_attn_interface as interface

Arguments = Dict[str, Any]
raw_module = interface.flash_attn_gpu

B, H, Hk, D = 2, 4, 2, 16
CU_Q, CU_K, MAX_Q, MAX_K = (0, 5, 11), (0, 6, 12), 6, 6
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SCORE = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap")
GRADS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Function:
    """`takes` in the order of the positional call; `call` gets the values under these names."""

    name: str
    takes: Tuple[str, ...]
    call: Callable[[Arguments], Any] = field(compare=False)

    @property
    def varlen(self) -> bool:
        return "cu_seqlens_q" in self.takes

    @property
    def strict(self) -> bool:
        """Refuses what the Python functions copy: a last stride other than 1."""
        return self.name.startswith("flash_attn_2_cuda")


def _public(name: str, packing: str) -> Function:
    tensors = {"separate": ("q", "k", "v"), "kv": ("q", "kv"), "qkv": ("qkv",)}[packing]
    varlen = "varlen" in name
    takes = (*tensors, *(LENGTHS if varlen else ()), *SCORE, "alibi_slopes", "deterministic", "return_attn_probs")

    def call(values: Arguments):
        values = dict(values)
        window = (values.pop("window_size_left"), values.pop("window_size_right"))
        if varlen and packing == "qkv":
            values["cu_seqlens"], values["max_seqlen"] = values.pop("cu_seqlens_q"), values.pop("max_seqlen_q")
            del values["cu_seqlens_k"], values["max_seqlen_k"]
        return getattr(flash_attn, name)(window_size=window, **values)

    return Function(name, takes, call)


def _underscore(name: str, takes: Tuple[str, ...]) -> Function:
    return Function(name, takes, lambda values: getattr(interface, name)(**values))


def _module(name: str, takes: Tuple[str, ...]) -> Function:
    return Function(f"flash_attn_2_cuda.{name}", takes, lambda values: getattr(raw_module, name)(*values.values()))


SAVED = ("dout", "q", "k", "v", "out", "softmax_lse", *GRADS)
FUNCTIONS = [
    _public("flash_attn_func", "separate"),
    _public("flash_attn_kvpacked_func", "kv"),
    _public("flash_attn_qkvpacked_func", "qkv"),
    _public("flash_attn_varlen_func", "separate"),
    _public("flash_attn_varlen_kvpacked_func", "kv"),
    _public("flash_attn_varlen_qkvpacked_func", "qkv"),
    _underscore("_flash_attn_forward", ("q", "k", "v", *SCORE, "alibi_slopes", "return_softmax")),
    _underscore(
        "_flash_attn_varlen_forward",
        ("q", "k", "v", *LENGTHS, *SCORE, "alibi_slopes", "return_softmax", "block_table", "leftpad_k", "seqused_k",
         "zero_tensors"),
    ),
    _underscore("_flash_attn_backward", (*SAVED, *SCORE, "alibi_slopes", "deterministic", "rng_state")),
    _underscore(
        "_flash_attn_varlen_backward",
        (*SAVED, *LENGTHS, *SCORE, "alibi_slopes", "deterministic", "rng_state", "zero_tensors"),
    ),
    _module("fwd", ("q", "k", "v", "out", "alibi_slopes", *SCORE, "return_softmax", "generator")),
    _module(
        "varlen_fwd",
        ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k", "block_table", "alibi_slopes",
         "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale", "zero_tensors", *SCORE[2:], "return_softmax",
         "generator", "num_splits"),
    ),
    _module("bwd", (*SAVED, "alibi_slopes", *SCORE, "deterministic", "generator", "rng_state")),
    _module(
        "varlen_bwd",
        (*SAVED, "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "max_seqlen_q", "max_seqlen_k", "dropout_p",
         "softmax_scale", "zero_tensors", *SCORE[2:], "deterministic", "generator", "rng_state"),
    ),
]  # fmt: skip


def good_arguments(function: Function) -> Arguments:
    """Valid values for every argument that the function takes, in its order."""
    rows, keys = ((11,), (12,)) if function.varlen else ((B, 5), (B, 6))
    lse = (H, 11) if function.varlen else (B, H, 5)
    g = torch.Generator().manual_seed(0)
    shapes = {name: (*rows, H, D) for name in ("q", "dout", "out", "dq")}
    shapes.update({name: (*keys, Hk, D) for name in ("k", "v", "dk", "dv")})
    shapes.update(kv=(*keys, 2, Hk, D), qkv=(*rows, 3, H, D), softmax_lse=lse)
    values: Arguments = {
        "cu_seqlens_q": torch.tensor(CU_Q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(CU_K, dtype=torch.int32),
        "max_seqlen_q": MAX_Q,
        "max_seqlen_k": MAX_K,
        "dropout_p": 0.0,
        "softmax_scale": 0.25,
        "causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
        "return_softmax": False,
        "zero_tensors": False,
        "block_table": None,
        "leftpad_k": None,
        "seqused_k": None,
        "generator": None,
        "rng_state": torch.tensor([1, 2]),
        "num_splits": 0,
    }
    return {n: torch.randn(shapes[n], generator=g) if n in shapes else values[n] for n in function.takes}


def tensors_of(values: Arguments) -> Dict[str, Tensor]:
    return {n: x for n, x in values.items() if isinstance(x, Tensor) and x.device.type == "cpu"}


def whole_storage(x: Tensor) -> Tensor:
    """All elements of the memory that x is a view of."""
    storage = x.untyped_storage() if hasattr(x, "untyped_storage") else x.storage()
    return x.detach().as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
