"""Every (function, argument, violation) that must be refused, generated for test_inputs.py.

A function is tried with each violation of each of its arguments.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, List, Tuple

import torch
from functions import CU_K, CU_Q, FUNCTIONS, GRADS, MAX_K, MAX_Q, SAVED, Arguments, B, D, Function, H, Hk


@dataclass(frozen=True)
class Bad:
    """One violation: replacements for arguments, and what the message must hold (regular expressions)."""

    argument: str
    violation: str
    change: Callable[[Arguments], Arguments] = field(compare=False)
    says: Tuple[str, ...] = ()
    error: Tuple[type, ...] = (RuntimeError,)


# What a message may call an argument, where that is not its name.
CALLED = {
    "dropout_p": r"\b(dropout_p|p_dropout)\b",
    "alibi_slopes": r"\balibi_slopes_?\b",
    "kv": r"\b(kv|k|v)\b",
    "qkv": r"\b(qkv|q|k|v)\b",
    "cu_seqlens_q": r"\bcu_seqlens(_[qk])?\b",
    "max_seqlen_q": r"\bmax_seqlen(_q)?\b",
    "window_size_left": r"\bwindow_size(_left)?\b",
    "window_size_right": r"\bwindow_size(_right)?\b",
    "causal": r"\b(is_)?causal\b",
}

DTYPE_NAMES = {
    torch.float16: "float16|Half", torch.float32: "float32|Float", torch.float64: "float64|Double",
    torch.int32: "int32|Int", torch.int64: "int64|Long", torch.uint8: "uint8|Byte", torch.bool: "bool|Bool",
    torch.complex64: "complex64|ComplexFloat", torch.int16: "int16|Short",
}  # fmt: skip


def digits(shape) -> str:
    """A shape in any notation."""
    return r"\D+".join(str(n) for n in shape)


def _replace(name: str, make: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda values: {name: make(values[name])}


def _dtype(name: str, dtype: torch.dtype, accepted: str) -> Bad:
    return Bad(name, f"dtype {str(dtype)[6:]}", _replace(name, lambda x: x.to(dtype)), (DTYPE_NAMES[dtype], accepted))


def _resized(name: str, dim: int, by: int = 1) -> Bad:
    """One dimension longer; the message holds the new size and the shape it should have."""

    def change(values):
        x = values[name]
        shape = list(x.shape)
        shape[dim] += by
        return {name: torch.zeros(shape, dtype=x.dtype)}

    return Bad(name, f"dim {dim} longer", change, (r"must have shape", r"\(.*\d.*\)|\[.*\d.*\]"))


# The letters of an accepted shape; a tensor of no or five dimensions is refused before it is known which.
RANKS = r"\((B|T|H)|1 to 4"


def _ranks(name: str) -> Iterator[Bad]:
    yield Bad(name, "a dimension more", _replace(name, lambda x: x[None]), (RANKS,))
    yield Bad(name, "a dimension less", _replace(name, lambda x: x[0]), (RANKS,))
    yield Bad(name, "no dimensions", _replace(name, lambda x: torch.tensor(1.0)), (RANKS,))


def _strided(name: str) -> Bad:
    """Same values and sizes, last stride 2."""
    return Bad(
        name,
        "last stride 2",
        _replace(name, lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2]),
        (r"contiguous", r"stride", r"\b2\b"),
    )


def _on_meta(name: str) -> Bad:
    return Bad(name, "on another device", _replace(name, lambda x: x.to("meta")), (r"meta", r"\bcpu\b"))


def _no_tensor(name: str, value: Any) -> Bad:
    shown = f"{type(value).__name__}|{re.escape(repr(value))}"
    return Bad(
        name, f"a {type(value).__name__}", _replace(name, lambda x: value), (shown, "Tensor"), (TypeError, RuntimeError)
    )


def floating_tensors(function: Function) -> Iterator[Bad]:
    """q, k, v, their packed forms, dout, out and the gradient buffers."""
    names = [n for n in ("q", "k", "v", "kv", "qkv", "dout", "out", *GRADS) if n in function.takes]
    lead = "qkv" if "qkv" in names else "q"
    for name in names:
        if name == lead:
            for dtype in (torch.int32, torch.uint8, torch.complex64):
                yield _dtype(name, dtype, "float16|Half")
        else:
            for dtype in (torch.float16, torch.float64, torch.int64):
                yield _dtype(name, dtype, "float32")
        yield from _ranks(name)
        if name != "qkv" or function.varlen:  # alone, it may be on any device
            yield _on_meta(name)
        if name not in ("out", *GRADS):
            yield _no_tensor(name, [1.0])
        if name not in ("out", *GRADS) or not function.name.startswith("_flash"):
            yield from [_strided(name)] if function.strict else []
        elif name in GRADS:
            yield _strided(name)
        dims = {
            "q": (),
            "qkv": (-3,),
            "kv": (0, -3, -1) if not function.varlen else (-3, -1),
            "k": (-1,),
            "v": (-3, -2),
        }.get(name, tuple(range(-4 + function.varlen, 0)))
        yield from (_resized(name, dim) for dim in dims)


def saved_tensors(function: Function) -> Iterator[Bad]:
    """softmax_lse and rng_state of the backward functions."""
    if "softmax_lse" in function.takes:
        yield _dtype("softmax_lse", torch.float64, "float32")
        yield _dtype("softmax_lse", torch.float16, "float32")
        yield from _ranks("softmax_lse")
        yield from (_resized("softmax_lse", dim) for dim in range(-3 + function.varlen, 0))
        yield _on_meta("softmax_lse")
        if function.strict:
            yield Bad(
                "softmax_lse",
                "not contiguous",
                _replace("softmax_lse", lambda x: torch.stack((x, x), -1)[..., 0]),
                (r"contiguous", r"stride"),
            )
    if "rng_state" in function.takes:

        def state(make):
            return lambda values: {"rng_state": make(values["rng_state"]), "dropout_p": 0.5}

        yield Bad("rng_state", "missing", state(lambda x: None), (r"0\.5", r"int64", r"\(2,?\)"))
        yield Bad("rng_state", "dtype int32", state(lambda x: x.int()), ("int32", "int64"))
        yield Bad("rng_state", "three words", state(lambda x: torch.arange(3)), (digits((3,)), r"\(2,?\)"))
        yield Bad("rng_state", "two dimensions", state(lambda x: x[None]), (digits((1, 2)), r"\(2,?\)"))
        yield Bad("rng_state", "not contiguous", state(lambda x: torch.arange(4)[::2]), ("contiguous", r"\b2\b"))
        yield Bad("rng_state", "on another device", state(lambda x: x.to("meta")), ("meta", r"\bcpu\b"))


def lengths(function: Function) -> Iterator[Bad]:
    """cu_seqlens and max_seqlen: on the CPU their contents are checked."""
    if not function.varlen:
        return
    shared = "qkv" in function.takes  # one cu_seqlens for both sides
    for side, cu, longest in (("q", CU_Q, MAX_Q), ("k", CU_K, MAX_K)):
        if shared and side == "k":
            return
        name, max_name, total = f"cu_seqlens_{side}", f"max_seqlen_{side}", cu[-1]

        def put(*values, name=name):
            return lambda _: {name: torch.tensor(values, dtype=torch.int32)}

        yield _dtype(name, torch.int64, "int32")
        yield _dtype(name, torch.float32, "int32")
        yield Bad(name, "two dimensions", _replace(name, lambda x: x[None]), (digits((1, 3)), r"\(B ?\+ ?1"))
        yield Bad(name, "no elements", put(), (r"[(\[]0,?[)\]]", r"\(B ?\+ ?1"))
        yield Bad(
            name,
            "not contiguous",
            lambda v, n=name: {n: torch.stack((v[n], v[n]), -1)[:, 0]},
            ("contiguous", r"stride", r"\b2\b"),
        )
        yield _on_meta(name)
        if not shared:
            # Which of the two is blamed is a matter of taste.
            yield Bad(name, "another batch size", put(*cu, cu[-1]), (r"cu_seqlens_k", r"\(B ?\+ ?1", r"\b[34]\b"))
        yield Bad(name, "not from zero", put(1, *cu[1:]), (r"\b0\b", r"\b1\b"))
        yield Bad(name, "decreasing", put(0, 5, 3), (r"decreas", r"\b5\b", r"\b3\b"))
        yield Bad(
            name,
            "beyond the tensor",
            lambda v, n=name, m=max_name, t=total: {n: torch.tensor([0, 1, t + 1], dtype=torch.int32), m: t + 1},
            (rf"\b{total}\b", rf"\b{total + 1}\b"),
        )
        yield Bad(name, "negative", put(0, -3, cu[2]), (r"-3\b",))
        yield Bad(
            max_name,
            "below the longest sequence",
            _replace(max_name, lambda x: x - 1),
            (rf"\b{longest}\b", rf"\b{longest - 1}\b"),
        )
        yield Bad(max_name, "negative", _replace(max_name, lambda x: -4), (r"-4\b",))
        yield Bad(max_name, "a str", _replace(max_name, lambda x: "six"), ("str|six",), (TypeError, RuntimeError))
    yield Bad(
        "cu_seqlens_q",
        "batch 0",
        lambda v: {n: torch.zeros(1, dtype=torch.int32) for n in v if "cu_seq" in n},
        (r"(?i)batch", "positive"),
    )


def scores(function: Function) -> Iterator[Bad]:
    for p in (-0.1, 1.0, 1.5, math.nan, math.inf):
        yield Bad("dropout_p", str(p), _replace("dropout_p", lambda x, p=p: p), (re.escape(f"{p:g}"), r"\[0, 1\)"))
    for value in (math.nan, math.inf, -math.inf):
        yield Bad("softcap", str(value), _replace("softcap", lambda x, v=value: v), (re.escape(str(value)), "finite"))
        yield Bad(
            "softmax_scale",
            str(value),
            _replace("softmax_scale", lambda x, v=value: v),
            (re.escape(str(value)), "finite"),
        )
    yield Bad(
        "softcap", "with dropout", lambda v: {"softcap": 15.0, "dropout_p": 0.25}, ("dropout", r"\b15\b", r"0\.25")
    )
    for name in ("dropout_p", "softcap", "softmax_scale", "causal"):
        yield Bad(name, "a str", _replace(name, lambda x: "half"), ("str|half",), (TypeError, RuntimeError))
    for name in ("window_size_left", "window_size_right"):
        yield Bad(name, "a str", _replace(name, lambda x: "wide"), ("str|wide",), (TypeError, RuntimeError))
        yield Bad(name, "a fraction", _replace(name, lambda x: 2.5), ("float|2.5",), (TypeError, RuntimeError))
    for violation, slopes, says in [
        ("dtype float64", torch.ones(H, dtype=torch.float64), ("float64|Double", "float32")),
        ("dtype float16", torch.ones(H, dtype=torch.float16), ("float16|Half", "float32")),
        ("another H", torch.ones(H + 1), (r"\(H,?\)", rf"\b{H + 1}\b", rf"\b{H}\b")),
        ("another B", torch.ones(B + 1, H), (r"\(B, ?H\)", digits((B + 1, H)))),
        ("another H of (B, H)", torch.ones(B, H - 1), (r"\(B, ?H\)", digits((B, H - 1)))),
        ("three dimensions", torch.ones(1, B, H), (r"\(B, ?H\)", digits((1, B, H)))),
        ("no dimensions", torch.tensor(1.0), (r"\(B, ?H\)|1 to 4",)),
        ("last stride 2", torch.ones(2 * H)[::2], ("contiguous", r"\b2\b")),
        ("on another device", torch.ones(H, device="meta"), ("meta", r"\bcpu\b")),
    ]:
        yield Bad("alibi_slopes", violation, lambda v, s=slopes: {"alibi_slopes": s}, says)
    yield _no_tensor("alibi_slopes", 0.5)


def shape_rules(function: Function) -> Iterator[Bad]:
    """Rules between sizes: B > 0, H % Hk == 0, head dims from 1 to 576."""
    main = [n for n in ("q", "k", "v", "kv", "qkv") if n in function.takes]

    def all_of(make, names):
        return lambda values: {n: make(values[n]) for n in names if n in values}

    keys = [n for n in ("k", "v", "kv", "dk", "dv") if n in function.takes]
    if "qkv" not in main:
        lead = "kv" if "kv" in main else "k"
        yield Bad(
            lead,
            "heads that do not divide H",
            all_of(lambda x: torch.zeros(*x.shape[:-2], 3, D), keys),
            (r"divide", r"\b4\b", r"\b3\b"),
        )
        yield Bad(lead, "no heads", all_of(lambda x: x[..., :0, :], keys), (r"divide", r"\b0\b"))
    wide = [n for n in ("q", "k", "kv", "qkv", "dq", "dk") if n in function.takes]
    for size in (0, 577):
        yield Bad(
            main[0],
            f"head dim {size}",
            all_of(
                lambda x, s=size: torch.zeros(*x.shape[:-1], s),
                [*wide, *(["out", "dout", "v", "dv"] if size == 0 else [])],
            ),
            (rf"\b{size}\b", r"\b1 to 576\b"),
        )
    if "v" in function.takes:
        yield Bad(
            "v",
            "head dim 577",
            all_of(lambda x: torch.zeros(*x.shape[:-1], 577), ["v", "out", "dout", "dv"]),
            (r"\b577\b", r"\b1 to 576\b"),
        )
    if not function.varlen:
        every = [n for n in function.takes if n in (*SAVED, "kv", "qkv")]
        yield Bad(main[0], "batch 0", all_of(lambda x: x[:0], every), (r"(?i)batch", "positive", r"\b0\b"))


def extras(function: Function) -> Iterator[Bad]:
    """What only the raw functions take."""
    if "return_softmax" in function.takes:
        yield Bad("return_softmax", "without dropout", lambda v: {"return_softmax": True}, ("dropout_p",))
    for name, most in (("leftpad_k", 6), ("seqused_k", 6)):
        if name in function.takes:

            def put(*values, name=name, dtype=torch.int32):
                return lambda _: {name: torch.tensor(values, dtype=dtype)}

            yield Bad(name, "dtype int64", put(1, 1, dtype=torch.int64), ("int64", "int32"))
            yield Bad(name, "another batch size", put(1, 1, 1), (r"\(B,\)", r"\(3\)"))
            yield Bad(name, "negative", put(1, -2), ("-2",))
            yield Bad(name, "beyond the sequence", put(1, most + 1), (rf"\b{most}\b", rf"\b{most + 1}\b"))
    if "block_table" in function.takes:
        pages = {"k": torch.zeros(5, 4, Hk, D), "v": torch.zeros(5, 4, Hk, D)}

        def table(*rows, dtype=torch.int32):
            return lambda _: {**pages, "block_table": torch.tensor(rows, dtype=dtype)}

        yield Bad("block_table", "dtype int64", table((0, 1), (2, 3), dtype=torch.int64), ("int64", "int32"))
        yield Bad("block_table", "another batch size", table((0, 1)), (r"\(B, max_pages\)", r"\(1, 2\)"))
        yield Bad("block_table", "a page that is not there", table((0, 1), (5, 3)), (r"from 0 to 4", r"= 5\b"))
        yield Bad("block_table", "a negative page", table((0, -1), (2, 3)), (r"from 0 to 4", "-1"))
        yield Bad("block_table", "too few pages", table((0,), (1,)), (r"\b6 slots", r"1 pages of 4"))
        yield Bad(
            "block_table", "keys without pages", lambda v: {"block_table": torch.zeros(B, 2).int()}, ("num_pages",)
        )
    if "num_splits" in function.takes:
        for splits in (-1, 129):
            yield Bad("num_splits", str(splits), lambda v, n=splits: {"num_splits": n}, (rf"{splits}\b", "0 to 128"))
    if "generator" in function.takes:
        # Checked first: everything else may be wrong too.
        yield Bad(
            "generator",
            "given",
            lambda v: {"generator": torch.Generator(), "q": v["k"][0]},
            (r"`generator` argument is no longer supported", "None"),
        )


def all_bad() -> List[Tuple[Function, Bad]]:
    groups = (floating_tensors, saved_tensors, lengths, scores, shape_rules, extras)
    return [(function, bad) for function in FUNCTIONS for group in groups for bad in group(function)]
