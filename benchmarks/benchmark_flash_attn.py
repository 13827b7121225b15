#!/usr/bin/env python3
"""Flash attention against standard attention, which keeps the (B, H, S, S) matrix: time, memory, largest difference.

    python benchmarks/benchmark_flash_attn.py
    python benchmarks/benchmark_flash_attn.py --backward --causal --json speed.json --plot speed.png

The GPU where torch finds one, else the CPU. benchmarks/README.md says how the numbers are taken, and
benchmarks/benchmark_flash_attn.schema.json what --json writes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import measuring
import torch

from flash_attn import explain, flash_attn_func

SCHEMA = "benchmark_flash_attn/1"
LENGTHS = [128, 256, 512, 1024, 2048, 4096]


def standard_attention(q, k, v, causal):
    """softmax(q k^T / sqrt(D)) v of q, k, v (B,S,H,D), by its definition in their dtype."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def flash_attention(q, k, v, causal):
    return flash_attn_func(q, k, v, causal=causal)


def call_of(attention, inputs, dout, args):
    """What is timed: the forward pass, with --backward the gradients of all inputs as well. Returns the tensors."""

    def forward():
        return (attention(*inputs, args.causal),)

    def both():
        out = attention(*inputs, args.causal)
        return (out, *torch.autograd.grad(out, inputs, dout))

    return both if args.backward else forward


def measure(S, args, device):
    """One row of the table."""
    generator = torch.Generator().manual_seed(S)
    shape = (args.batch_size, S, args.heads, args.head_dim)
    dtype = measuring.DTYPES[args.dtype]
    *inputs, dout = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    inputs = [x.requires_grad_(args.backward) for x in inputs]
    standard, flash = (call_of(f, inputs, dout, args) for f in (standard_attention, flash_attention))
    difference = max((a.detach() - b.detach()).abs().max().item() for a, b in zip(standard(), flash()))
    memory = [measuring.extra_memory(call, device) for call in (standard, flash)]
    times = [measuring.milliseconds(call, device, args.repeats) for call in (standard, flash)]
    return {
        "seq_len": S,
        "standard_ms": times[0],
        "flash_ms": times[1],
        "speed_up": times[0] / times[1],
        "standard_bytes": memory[0],
        "flash_bytes": memory[1],
        "memory_reduction": memory[0] / memory[1] if all(memory) else None,
        "max_difference": difference,
        "backend_symbol": explain(*inputs, causal=args.causal).kernel,
    }


def table(rows):
    def cell(value, text):
        return "-" if value is None else text.format(value)

    lines = [
        f"{'S':>6}{'standard ms':>13}{'flash ms':>10}{'speed-up':>10}{'standard MB':>13}{'flash MB':>10}{'memory':>9}"
        f"{'max diff':>10}"
    ]
    for row in rows:
        megabytes = [None if row[name] is None else row[name] / 1e6 for name in ("standard_bytes", "flash_bytes")]
        lines.append(
            f"{row['seq_len']:>6}{row['standard_ms']:>13.2f}{row['flash_ms']:>10.2f}{row['speed_up']:>9.2f}x"
            f"{cell(megabytes[0], '{:.1f}'):>13}{cell(megabytes[1], '{:.1f}'):>10}"
            f"{cell(row['memory_reduction'], '{:.1f}x'):>9}{row['max_difference']:>10.1e}"
        )
    return "\n".join(lines)


def summary(rows):
    """Over all lengths; None where memory could not be told."""
    reductions = [row["memory_reduction"] for row in rows if row["memory_reduction"]]
    return {
        "geometric_mean_speed_up": statistics.geometric_mean(row["speed_up"] for row in rows),
        "largest_memory_reduction": max(reductions, default=None),
        "max_difference": max(row["max_difference"] for row in rows),
    }


def plot(rows, path):
    """Time and extra memory over S."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for axes, unit, scale, text in ((panels[0], "ms", 1, "ms"), (panels[1], "bytes", 1e-6, "extra memory, MB")):
        for side in ("standard", "flash"):
            points = [(row["seq_len"], row[f"{side}_{unit}"]) for row in rows if row[f"{side}_{unit}"]]
            axes.plot([S for S, _ in points], [value * scale for _, value in points], "o-", label=side)
        axes.set(xlabel="S", ylabel=text)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def parse_arguments(arguments, device=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    device = device or measuring.best_device()
    default_dtype = "bfloat16" if device.type == "cuda" else "float32"
    add("--seq-lens", nargs="+", type=positive, default=LENGTHS, metavar="S", help="lengths [128 ... 4096]")
    add("--batch-size", type=positive, default=2, metavar="B", help="[2]")
    add("--heads", type=positive, default=8, metavar="H", help="[8]")
    add("--head-dim", type=positive, default=64, metavar="D", help="[64]")
    add("--dtype", choices=measuring.DTYPES, default=default_dtype, help="[bfloat16 on a GPU, float32 on the CPU]")
    add("--causal", action="store_true", help="with a causal mask")
    add("--backward", action="store_true", help="forward and backward together instead of forward alone")
    add("--repeats", type=positive, default=10, metavar="N", help="timed calls a side [10]")
    add("--json", metavar="FILE", help="write setting, config, rows and summary")
    add("--plot", metavar="FILE", help="draw time and memory over S (needs matplotlib)")
    return parser.parse_args(arguments)


def main(arguments):
    device = measuring.best_device()
    args = parse_arguments(arguments, device)
    where = measuring.setting(device)
    for key, value in where.items():
        print(f"{key:>11}: {value}")
    progress, rows = measuring.Progress(len(args.seq_lens), "length"), []
    for S in args.seq_lens:
        progress.step(f"S = {S}")
        rows.append(measure(S, args, device))
    progress.close()
    figures = summary(rows)
    print(f"\n{table(rows)}\n")
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):>26}: {'unknown' if value is None else f'{value:.3g}'}")
    if args.json:
        names = ("batch_size", "heads", "head_dim", "dtype", "causal", "backward", "repeats")
        config = {name: getattr(args, name) for name in names}
        record = {"schema": SCHEMA, "setting": where, "config": config, "rows": rows, "summary": figures}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
