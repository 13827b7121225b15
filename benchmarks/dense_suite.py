"""Dense rows, ours against torch: on the CPU with what must be reached, on a GPU for comparison."""

from __future__ import annotations

from functools import partial

from problems import DIRECTIONS, Problem, against_torch
from rows import Row

MASKS = ("full", "causal")
TOKENS, WIDTH = 16384, 2048  # on a GPU: B * S and H * D, where --batch and --heads do not say
SHORT = 512  # the length whose causal forward has a bound of its own
# Ratios to torch that a CPU with AVX512-BF16 must reach at B=1 H=8 S=2048, D = 64 and 128.
REQUIRED = {
    ("bf16", "full", "forward"): 2.2,
    ("bf16", "causal", "forward"): 2.6,
    ("bf16", "full", "backward"): {64: 1.8, 128: 1.6},
    ("bf16", "causal", "backward"): 1.9,
    ("fp16", "full", "forward"): 1.8,
    ("fp16", "causal", "forward"): 1.8,
    ("fp16", "full", "backward"): 10.0,
    ("fp16", "causal", "backward"): 10.0,
    ("fp32", "full", "forward"): 1.15,
    ("fp32", "causal", "forward"): 1.3,
    ("fp32", "full", "backward"): 1.1,
    ("fp32", "causal", "backward"): 1.1,
}
REQUIRED_SHORT = {"bf16": 3.0}  # other dtypes: what their causal forward must reach at any length
REQUIRED_AVX2 = 1.1


def required(options, dtype, mask, direction, problem):
    """The bound of a row, or None."""
    shape = (problem.B, problem.H, problem.S)
    if options.device != "cpu" or problem.D not in (64, 128):
        return None
    if shape == (1, 8, SHORT) and (mask, direction, problem.D) == ("causal", "forward", 64):
        return REQUIRED_SHORT.get(dtype, REQUIRED[dtype, mask, direction])
    if shape != (1, options.H, options.S):
        return None
    bound = REQUIRED[dtype, mask, direction]
    return bound[problem.D] if isinstance(bound, dict) else bound


def dense_row(options, dtype, D, S, mask, direction):
    gpu = options.device == "cuda"
    B = options.batch or (max(1, TOKENS // S) if gpu else 1)
    H = options.heads or (max(1, WIDTH // D) if gpu else options.H)
    arguments = {"causal": mask == "causal"}
    problem = Problem(dtype, direction, S, D, B, H, device=options.device, arguments=arguments)
    return Row(
        "dense",
        f"{dtype} D{D} S{S} {mask} {direction}",
        dtype,
        partial(against_torch, problem, options.against),
        required=required(options, dtype, mask, direction, problem),
        work=problem.flop(),
        setting={**problem.recorded(), "mask": mask},
        device=options.device,
    )


def dense_rows(options):
    """The grid of dtypes, head dims and lengths; with the default lengths also the short causal forward."""
    rows = [
        dense_row(options, dtype, D, S, mask, direction)
        for dtype in options.dtypes
        for D in options.head_dims
        for S in options.lengths
        for mask in MASKS
        for direction in DIRECTIONS
    ]
    if options.short_rows and 64 in options.head_dims:
        rows += [dense_row(options, dtype, 64, SHORT, "causal", "forward") for dtype in options.dtypes]
    return rows


def avx2_rows(options):
    """Dense rows that avx2.py measures in a process of its own."""
    rows = []
    for dtype in options.suite_dtypes:
        for D in (64, 128):
            for mask in MASKS:
                for direction in DIRECTIONS:
                    row = dense_row(options, dtype, D, options.S, mask, direction)
                    row.suite, row.name, row.build = "avx2", f"avx2 {row.name}", None
                    row.required, row.peer = REQUIRED_AVX2, "torch limited to AVX2"
                    rows.append(row)
    return rows
