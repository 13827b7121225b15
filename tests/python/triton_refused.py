"""Calls that the Triton backend refuses, at least one for each of its error texts, and words of what they say."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from unittest import mock

import error_sites
import torch

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_triton_amd import attention, interface_fa, tuning
from flash_attn.flash_attn_triton_amd.problem import Problem

MISSING, BAD = NotImplementedError, RuntimeError
OF_CONTENTS = (
    "flash_attn: cache_batch_idx must be from",
    "flash_attn: cache_seqlens must be from",
    "flash_attn: leftpad must be from",
    "flash_attn: block_table must hold pages",
    "flash_attn: cu_seqlens_",
    "flash_attn: max_seqlen_",
)


def refused(there):
    """Words of the message -> (exception, call). there: puts a tensor on the device."""
    groups = (_numbers, _tensors, _stored, _appending, _raw, _tuning)
    return {words: case for group in groups for words, case in group(there).items()}


def messages(there):
    """{words: (name of the exception, message)} of all these calls; an exception of another kind passes."""
    said = {}
    for words, (error, call) in refused(there).items():
        try:
            call()
            said[words] = "", "no exception"
        except error as raised:
            said[words] = type(raised).__name__, str(raised)
    return said


def compared_with_sources(said):
    """(messages that no text of the sources gives, texts of the sources that no message has)."""
    sites = [s for s in error_sites.all_sites() if s.path.startswith("flash_attn/flash_attn_triton_amd/")]
    pairs = [(site, one) for site in sites for one in said if site.error == one[0] and site.matches(one[1])]
    unknown = set(said) - {one for _, one in pairs}
    return sorted(unknown), [site.template for site in sites if site not in {site for site, _ in pairs}]


def _dense(there):
    q = there(torch.zeros(1, 4, 2, 16))
    return q, flash_attn_func


def _numbers(there):
    q, dense = _dense(there)
    wide = there(torch.zeros(1, 4, 2, 264))
    mask = there(torch.ones(1, 4, dtype=torch.bool))
    bounds = there(torch.zeros(1, 4, dtype=torch.int32))
    backward = Problem(q, q, q, dropout_p=0.1), q, q, q.new_zeros(1, 2, 4), (q, q, q)
    return {
        "has no attn_bias; pass attn_bias=None": (
            MISSING,
            lambda: dense(q, q, q, attn_bias=there(torch.zeros(1, 1, 1, 4))),
        ),
        "has no attn_mask": (MISSING, lambda: dense(q, q, q, attn_mask=mask)),
        "has no learnable_sink": (MISSING, lambda: dense(q, q, q, learnable_sink=there(torch.zeros(2)))),
        "has no key_begin": (MISSING, lambda: dense(q, q, q, key_begin=bounds)),
        "has no key_end": (MISSING, lambda: dense(q, q, q, key_end=bounds)),
        "has no fp64; convert": (MISSING, lambda: dense(q.double(), q.double(), q.double())),
        "has no head dim above 256, got D = 264": (MISSING, lambda: dense(wide, wide, wide)),
        "softcap and dropout are not supported together": (BAD, lambda: dense(q, q, q, dropout_p=0.1, softcap=3.0)),
        "dropout_p must be in [0, 1), got 1.0": (BAD, lambda: dense(q, q, q, dropout_p=1.0)),
        "softmax_scale must be finite, got inf": (BAD, lambda: dense(q, q, q, softmax_scale=math.inf)),
        "softcap must be finite (0 or less: no softcap), got inf": (BAD, lambda: dense(q, q, q, softcap=math.inf)),
        "rng_state is None and dropout_p = 0.1": (BAD, lambda: attention.backward(*backward)),
    }


def _tensors(there):
    q, dense = _dense(there)
    cu = there(torch.tensor([0, 4], dtype=torch.int32))
    three = q.repeat(1, 1, 2, 1)[:, :, :3]

    def raw(q, k=q, v=q):
        return lambda: interface_fa.fwd(q, k, v, None, None, 0.0, 1.0, False, -1, -1, 0.0, False)

    def packed(cu_q, cu_k, longest=4):
        options = (None, None, None, None, longest, 4, 0.0, 1.0, False, False, -1, -1, 0.0, False)
        return lambda: interface_fa.varlen_fwd(q[0], q[0], q[0], None, cu_q, cu_k, *options)

    contents = {
        "cu_seqlens_q must rise from 0 to at most 4, the rows of q, got [0, 5]": (BAD, packed(cu // 4 * 5, cu)),
        "max_seqlen_q must be at least 4, the longest sequence of cu_seqlens_q, got 3": (BAD, packed(cu, cu, 3)),
    }

    def in_inference_mode(name, x):
        def call():
            with torch.inference_mode():
                arguments = (q, x) if name == "kv" else (x,)
                operator = getattr(torch.ops.flash_attn, f"attention_{name}packed")
                operator(*arguments, None, None, 4, 4, 0.0, 1.0, False, -1, -1, 0.0, None, False, False)

        return call

    return {
        "k must have dtype torch.float32, got torch.float16": (BAD, lambda: dense(q, q.half(), q)),
        "v must have shape (B, Sk, Hk, Dv) = (1, 4, 2, 16), got (1, 2, 2, 16)": (BAD, lambda: dense(q, q, q[:, :2])),
        "k is on meta and q is on": (BAD, raw(q, torch.zeros(q.shape, device="meta"))),
        "v must have a contiguous last dimension": (BAD, raw(q, q, there(torch.zeros(1, 4, 2, 32))[..., ::2])),
        "q must have 4 dimensions (B, Sq, H, D), got shape (4, 2, 16)": (BAD, raw(q[0])),
        "q must be float16, bfloat16 or float32, got torch.int32": (BAD, raw(q.int(), q.int(), q.int())),
        "batch size B must be positive, got q of shape (0, 4, 2, 16)": (BAD, raw(q[:0], q[:0], q[:0])),
        "head dims must be at least 1, got D = 0": (BAD, raw(q[..., :0], q[..., :0])),
        "must divide the number of query heads H, got H = 2 in q and Hk = 3": (BAD, lambda: dense(q, three, three)),
        "alibi_slopes must have shape (H,) = (2,), got (3,)": (
            BAD,
            lambda: dense(q, q, q, alibi_slopes=there(torch.zeros(3))),
        ),
        "cu_seqlens_k is None": (BAD, packed(cu, None)),
        "max_seqlen_q must not be negative, got -1": (BAD, packed(cu, cu, -1)),
        **({} if q.is_cuda else contents),
        "qkv must have 5 dimensions (B, S, 3, H, D)": (BAD, in_inference_mode("qkv", q)),
        "kv must have 5 dimensions (B, Sk, 2, Hk, D)": (BAD, in_inference_mode("kv", q)),
    }


def _stored(there):
    q, _ = _dense(there)
    pages, table = there(torch.zeros(2, 16, 2, 16)), there(torch.zeros(1, 2, dtype=torch.int32))
    cu, used = there(torch.tensor([0, 4], dtype=torch.int32)), there(torch.tensor([20], dtype=torch.int32))
    cache = _cache_of(q)

    def paged(return_softmax=False, **options):
        if return_softmax:
            rest = (4, 4, 0.0, 1.0, False, False, -1, -1, 0.0, True)
            return lambda: interface_fa.varlen_fwd(q[0], pages, pages, None, cu, cu, None, None, table, None, *rest)
        return lambda: flash_attn_varlen_func(q[0], pages, pages, cu, cu, 4, 4, block_table=table, **options)

    beyond = {
        "cache_batch_idx must be from 0 to 0, the rows of k, got [1]": (BAD, cache(cache_batch_idx=cu[1:] // 4)),
        "cache_seqlens must be from 0 to 4, the slots of a sequence less the 0 keys appended, got [20]": (
            BAD,
            cache(cache_seqlens=used),
        ),
        "leftpad must be from 0 to 4, the slots of a sequence, got [20]": (
            BAD,
            cache(cache_seqlens=cu[1:], cache_leftpad=used),
        ),
        "block_table must hold pages from 0 to 1, those of k, got [0, 2]": (
            BAD,
            cache(q, pages, pages, cache_seqlens=used, block_table=table + cu // 2),
        ),
    }
    return {
        # Their contents are not read on a GPU.
        **({} if q.is_cuda else beyond),
        "has no dropout over stored keys, got 0.1": (MISSING, paged(dropout_p=0.1)),
        "return_softmax=True needs dropout, which pages do not have": (BAD, paged(True)),
        "num_splits must be from 0 to 128, got 129": (BAD, cache(num_splits=129)),
        "num_splits > 1 is not supported with block_table, got num_splits = 2": (
            BAD,
            lambda: interface_fa.varlen_fwd(
                q[0], pages, pages, None, cu, cu, None, None, table, None, 4, 4, 0.0, 1.0, False, False, -1, -1, 0.0,
                False, None, 2,
            ),
        ),
        "k must have a row of the cache for each of the 1 sequences": (BAD, cache(q, pages, pages)),
        "k must have pages of at least one slot": (BAD, cache(q, pages[:, :0], pages[:, :0], block_table=table)),
        "block_table and cache_batch_idx were both given": (
            BAD,
            cache(q, pages, pages, cache_batch_idx=cu[:1], block_table=table),
        ),
    }  # fmt: skip


def _cache_of(q):
    """flash_attn_with_kvcache as a call; copies of q are the caches unless `given` begins with q and others."""

    def cache(*given, **options):
        given = (q, q.clone(), q.clone(), *given) if len(given) < 3 or given[0] is not q else given
        return lambda: flash_attn_with_kvcache(*given, **options)

    return cache


def _appending(there):
    q, _ = _dense(there)
    pages, table = there(torch.zeros(2, 16, 2, 16)), there(torch.zeros(1, 2, dtype=torch.int32))
    rotary, cache = there(torch.zeros(4, 8)), _cache_of(q)
    turned = dict(k=q, v=q, cache_seqlens=0, rotary_cos=rotary, rotary_sin=rotary)
    return {
        "k and v come together, got only k": (BAD, cache(k=q, cache_seqlens=0)),
        "cache_seqlens is missing": (BAD, cache(k=q, v=q)),
        "q must not have more rows than the cache has slots": (
            BAD,
            cache(q, q[:, :2].clone(), q[:, :2].clone(), k=q[:, :1], v=q[:, :1], cache_seqlens=0),
        ),
        "cache_seqlens and k need 5 slots of a sequence, but k_cache holds 4; make": (
            BAD,
            cache(k=q, v=q, cache_seqlens=1),
        ),
        "but block_table names pages for 32; give block_table more": (
            BAD,
            cache(q, pages, pages, q, q, cache_seqlens=30, block_table=table),
        ),
        "rotary_cos was given without k": (BAD, cache(rotary_cos=rotary, rotary_sin=rotary)),
        "come together, got only rotary_cos": (BAD, _raw_cache(q, rotary, None)),
        "rotary_cos must have dtype": (BAD, cache(**{**turned, "rotary_cos": rotary.half()})),
        "rotary_cos must rotate at least 2 and at most the D = 16 features": (
            BAD,
            cache(**{**turned, "rotary_cos": there(torch.zeros(4, 9)), "rotary_sin": there(torch.zeros(4, 9))}),
        ),
        "rotary_cos must have a position for each of the 4 slots": (
            BAD,
            cache(**{**turned, "rotary_cos": rotary[:3], "rotary_sin": rotary[:3]}),
        ),
    }


def _raw_cache(q, cos, sin):
    score = (1.0, False, -1, -1, 0.0, True, 0)
    used = torch.zeros(1, dtype=torch.int32, device=q.device)
    storage = (used, cos, sin, None, None, None, None, None)
    return lambda: interface_fa.fwd_kvcache(q, q.clone(), q.clone(), q, q, *storage, *score)


def _raw(there):
    q, _ = _dense(there)
    raw = (q, q, q, None, None, 0.0, 1.0, False, -1, -1, 0.0, False)
    return {
        "has no fp8, which descale_q is for; pass descale_q=None": (MISSING, lambda: interface_fa.fwd(*raw, None, q)),
        # As upstream's own function has it, behind gen_.
        "has no fp8, which descale_q is for": (
            MISSING,
            lambda: interface_fa.varlen_fwd(*_packed(q), 4, 4, 0.0, 1.0, False, False, -1, -1, 0.0, False, None, q),
        ),
        "the `generator` argument is no longer supported": (BAD, lambda: interface_fa.fwd(*raw, torch.Generator())),
        "return_softmax=True needs dropout_p > 0, got 0.0": (BAD, lambda: interface_fa.fwd(*raw[:-1], True)),
    }


def _packed(q):
    cu = torch.tensor([0, 4], dtype=torch.int32, device=q.device)
    return q[0], q[0], q[0], None, cu, cu, None, None, None, None


def _tuning(there):
    q, dense = _dense(there)

    def tuned(cache: str):
        tuning._memory.clear()
        with mock.patch.dict(os.environ, {tuning.VARIABLE: "yes", "XDG_CACHE_HOME": cache}):
            dense(q, q, q)

    def damaged():
        with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": cache}):
            file = tuning.cache_file(q.device)
            file.parent.mkdir(parents=True)
            file.write_text('{"forward/float32/d16x16": [64, 64]}')
            tuned(cache)

    def unwritable():
        with tempfile.NamedTemporaryFile() as file:
            tuned(file.name)

    def captured():
        # Any device that is not the CPU's will do: nothing gets there.
        kind = tuning.Kind("forward", q.dtype, 16, 16, False, False)
        with mock.patch.object(tuning, "cache_file", lambda device: Path("nowhere")):
            with mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
                tuning._memory.clear()
                tuning._tuned(kind, torch.device("cuda"), lambda settings: None, tuning.Settings(16, 64, 4, 1))

    def asked(value):
        with mock.patch.dict(os.environ, {tuning.VARIABLE: value}):
            dense(q, q, q)

    return {
        "is 'maybe'; accepted, in any case: true, 1, on, yes to measure tile sizes": (BAD, lambda: asked("maybe")),
        "must hold tuned settings": (BAD, damaged),
        "tuned settings cannot be written to": (BAD, unwritable),
        "and a graph is being captured": (BAD, captured),
    }
