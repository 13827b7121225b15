"""Rows of the CPU that compare this package with itself, and short calls: area, dims, features, small, threads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from problems import (
    DIRECTIONS,
    FEATURES,
    SHORT_DIRECTIONS,
    Problem,
    against_torch,
    beside,
    call_of,
    head_error,
    our_calls,
)
from rows import Calls, Row

import flash_attn

WITHIN_AREA = 0.88  # of the dense rate
WITHIN_DIMS = {576: 0.75}  # of D=128's rate; 0.85 where not named
COSTS = {"dropout": 1.35, "bias": 1.25}  # 1.15 where not named
SPEED_UP, SPEED_UP_FEW_HEADS = 1.85, 1.7


def grid(options, head_dims=(64, 128)):
    return [(dtype, D, way) for dtype in options.suite_dtypes for D in head_dims for way in DIRECTIONS]


def rate_row(suite, name, problem, base, area, build, required):
    """A row whose value is our rate over that of `base`, another problem of ours."""
    work = problem.flop(area)
    return Row(
        suite,
        name,
        problem.dtype,
        build,
        peer=f"ours dense, D={base.D}",
        quantity="rate",
        scale=work / base.flop(),
        required=required,
        work=work,
        setting=problem.recorded(),
    )


def varlen_calls(problem, lengths, base):
    """flash_attn_varlen_func over sequences of these lengths, next to the dense call of `base`."""
    packed = replace(problem, S=sum(lengths))
    *tensors, dout = (x[0] for x in packed.tensors())
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    def attention(q, k, v):
        return flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths))

    call = call_of(attention, problem.direction, tensors, dout)

    def check():
        return head_error(call(), lambda x: x[-lengths[-1] :, -1], tensors, dout, problem, {})

    dense = our_calls(base)
    return Calls(call, dense.ours, check=check, kernel=dense.kernel, instruction_set=dense.instruction_set)


def area_rows(options):
    """Causal, windowed and varlen work: its rate, counting what the masks leave, over the dense rate."""
    rows, S = [], options.S
    masks = {
        "causal": {"causal": True},
        "window-left": {"window_size": (S // 4, 0)},
        "window-both": {"window_size": (S // 8, S // 8)},
    }
    lengths = [S, S * 3 // 2 - 71, S * 5 // 4 - 60]
    for dtype, D, direction in grid(options):
        base = Problem(dtype, direction, S, D, H=options.H)
        start, end = f"area {dtype} D{D}", f"{direction}"
        for name, arguments in masks.items():
            problem = replace(base, arguments=arguments)
            build = partial(beside, problem, base)
            rows.append(rate_row("area", f"{start} {name} {end}", problem, base, problem.seen(), build, WITHIN_AREA))
        area = sum(length**2 for length in lengths)
        build = partial(varlen_calls, base, lengths, base)
        rows.append(rate_row("area", f"{start} varlen {end}", base, base, area, build, WITHIN_AREA))
    return rows


def dims_rows(options):
    """Other head dims: the rate over D=128's."""
    rows = []
    for dtype, (D, Dv), direction in grid(options, [(32, 32), (80, 80), (96, 96), (192, 192), (256, 256), (576, 512)]):
        base = Problem(dtype, direction, options.S, 128, H=options.H)
        problem = replace(base, D=D, Dv=Dv)
        name = f"dims {dtype} D{D} {direction}" if D == Dv else f"dims {dtype} D{D} Dv{Dv} {direction}"
        build, bound = partial(beside, problem, base), WITHIN_DIMS.get(D, 0.85)
        rows.append(rate_row("dims", name, problem, base, options.S**2, build, bound))
    return rows


def features_rows(options):
    """Score features: the time over that of the plain call. A sum reads a dense bias; its time is taken off."""
    rows = []
    for dtype, D, direction in grid(options):
        base = Problem(dtype, direction, options.S, D, H=options.H)
        for feature in FEATURES:
            problem = replace(base, feature=feature)
            row = Row(
                "features",
                f"features {dtype} D{D} {feature} {direction}",
                dtype,
                partial(beside, problem, base),
                peer="ours plain",
                quantity="cost",
                required=COSTS.get(feature, 1.15),
                work=problem.flop(),
                setting={**problem.recorded(), "feature": feature},
            )
            rows.append(row)
    return rows


def small_rows(options):
    """Short calls through Python, where latency counts: B=1 H=8 S=64 D=64."""
    rows = []
    for dtype in options.dtypes:
        for direction in SHORT_DIRECTIONS:
            problem = Problem(dtype, direction, 64, 64)
            build = partial(against_torch, problem)
            name = f"small {dtype} D64 S64 {direction}"
            work, setting = problem.flop(), problem.recorded()
            rows.append(Row("small", name, dtype, build, required=1.0, work=work, setting=setting))
    return rows


def threads_calls(problem):
    """The call with two threads, and with one; both results must have the same bits."""
    calls = our_calls(problem)
    before = torch.get_num_threads()

    def with_threads(count):
        def call():
            torch.set_num_threads(count)
            try:
                return calls.ours()
            finally:
                torch.set_num_threads(before)

        return call

    def check():
        two, one = with_threads(2)(), with_threads(1)()
        pairs = [(two, one)] if isinstance(two, torch.Tensor) else zip(two, one)
        if not all(torch.equal(a, b) for a, b in pairs):
            raise SystemExit(f"{problem}: one and two threads give different bits")
        return calls.check()

    return replace(calls, ours=with_threads(2), peer=with_threads(1), check=check)


def threads_rows(options):
    """Two threads over one, with eight heads and with a single one (fewer than the threads)."""
    rows = []
    for dtype in options.suite_dtypes:
        for direction in DIRECTIONS:
            for mask, H in (("full", options.H), ("causal", options.H), ("full", 1)):
                problem = Problem(dtype, direction, options.S, 128, H=H, arguments={"causal": mask == "causal"})
                row = Row(
                    "threads",
                    f"threads {dtype} D128 H{H} {mask} {direction}",
                    dtype,
                    partial(threads_calls, problem),
                    peer="ours with one thread",
                    quantity="speed-up",
                    required=SPEED_UP_FEW_HEADS if H == 1 else SPEED_UP,
                    work=problem.flop(),
                    setting={**problem.recorded(), "mask": mask},
                )
                rows.append(row)
    return rows
