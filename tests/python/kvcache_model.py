"""A plain model of flash_attn_with_kvcache: what the caches hold afterwards, and the output in double precision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import oracle
import torch
from torch import Tensor


@dataclass
class Call:
    """Arguments by upstream's names; tensors only, cache_seqlens included."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Optional[Tensor] = None
    v: Optional[Tensor] = None
    rotary_cos: Optional[Tensor] = None
    rotary_sin: Optional[Tensor] = None
    cache_seqlens: Optional[Tensor] = None
    cache_batch_idx: Optional[Tensor] = None
    cache_leftpad: Optional[Tensor] = None
    block_table: Optional[Tensor] = None
    rotary_interleaved: bool = True
    options: Dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> Dict[str, Any]:
        named = {name: value for name, value in vars(self).items() if name != "options"}
        return {**named, **self.options}

    def to(self, device: str) -> Call:
        """The call with its tensors on a torch device; those that are there already are the same."""

        def moved(x):
            return x.to(device) if isinstance(x, Tensor) else x

        named = {name: moved(value) for name, value in vars(self).items()}
        return Call(**{**named, "options": {name: moved(value) for name, value in self.options.items()}})

    @property
    def local(self) -> bool:
        """Whether rows of q stand at positions of their own."""
        window = self.options.get("window_size", (-1, -1))
        return self.options.get("causal", False) or any(0 <= w < self.slots for w in window)

    @property
    def slots(self) -> int:
        """Slots of a sequence."""
        page = self.k_cache.shape[1]
        return page if self.block_table is None else page * self.block_table.shape[1]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (rows, heads, D), cos and sin (rows of a table, R/2): in the precision of x."""
    R = 2 * cos.shape[1]
    c, s = (table[positions].to(x.dtype)[:, None] for table in (cos, sin))
    a, b = (x[..., 0:R:2], x[..., 1:R:2]) if interleaved else (x[..., : R // 2], x[..., R // 2 : R])
    pair = (a * c - b * s, a * s + b * c)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((rotated, x[..., R:]), -1)


def slot_index(call: Call, b: int, slot: int) -> Tuple[int, int]:
    """Where a slot of sequence b is: (row of the cache or page, position in it)."""
    if call.block_table is None:
        return (b if call.cache_batch_idx is None else int(call.cache_batch_idx[b])), slot
    page = call.k_cache.shape[1]
    return int(call.block_table[b, slot // page]), slot % page


def length_before(call: Call, b: int) -> int:
    return call.slots if call.cache_seqlens is None else int(call.cache_seqlens[b])


def appended(call: Call) -> Tuple[Tensor, Tensor]:
    """The caches after the call."""
    k_cache, v_cache = call.k_cache.clone(), call.v_cache.clone()
    for b in range(call.q.shape[0] if call.k is not None else 0):
        first, wide = length_before(call, b), call.k[b].double()
        if call.rotary_cos is not None:
            positions = torch.arange(first, first + len(wide))
            wide = rotate(wide, call.rotary_cos, call.rotary_sin, positions, call.rotary_interleaved)
        for i in range(len(wide)):
            at = slot_index(call, b, first + i)
            k_cache[at], v_cache[at] = wide[i].to(k_cache.dtype), call.v[b, i]
    return k_cache, v_cache


def attend(call: Call, caches: Tuple[Tensor, Tensor], arith: oracle.Arithmetic) -> Tuple[Tensor, Tensor]:
    """out (B,Sq,H,Dv) and softmax_lse (B,H,Sq), from the caches after appending."""
    outs: List[Tensor] = []
    lses: List[Tensor] = []
    options = call.options
    slopes = options.get("alibi_slopes")
    for b in range(call.q.shape[0]):
        first = length_before(call, b)
        end = first + (0 if call.k is None else call.k.shape[1])
        start = 0 if call.cache_leftpad is None else int(call.cache_leftpad[b])
        at = [slot_index(call, b, slot) for slot in range(start, end)]
        k, v = (torch.stack([c[i] for i in at]) if at else c[:0, 0] for c in caches)
        q = call.q[b].double()
        if call.rotary_cos is not None:
            positions = first + (torch.arange(len(q)) if call.local else torch.zeros(len(q), dtype=torch.long))
            q = rotate(q, call.rotary_cos, call.rotary_sin, positions, call.rotary_interleaved).to(call.q.dtype)
        score = oracle.Score(
            options.get("softmax_scale"),
            options.get("causal", False),
            options.get("window_size", (-1, -1)),
            options.get("softcap", 0.0),
            slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
        )
        one = oracle.run(q[None], k[None], v[None], None, score, arith, max_seqlen_k=call.slots)
        outs.append(one.out[0])
        lses.append(one.lse[0])
    return torch.stack(outs), torch.stack(lses)


def features(row):
    """Rows of the support matrix that a row of a grid of calls proves."""
    named = ["kv-cache: append and rotary"] if row["new"] else []
    named += ["kv-cache: paged"] if row["storage"].startswith("page") else []
    named += ["kv-cache: cache_batch_idx"] if row["storage"] == "cache_batch_idx" else []
    named += ["kv-cache: cache_leftpad"] if row["leftpad"] else []
    return named + (["split-KV"] if row["num_splits"] > 1 else [])
