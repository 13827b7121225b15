"""Attention over stored keys, launched: flash_attn_with_kvcache, and packed queries over pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Tuple

import torch
import triton
from torch import Tensor

from flash_attn.flash_attn_triton_amd import decode
from flash_attn.flash_attn_triton_amd.attention import kind_of
from flash_attn.flash_attn_triton_amd.launch import head_dims, launch
from flash_attn.flash_attn_triton_amd.problem import (
    Problem,
    check,
    check_dims,
    check_dtype,
    check_head_dims,
    check_heads,
    check_shape,
    head_block,
    lacks,
    strides_of,
)
from flash_attn.flash_attn_triton_amd.rotary import rotate_queries

MAX_SPLITS = 128


@dataclass
class StoredKeys:
    """problem.k and .v are a cache (B_cache,S,Hk,D) or, with block_table (B,max_pages), pages (num_pages,page,Hk,D).

    used (B): keys of each sequence; None: all slots. Keys are slots leftpad[b] to used[b] - 1.
    """

    problem: Problem
    used: Optional[Tensor] = None
    leftpad: Optional[Tensor] = None
    block_table: Optional[Tensor] = None
    cache_batch_idx: Optional[Tensor] = None

    def __post_init__(self) -> None:
        self.problem = replace(self.problem, slots=self.capacity)

    @property
    def capacity(self) -> int:
        """Slots of a sequence."""
        page = self.problem.k.shape[1]
        return page if self.block_table is None else page * self.block_table.shape[1]

    def validate(self) -> None:
        problem = self.problem
        q, k, v = problem.q, problem.k, problem.v
        of_q = problem.letters("H", "D")
        rows = "(num_pages, page, Hk, {})" if self.block_table is not None else "(B_cache, S, Hk, {})"
        check_dims("q", q, of_q)
        check_dims("k", k, rows.format("D"))
        check_dims("v", v, rows.format("Dv"))
        check_dtype(q)
        check_shape("q", q, q, of_q, q.shape, q.dtype)
        check_shape("k", k, q, rows.format("D"), (*k.shape[:3], q.shape[-1]), q.dtype)
        check_shape("v", v, q, rows.format("Dv"), (*k.shape[:3], v.shape[-1]), q.dtype)
        check_heads(q.shape[-2], k.shape[-2])
        check_head_dims(q.shape[-1], v.shape[-1])
        problem.check_batch()
        lacks(problem.dropout_p > 0, f"dropout over stored keys, got {problem.dropout_p}", "pass dropout_p = 0.0")
        problem.check_scores()
        self.check_storage()

    def check_storage(self) -> None:
        q, k, B, table = self.problem.q, self.problem.k, self.problem.batch, self.block_table
        lengths = (("cache_seqlens", self.used), ("leftpad", self.leftpad), ("cache_batch_idx", self.cache_batch_idx))
        for name, x in lengths:
            if x is not None:
                check_shape(name, x, q, "(B,)", (B,), torch.int32)
        if table is not None:
            check(
                self.cache_batch_idx is None,
                "block_table and cache_batch_idx were both given; pages are chosen by block_table alone, so pass "
                "cache_batch_idx=None",
            )
            check(k.shape[1] > 0, f"k must have pages of at least one slot, got shape {tuple(k.shape)}")
            check_dims("block_table", table, "(B, max_pages)")
            check_shape("block_table", table, q, "(B, max_pages)", (B, table.shape[1]), torch.int32)
        elif self.cache_batch_idx is None:
            check(
                k.shape[0] == B,
                f"k must have a row of the cache for each of the {B} sequences of q, got shape {tuple(k.shape)}; "
                "pass cache_batch_idx to choose rows",
            )

    def check_contents(self, added: int) -> None:
        """On the CPU, that cache rows, slots and the pages of keys in use are there. On a GPU that would wait for it,
        and the kernels take care of it (`decode.place_of`)."""
        if self.problem.q.device.type != "cpu":
            return
        k, rows = self.problem.k, self.cache_batch_idx
        if rows is not None:
            check(
                bool(((rows >= 0) & (rows < k.shape[0])).all()),
                f"cache_batch_idx must be from 0 to {k.shape[0] - 1}, the rows of k, got {rows.tolist()}",
            )
        slots = self.capacity
        counts = [slots] * self.problem.batch if self.used is None else self.used.tolist()
        check(
            all(0 <= used <= slots - added for used in counts),
            f"cache_seqlens must be from 0 to {slots - added}, the slots of a sequence less the {added} keys appended, "
            f"got {counts}",
        )
        pads = [] if self.leftpad is None else self.leftpad.tolist()
        check(
            all(0 <= pad <= slots for pad in pads),
            f"leftpad must be from 0 to {slots}, the slots of a sequence, got {pads}",
        )
        if self.block_table is None:
            return
        for b, used in enumerate(counts):
            needed = self.block_table[b, : -(-max(used + added, 0) // k.shape[1])]
            check(
                bool(((needed >= 0) & (needed < k.shape[0])).all()),
                f"block_table must hold pages from 0 to {k.shape[0] - 1}, those of k, got {needed.tolist()} for the "
                f"{used + added} keys of sequence {b}",
            )

    def storage(self) -> Dict[str, Any]:
        """Where slots are, as the kernels take it."""
        table = self.block_table
        return dict(
            block_table=table,
            table_stride=0 if table is None else table.stride(0),
            page=self.problem.k.shape[1],
            cache_rows=self.cache_batch_idx,
            stored_rows=self.problem.k.shape[0],
            capacity=self.capacity,
        )


def _splits(stored: StoredKeys, num_splits: int, pairs: int) -> int:
    """Ranges of keys: as asked for, or as many as fill the device with two programs a multiprocessor."""
    check(0 <= num_splits <= MAX_SPLITS, f"num_splits must be from 0 to {MAX_SPLITS}, got {num_splits}")
    device = stored.problem.q.device
    if num_splits > 0 or device.type != "cuda":
        return max(num_splits, 1)
    programs = stored.problem.batch * stored.problem.k.shape[-2] * triton.cdiv(pairs, 16)
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // max(programs, 1)
    return max(1, min(wanted, MAX_SPLITS, triton.cdiv(stored.capacity, 256)))


def _attend(stored: StoredKeys, added: int, num_splits: int, out: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    problem = stored.problem
    q, k, v = problem.q, problem.k, problem.v
    shape = (*q.shape[:-1], v.shape[-1])
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    check_shape("out", out, q, problem.letters("H", "Dv"), shape, q.dtype)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
    if problem.packed:
        out.zero_()
        lse.fill_(math.inf)
    longest_q = problem.max_seqlen_q if problem.packed else q.shape[1]
    pairs = longest_q * (q.shape[-2] // k.shape[-2])
    splits = _splits(stored, num_splits, pairs)
    parts, part_lses = out, lse
    if splits > 1:
        parts = torch.zeros((splits, *shape), dtype=torch.float32, device=q.device)
        part_lses = torch.full((splits, *lse.shape), -math.inf, dtype=torch.float32, device=q.device)
    split_strides = (parts.stride(0), part_lses.stride(0)) if splits > 1 else (0, 0)
    part, part_lse = (parts[0], part_lses[0]) if splits > 1 else (out, lse)
    launch(
        decode.attend_stored,
        kind_of(problem, "stored"),
        q,
        lambda tiles: (triton.cdiv(pairs, tiles["BLOCK_M"]) * splits, k.shape[-2], problem.batch),
        q=q,
        k=k,
        v=v,
        out=parts,
        lse=part_lses,
        q_strides=strides_of(q),
        k_strides=strides_of(k),
        v_strides=strides_of(v),
        out_strides=strides_of(part),
        lse_strides=problem.lse_strides(part_lse),
        split_strides=split_strides,
        splits=splits,
        cu_seqlens_q=problem.cu_seqlens_q,
        used_k=stored.used,
        added=added,
        leftpad_k=stored.leftpad,
        longest_q=longest_q,
        COMBINED=splits > 1,
        **stored.storage(),
        **problem.score_arguments(),
        **head_dims(q, v),
    )
    if splits > 1:
        _combine(problem, parts, part_lses, out, lse)
    return out, lse


def _combine(problem: Problem, parts: Tensor, part_lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """out and lse of the ranges' (splits, ...)."""
    q, v = problem.q, problem.v
    launch(
        decode.combine,
        kind_of(problem, "combine"),
        q,
        lambda tiles: (q.shape[-3], q.shape[-2], 1 if problem.packed else q.shape[0]),
        parts=parts,
        part_lses=part_lses,
        out=out,
        lse=lse,
        part_strides=strides_of(parts[0]),
        out_strides=strides_of(out),
        lse_strides=problem.lse_strides(lse),
        split_strides=(parts.stride(0), part_lses.stride(0)),
        splits=parts.shape[0],
        DV=v.shape[-1],
        BLOCK_DV=head_block(v.shape[-1]),
    )


def attend_pages(
    problem: Problem, block_table: Tensor, out: Optional[Tensor], num_splits: int, return_softmax: bool
) -> List[Tensor]:
    """Packed queries over pages: [out, softmax_lse, S_dmask (0), rng_state]. cu_seqlens_k only gives lengths."""
    check(not return_softmax, "return_softmax=True needs dropout, which pages do not have; pass return_softmax=False")
    problem.check_lengths()
    problem.check_rows("q", problem.cu_seqlens_q, problem.max_seqlen_q)
    used = problem.seqused_k
    if used is None:
        used = problem.cu_seqlens_k[1:] - problem.cu_seqlens_k[:-1]
    stored = StoredKeys(problem, used, problem.leftpad_k, block_table)
    stored.validate()
    stored.check_contents(0)
    out, lse = _attend(stored, 0, num_splits, out)
    q = problem.q
    return [out, lse, q.new_empty((0,)), torch.zeros(2, dtype=torch.int64, device=q.device)]


def attend_cache(
    stored: StoredKeys,
    k_new: Optional[Tensor],
    v_new: Optional[Tensor],
    rotary_cos: Optional[Tensor],
    rotary_sin: Optional[Tensor],
    interleaved: bool,
    num_splits: int,
    out: Optional[Tensor],
) -> List[Tensor]:
    """Appends k_new and v_new (B,Snew,Hk,D) where given, then attends: [out, softmax_lse]."""
    stored.validate()
    _check_new(stored, k_new, v_new)
    check(
        rotary_cos is None or k_new is not None,
        "rotary_cos was given without k; rotation is for appended keys and their queries: pass k and v, or neither "
        "table",
    )
    check(
        (rotary_cos is None) == (rotary_sin is None),
        f"rotary_cos and rotary_sin come together, got only {'rotary_sin' if rotary_cos is None else 'rotary_cos'}; "
        "pass both, or neither",
    )
    stored.check_contents(0 if k_new is None else k_new.shape[1])
    if k_new is None:
        return list(_attend(stored, 0, num_splits, out))
    rotary = dict(cos=None, sin=None, angles=0, HALF=1, INTERLEAVED=False)
    if rotary_cos is not None:
        _check_rotary(stored, rotary_cos, rotary_sin)
        cos, sin = rotary_cos.contiguous(), rotary_sin.contiguous()
        rotary = dict(cos=cos, sin=sin, angles=cos.shape[0], HALF=cos.shape[1], INTERLEAVED=interleaved)
    _append(stored, k_new, v_new, rotary)
    if rotary_cos is not None:
        stored = replace(stored, problem=replace(stored.problem, q=_rotated_queries(stored, rotary)))
    return list(_attend(stored, k_new.shape[1], num_splits, out))


def _check_new(stored: StoredKeys, k_new: Optional[Tensor], v_new: Optional[Tensor]) -> None:
    check(
        (k_new is None) == (v_new is None),
        f"k and v come together, got only {'v' if k_new is None else 'k'}; pass both, or neither",
    )
    if k_new is None:
        return
    q, k, v = stored.problem.q, stored.problem.k, stored.problem.v
    check(
        stored.used is not None,
        "cache_seqlens is missing; it says where k and v are appended: pass it as int32 of shape (B,)",
    )
    check_dims("k", k_new, "(B, Snew, Hk, D)")
    check_shape("k", k_new, q, "(B, Snew, Hk, D)", (q.shape[0], k_new.shape[1], *k.shape[2:]), q.dtype)
    check_shape("v", v_new, q, "(B, Snew, Hk, Dv)", (q.shape[0], k_new.shape[1], *v.shape[2:]), q.dtype)
    check(
        q.shape[1] <= stored.capacity,
        f"q must not have more rows than the cache has slots when k is given, got Sq = {q.shape[1]} and "
        f"{stored.capacity} slots",
    )
    needed = _longest_used(stored) + k_new.shape[1]
    what = "k_cache holds" if stored.block_table is None else "block_table names pages for"
    remedy = "make the cache longer" if stored.block_table is None else "give block_table more pages"
    check(
        needed <= stored.capacity,
        f"cache_seqlens and k need {needed} slots of a sequence, but {what} {stored.capacity}; {remedy}",
    )


def _longest_used(stored: StoredKeys) -> int:
    """The largest of cache_seqlens, which waits for a GPU; 0 where its contents cannot be read."""
    q = stored.problem.q
    if q.is_cuda and torch.cuda.is_current_stream_capturing() or q.is_meta:
        return 0
    return int(stored.used.max())


def _check_rotary(stored: StoredKeys, cos: Tensor, sin: Tensor) -> None:
    q = stored.problem.q
    check_dims("rotary_cos", cos, "(positions, rotary_dim / 2)")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_shape(name, x, q, "(positions, rotary_dim / 2)", cos.shape, q.dtype)
    check(
        0 < 2 * cos.shape[1] <= q.shape[-1],
        f"rotary_cos must rotate at least 2 and at most the D = {q.shape[-1]} features of a head, got rotary_dim = "
        f"{2 * cos.shape[1]}",
    )
    # Queries have positions of their own where causal or a window make that matter.
    rows = _longest_used(stored) + (q.shape[1] if stored.problem.window != (None, None) else 1)
    check(
        cos.shape[0] >= max(stored.capacity, rows),
        f"rotary_cos must have a position for each of the {stored.capacity} slots of a sequence, and for each row of "
        f"q, up to {rows}, got {cos.shape[0]}; make both tables longer",
    )


def _append(stored: StoredKeys, k_new: Tensor, v_new: Tensor, rotary: Dict[str, Any]) -> None:
    k, v = stored.problem.k, stored.problem.v
    launch(
        decode.append,
        kind_of(stored.problem, "append"),
        k,
        lambda tiles: (triton.cdiv(k_new.shape[1], tiles["BLOCK_M"]), k.shape[2], k_new.shape[0]),
        k_new=k_new,
        v_new=v_new,
        k=k,
        v=v,
        k_new_strides=strides_of(k_new),
        v_new_strides=strides_of(v_new),
        k_strides=strides_of(k),
        v_strides=strides_of(v),
        used=stored.used,
        added=k_new.shape[1],
        **stored.storage(),
        **rotary,
        **head_dims(k, v),
    )


def _rotated_queries(stored: StoredKeys, rotary: Dict[str, Any]) -> Tensor:
    """A copy of q, each row at its own position where causal or a window make that matter."""
    problem = stored.problem
    q = problem.q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        rotate_queries,
        kind_of(problem, "rotate"),
        q,
        lambda tiles: (triton.cdiv(q.shape[1], tiles["BLOCK_M"]), q.shape[2], q.shape[0]),
        q=q,
        out=out,
        q_strides=strides_of(q),
        out_strides=strides_of(out),
        used=stored.used,
        Sq=q.shape[1],
        OWN_POSITIONS=problem.window != (None, None),
        D=q.shape[3],
        BLOCK_D=head_block(q.shape[3]),
        **rotary,
    )
    return out
