#!/usr/bin/env python3
"""Compare builds of libflash_attn in one process, in random turns: what a change of the CPU kernels brings.

    python benchmarks/builds.py before.so after.so --dtype fp32 --head-dim 36 --queries 1 --keys 2048
    python benchmarks/builds.py before.so after.so copy_of_before.so --batch 8 --heads 32 --kv-heads 8 --head-dim 128
        --queries 1 --keys 16384 --page 16 --sum

Each build computes the same call, forward or with --backward, on the same tensors, through the C interface
(flash_attn/flash_attn.h). Two processes differ by 2 to 3 % whatever they run; here a build and a copy of it differ by
1 % after some hundred rounds, in some processes by 5 % and more, by where memory happens to lie: a copy among the
builds shows it. A round times each build once; its ratios to the first build are of one minute, whatever neighbours do.
Results that differ in a bit from the first build's are pointed out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys

import torch
from timing import sample

DTYPES = {"fp16": (0, torch.float16), "bf16": (1, torch.bfloat16), "fp32": (2, torch.float32), "i32": (4, torch.int32)}
NUMBERS = {dtype: number for number, dtype in DTYPES.values()} | {torch.int64: 5, torch.bool: 6}
FEATURES = ("alibi", "softcap", "padding-mask", "dropout", "bias")


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("ndim", ctypes.c_int32)]
    _fields_ += [("sizes", ctypes.c_int64 * 4), ("strides", ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, x):
        return cls(x.data_ptr(), NUMBERS[x.dtype], x.dim(), tuple(x.shape), tuple(x.stride()))


def structure(name, *fields):
    """A struct whose first field is its size; fields are names of tensors, or (name, type)."""
    fields = [(field, Tensor) if isinstance(field, str) else field for field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": [("struct_size", ctypes.c_size_t), *fields]})


Problem = structure(
    "Problem",
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
    *[("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64)],
    *[("softmax_scale", ctypes.c_double), ("softcap", ctypes.c_double)],
    *[("causal", ctypes.c_int32), ("reserved", ctypes.c_int32)],
    *[("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64)],
    *["alibi_slopes", ("dropout_p", ctypes.c_double), "rng_state"],
    *["attn_bias", "attn_mask", "key_begin", "key_end", "block_table", "cache_batch_idx", "seqused_k", "leftpad_k"],
    *[("num_splits", ctypes.c_int64), "learnable_sink"],
)
ForwardArgs = structure("ForwardArgs", ("problem", ctypes.POINTER(Problem)), "out", "lse", "s_dmask")
BackwardArgs = structure(
    *["BackwardArgs", ("problem", ctypes.POINTER(Problem)), "dout", "out", "lse"],
    *["dq", "dk", "dv", "softmax_d", "dlse", "dbias", "dsink"],
)
Executor = structure(
    *["Executor", ("num_threads", ctypes.c_int32), ("reserved", ctypes.c_int32)],
    *[("run", ctypes.c_void_p), ("context", ctypes.c_void_p)],
)


class Call:
    """One call and its tensors, for any build."""

    def __init__(self, args):
        dtype, generator = DTYPES[args.dtype][1], torch.Generator().manual_seed(args.seed)
        B, Hk, D = args.batch, args.kv_heads or args.heads, args.head_dim
        shape = (B, args.keys, Hk, D)
        q = torch.randn(B, args.queries, args.heads, D, generator=generator).to(dtype)
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.out, lse = torch.empty_like(q), torch.empty(B, args.heads, args.queries)
        self.tensors = {"q": q, "k": k, "v": v}
        if args.page:
            pages = torch.randperm(B * args.keys // args.page, generator=generator).view(B, -1).to(torch.int32)
            lengths = torch.full((B,), args.keys, dtype=torch.int32)
            k, v = (x.view(-1, args.page, Hk, D) for x in (k, v))
            self.tensors |= {"k": k, "v": v, "block_table": pages, "seqused_k": lengths}
        self.problem = Problem(struct_size=ctypes.sizeof(Problem), softmax_scale=D**-0.5, causal=args.causal)
        self.problem.window_left, self.problem.window_right = args.window
        self.add_feature(args.feature, args, generator)
        for name, x in self.tensors.items():
            setattr(self.problem, name, Tensor.of(x))
        self.forward = self.filled(ForwardArgs, out=self.out, lse=lse)
        self.results = [self.out]
        # Without an executor a build uses a pool of its own, with one thread per processor.
        self.executor = ctypes.byref(Executor(ctypes.sizeof(Executor), 1)) if args.one_thread else None
        self.backward = None
        if args.backward:
            dout = torch.randn(self.out.shape, generator=generator).to(dtype)
            self.results = [torch.empty_like(x) for x in (q, k, v)]
            gradients = dict(zip(("dq", "dk", "dv"), self.results))
            self.backward = self.filled(
                BackwardArgs, dout=dout, out=self.out, lse=lse, softmax_d=torch.empty_like(lse), **gradients
            )

    def add_feature(self, name, args, generator):
        """The score feature as the benchmark's rows of features have it (problems.py)."""
        B, H, Sq, Sk = args.batch, args.heads, args.queries, args.keys
        if name == "alibi":
            self.tensors["alibi_slopes"] = torch.rand(H, generator=generator)
        if name == "softcap":
            self.problem.softcap = 30.0
        if name == "padding-mask":
            self.tensors["attn_mask"] = (torch.arange(Sk) < Sk - max(1, Sk // 50)).repeat(B, 1)
        if name == "dropout":
            self.problem.dropout_p = 0.1
            self.tensors["rng_state"] = torch.tensor([args.seed, 0])
        if name == "bias":
            self.tensors["attn_bias"] = torch.randn(B, H, Sq, Sk, generator=generator).to(self.out.dtype)

    def filled(self, kind, **tensors):
        """Arguments of this problem, whose tensors are kept."""
        self.tensors |= tensors
        args = kind(ctypes.sizeof(kind), ctypes.pointer(self.problem))
        for name, x in tensors.items():
            setattr(args, name, Tensor.of(x))
        return args

    def by(self, path):
        """A function that makes the call with the library at `path`; what backward reads is there then."""
        library = ctypes.CDLL(path)
        library.flash_attn_last_error.restype = ctypes.c_char_p

        def make(function, args):
            if function(ctypes.byref(args), self.executor):
                raise SystemExit(f"{path}: {library.flash_attn_last_error().decode()}")

        def forward():
            make(library.flash_attn_forward, self.forward)

        forward()
        return (lambda: make(library.flash_attn_backward, self.backward)) if self.backward else forward

    def sum(self):
        for x in (self.tensors["k"], self.tensors["v"]):
            x.view(-1)[: x.numel() // 2 * 2].view(torch.float32).sum()


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "libraries", nargs="+", metavar="LIBRARY", help="a libflash_attn.so; the first is what others are compared with"
    )
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16", help="[bf16]")
    for name, default in [("batch", 1), ("heads", 8), ("head-dim", 64), ("queries", 2048), ("keys", 2048)]:
        add(f"--{name}", type=int, default=default, metavar="N", help=f"[{default}]")
    add("--kv-heads", type=int, metavar="N", help="[as many as heads]")
    add("--causal", action="store_true")
    add("--window", nargs=2, type=int, default=(-1, -1), metavar=("LEFT", "RIGHT"), help="[none]")
    add("--feature", choices=FEATURES, help="a score feature [none]")
    add("--page", type=int, default=0, metavar="N", help="keys in pages of N, in random order [contiguous]")
    add("--sum", action="store_true", help="time a plain sum over K and V too")
    add("--backward", action="store_true", help="time the backward pass [forward]")
    add("--one-thread", action="store_true", help="[one thread per processor]")
    add(
        "--after-dense",
        action="store_true",
        help="before each timed call one without a mask, on other tensors, which takes what was in caches with it; of "
        "short calls the first one alone comes right after it",
    )
    add("--rounds", type=int, default=100, metavar="N", help="[100]")
    add("--seed", type=int, default=0, metavar="N", help="[0]")
    add("--json", metavar="FILE", help="write seconds of each round, too")
    args = parser.parse_args(argv)
    if args.page and args.keys % args.page:
        parser.error(f"--keys {args.keys} is no multiple of --page {args.page}")
    if args.page and args.backward:
        parser.error("--backward takes no --page: caches have no gradients")
    return args


def dense_call(args):
    """The same call without a mask, on other tensors, by the first build."""
    unmasked = argparse.Namespace(**vars(args) | {"window": (-1, -1), "causal": False, "seed": args.seed + 1})
    return Call(unmasked).by(args.libraries[0])


def measured(calls, rounds, seed, before):
    """Seconds of each call in each round, whose order is drawn anew; `before` runs ahead of each."""
    order, times = list(range(len(calls))), [[] for _ in calls]
    draw = random.Random(seed)
    for _ in range(rounds):
        draw.shuffle(order)
        for n in order:
            before()
            times[n].append(sample(calls[n]))
    return times


def main(argv=None):
    args = parse_arguments(argv)
    if args.one_thread:
        torch.set_num_threads(1)
    call, names = Call(args), list(args.libraries)
    calls, outputs = [call.by(name) for name in names], []
    for by_build in calls:
        by_build()
        outputs.append([x.clone() for x in call.results])
    if args.sum:
        names.append("sum")
        calls.append(call.sum)
    before = dense_call(args) if args.after_dense else lambda: None
    times = measured(calls, args.rounds, args.seed, before)
    print(f"{'build':40} {'median':>11} {'least':>11}  to the first: median and quartiles")
    for n, (name, seconds) in enumerate(zip(names, times)):
        ratios = sorted(mine / first for mine, first in zip(seconds, times[0]))
        low, middle, high = (ratios[len(ratios) * part // 4] for part in (1, 2, 3))
        same = n >= len(outputs) or all(map(torch.equal, outputs[n], outputs[0]))
        us = [f"{1e6 * value:8.1f} us" for value in (statistics.median(seconds), min(seconds))]
        print(
            f"{name[-40:]:40} {us[0]} {us[1]}  {middle:.3f} ({low:.3f} to {high:.3f}){'' if same else '  other bits'}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"setting": vars(args), "seconds": dict(zip(names, times))}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
