"""One attention call: its arguments checked by name, and as what the kernels take.

Letters: B, H, Hk, Sq, Sk, D, Dv as in `flash_attn_func`; Tq, Tk tokens of a packed batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
BEYOND_UPSTREAM = ("attn_bias", "attn_mask", "learnable_sink", "key_begin", "key_end")


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"flash_attn: {message}")


def lacks(condition: bool, what: str, remedy: str) -> None:
    """Raises NotImplementedError for what only the other backends have."""
    if condition:
        message = f"the Triton backend has no {what}; {remedy}"
        raise NotImplementedError(f"flash_attn: {message}")


def check_shape(
    name: str, tensor: Tensor, like: Tensor, letters: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """A tensor beside q, which is `like`: its shape, dtype, device, and rows without gaps."""
    check(
        tensor.device == like.device,
        f"{name} is on {tensor.device} and q is on {like.device}; all tensors of a call must be on one device",
    )
    check(
        tuple(tensor.shape) == tuple(shape),
        f"{name} must have shape {letters} = {tuple(shape)}, got {tuple(tensor.shape)}",
    )
    check(tensor.dtype == dtype, f"{name} must have dtype {dtype}, got {tensor.dtype}; convert it")
    check(
        tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1,
        f"{name} must have a contiguous last dimension (stride 1), got strides {tensor.stride()}; "
        f"pass {name}.contiguous()",
    )


def check_dims(name: str, tensor: Tensor, letters: str) -> None:
    count = letters.count(",") + 1
    check(tensor.dim() == count, f"{name} must have {count} dimensions {letters}, got shape {tuple(tensor.shape)}")


def strides_of(tensor: Tensor) -> Tuple[int, int, int]:
    """(batch, row, head) of (B,S,H,D), or of packed (T,H,D), whose batch stride is 0."""
    return tuple(tensor.stride()[:3]) if tensor.dim() == 4 else (0, *tensor.stride()[:2])


def head_block(features: int) -> int:
    """Features of a tile: a power of two, at least what a matrix instruction takes."""
    return max(16, 1 << (features - 1).bit_length())


@dataclass
class Problem:
    """q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv), or packed (Tq,H,D), (Tk,Hk,D), (Tk,Hk,Dv) with cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float = 0.0
    softmax_scale: float = 1.0
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Optional[Tensor] = None
    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_k: Optional[Tensor] = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    seqused_k: Optional[Tensor] = None
    leftpad_k: Optional[Tensor] = None
    rng_state: Optional[Tensor] = None
    slots: Optional[int] = None  # of a sequence, where k and v are a cache or pages

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.numel() - 1 if self.packed else self.q.shape[0]

    @property
    def longest(self) -> Tuple[int, int]:
        """The longest sequence of queries and of keys."""
        if self.packed:
            return self.max_seqlen_q, self.max_seqlen_k
        return self.q.shape[1], self.k.shape[1] if self.slots is None else self.slots

    @property
    def window(self) -> Tuple[Optional[int], Optional[int]]:
        """(left, right) with None for unbounded, causal included."""
        left, right = (w if 0 <= w < self.longest[1] else None for w in (self.window_left, self.window_right))
        return left, 0 if self.causal else right

    @property
    def lse_shape(self) -> Tuple[int, ...]:
        H = self.q.shape[-2]
        return (H, self.q.shape[0]) if self.packed else (self.q.shape[0], H, self.q.shape[1])

    @property
    def lse_letters(self) -> str:
        return "(H, Tq)" if self.packed else "(B, H, Sq)"

    def letters(self, *last: str) -> str:
        """Of a tensor with a row for each query: its dimensions in the words of an error."""
        return "(" + ", ".join((("Tq",) if self.packed else ("B", "Sq")) + last) + ")"

    def lse_strides(self, lse: Tensor) -> Tuple[int, int, int]:
        """(batch, row, head) of (B,H,Sq) or (H,Tq)."""
        return (0, 1, lse.stride(0)) if self.packed else (lse.stride(0), 1, lse.stride(1))

    def validate(self) -> Problem:
        q, k, v = self.q, self.k, self.v
        self.check_lengths()
        of_q, keys = self.letters("H", "D"), "Tk" if self.packed else "B, Sk"
        of_k, of_v = f"({keys}, Hk, D)", f"({keys}, Hk, Dv)"
        for name, x, letters in (("q", q, of_q), ("k", k, of_k), ("v", v, of_v)):
            check_dims(name, x, letters)
        check_dtype(q)
        tokens = k.shape[:1] if self.packed else (q.shape[0], k.shape[1])
        check_shape("q", q, q, of_q, q.shape, q.dtype)
        check_shape("k", k, q, of_k, (*tokens, k.shape[-2], q.shape[-1]), q.dtype)
        check_shape("v", v, q, of_v, (*k.shape[:-1], v.shape[-1]), q.dtype)
        check_heads(q.shape[-2], k.shape[-2])
        check_head_dims(q.shape[-1], v.shape[-1])
        self.check_batch()
        self.check_scores()
        return self

    def check_batch(self) -> None:
        source = "cu_seqlens_q" if self.packed else "q"
        shape = tuple(self.cu_seqlens_q.shape if self.packed else self.q.shape)
        check(self.batch > 0, f"batch size B must be positive, got {source} of shape {shape}")

    def check_lengths(self) -> None:
        both = (("cu_seqlens_q", self.cu_seqlens_q), ("cu_seqlens_k", self.cu_seqlens_k))
        for name, x in both:
            check(
                x is not None or both[0][1] is both[1][1],
                f"{name} is None; a packed batch must have both cu_seqlens_q and cu_seqlens_k, int32 (B + 1,)",
            )
        if self.packed:
            for name, x in both:
                check_dims(name, x, "(B + 1)")
                check_shape(name, x, self.q, "(B + 1,)", (self.batch + 1,), torch.int32)
            for name, x in (("max_seqlen_q", self.max_seqlen_q), ("max_seqlen_k", self.max_seqlen_k)):
                check(x >= 0, f"{name} must not be negative, got {x}")
        for name, x in (("seqused_k", self.seqused_k), ("leftpad_k", self.leftpad_k)):
            if x is not None:
                check_shape(name, x, self.q, "(B,)", (self.batch,), torch.int32)

    def check_contents(self) -> None:
        """On the CPU, that the sequences of a packed batch lie within q and k. On a GPU that would wait for it."""
        if self.packed:
            self.check_rows("q", self.cu_seqlens_q, self.max_seqlen_q)
            self.check_rows("k", self.cu_seqlens_k, self.max_seqlen_k if self.seqused_k is None else None)

    def check_rows(self, name: str, cu_seqlens: Tensor, longest: Optional[int]) -> None:
        if self.q.device.type != "cpu":
            return
        ends, rows = cu_seqlens.tolist(), len(self.q if name == "q" else self.k)
        lengths = [end - begin for begin, end in zip(ends, ends[1:])]
        check(
            ends[0] == 0 and min(lengths) >= 0 and ends[-1] <= rows,
            f"cu_seqlens_{name} must rise from 0 to at most {rows}, the rows of {name}, got {ends}",
        )
        check(
            longest is None or max(lengths) <= longest,
            f"max_seqlen_{name} must be at least {max(lengths)}, the longest sequence of cu_seqlens_{name}, got "
            f"{longest}",
        )

    def check_scores(self) -> None:
        p, H = self.dropout_p, self.q.shape[-2]
        check(0.0 <= p < 1.0, f"dropout_p must be in [0, 1), got {p}")
        check(math.isfinite(self.softmax_scale), f"softmax_scale must be finite, got {self.softmax_scale}")
        check(math.isfinite(self.softcap), f"softcap must be finite (0 or less: no softcap), got {self.softcap}")
        check(
            not (p > 0 and self.softcap > 0),
            f"softcap and dropout are not supported together, got softcap = {self.softcap} and dropout_p = {p}; "
            "set one of them to 0",
        )
        slopes = self.alibi_slopes
        if slopes is not None:
            letters, shape = ("(H,)", (H,)) if slopes.dim() == 1 else ("(H,) or (B, H)", (self.batch, H))
            check_shape("alibi_slopes", slopes, self.q, letters, shape, torch.float32)
        if self.rng_state is not None:
            check_shape("rng_state", self.rng_state, self.q, "(2,)", (2,), torch.int64)

    def score_arguments(self) -> Dict[str, Any]:
        """What every kernel that computes scores takes of them."""
        left, right = self.window
        slopes = self.alibi_slopes
        return dict(
            group=self.q.shape[-2] // self.k.shape[-2],
            scale=self.softmax_scale,
            softcap=self.softcap if self.softcap > 0 else None,
            left=left,
            right=right,
            alibi_slopes=slopes,
            alibi_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        )

    def dropout_arguments(self) -> Dict[str, Any]:
        p = self.dropout_p
        return dict(
            rng_state=self.rng_state if p > 0 else None,
            threshold=math.floor(255.0 * (1.0 - p)),
            keep_scale=1.0 / (1.0 - p),
        )

    def lengths(self) -> Dict[str, Any]:
        longest_q, longest_k = self.longest
        return dict(
            cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k, longest_q=longest_q, longest_k=longest_k
        )


def refuse_tables(named: Dict[str, Any]) -> None:
    for name in BEYOND_UPSTREAM:
        lacks(named.get(name) is not None, name, f"pass {name}=None, or unset FLASH_ATTENTION_TRITON_AMD_ENABLE")


def check_dtype(q: Tensor) -> None:
    lacks(q.dtype == torch.float64, "fp64", "convert q, k and v to fp32, or unset FLASH_ATTENTION_TRITON_AMD_ENABLE")
    check(q.dtype in DTYPES, f"q must be float16, bfloat16 or float32, got {q.dtype}")


def check_heads(H: int, Hk: int) -> None:
    check(
        H > 0 and Hk > 0 and H % Hk == 0,
        f"the number of key/value heads Hk must divide the number of query heads H, got H = {H} in q and Hk = {Hk} "
        "in k",
    )


def check_head_dims(D: int, Dv: int) -> None:
    check(D > 0 and Dv > 0, f"head dims must be at least 1, got D = {D} of q and k, and Dv = {Dv} of v")
    lacks(
        max(D, Dv) > MAX_HEAD_DIM,
        f"head dim above {MAX_HEAD_DIM}, got D = {D} and Dv = {Dv}",
        "unset FLASH_ATTENTION_TRITON_AMD_ENABLE for it",
    )


def draw_rng_state(q: Tensor, dropout_p: float) -> Optional[Tensor]:
    """Seed and offset of a mask, int64 (2), drawn as the other backends draw them; None without dropout."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=q.device) if dropout_p > 0 else None
