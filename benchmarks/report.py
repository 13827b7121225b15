"""What the benchmark prints, stores and draws."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from dense_suite import MASKS, TOKENS, WIDTH
from problems import DIRECTIONS, PEERS

import flash_attn


def processor(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def setting(args):
    """Where and how the numbers were taken."""
    peer = f"torch {torch.__version__} SDPA"
    capability = getattr(getattr(torch.backends, "cpu", None), "get_cpu_capability", None)
    if args.device == "cuda":
        peer += " FlashAttention-2" if args.against == "torch" else " math"
    elif capability:
        peer += f" ({capability()})"
    tokens, width = f"B = {TOKENS} / S", f"H = {WIDTH} / D"
    shape = f"{args.batch or tokens}, {args.heads or width}"
    if args.device == "cpu":
        shape = f"B={args.batch or 1} H={args.heads or args.H}"
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/attention.py", *sys.argv[1:]]),
        "machine": f"{processor(args.device)}, {platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flash_attn": f"{flash_attn.__version__} (backend {flash_attn.__backend_version__})",
        "peer": peer if PEERS[args.against] else "none",
        "shape": f"{shape}; ours (B, S, H, D), peer (B, H, S, D), both contiguous",
        "suites": " ".join(args.suites),
    }


def heading(against):
    peer = f"{'peer':>11}{'per s':>14}{'value':>8} {'required':<17}" if PEERS[against] else ""
    return f"{'row':<46}{'ours':>11}{'per s':>14}{peer}{'error':>9}  instruction set; peer"


def speed(row, seconds, scale=1.0):
    """Work per second as text: GFLOP/s or GB/s."""
    if not row.work:
        return ""
    return f"{row.work / scale / seconds / 1e9:.1f} {'GFLOP' if row.unit == 'FLOP' else 'GB'}"


def verdict(row):
    if row.required is None:
        return "reported"
    sign, missed = ("<=", "ABOVE") if row.quantity == "cost" else (">=", "BELOW")
    return f"{sign} {row.required:<5.4g} {'ok' if row.met else missed}"


def duration(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def line(row):
    text = f"{row.name:<46}{duration(row.median):>11}{speed(row, row.median):>14}"
    if row.peer_seconds:
        peer = f"{duration(row.peer_median):>11}{speed(row, row.peer_median, row.scale):>14}"
        text += f"{peer}{row.value:>8.2f} {verdict(row):<17}"
    error = f"{row.error:>9.1e}" if row.error is not None else " " * 9
    notes = [row.instruction_set or "-", row.peer if row.peer_seconds else "none"]
    if row.aside_seconds:
        notes.append(f"less {duration(statistics.median(row.aside_seconds))} for reading the bias")
    return f"{text}{error}  {'; '.join(notes)}"


def summary(rows):
    """Lines: of each suite how many rows reach what is required, the mean of the dense ratios, the rows that miss."""
    lines = [f"{'suite':<12}{'rows':>6}{'met':>6}{'missed':>8}{'reported':>10}"]
    for suite in dict.fromkeys(row.suite for row in rows):
        verdicts = [row.met for row in rows if row.suite == suite]
        counts = [len(verdicts), *(sum(verdict is kind for verdict in verdicts) for kind in (True, False, None))]
        lines.append(f"{suite:<12}{counts[0]:>6}{counts[1]:>6}{counts[2]:>8}{counts[3]:>10}")
    dense = [row for row in rows if row.suite == "dense"]
    if dense:
        slowest = min(dense, key=lambda row: row.ratio)
        mean = statistics.geometric_mean(row.ratio for row in dense)
        lines.append(f"\ngeometric mean of the dense ratios {mean:.2f}x, lowest {slowest.ratio:.2f}x ({slowest.name})")
    missed = [row for row in rows if row.met is False]
    if missed:
        lines += ["\nmissed:", *(f"{row.name:<46}{row.value:>8.2f} {verdict(row)}" for row in missed)]
    return lines


def write_json(path, where, rows):
    """Setting and rows; the file is replaced as a whole, so that an interrupted run leaves the rows it has measured."""
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps({"setting": where, "rows": [row.record() for row in rows]}, indent=1))
    os.replace(partial, path)


def plot(rows, against, path):
    """GFLOP/s of the dense rows over S, one panel per direction and mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(12, 8), squeeze=False)
    for axes, (direction, mask) in zip(grid.flat, ((d, m) for d in DIRECTIONS for m in MASKS)):
        panel = [row for row in rows if (row.setting["direction"], row.setting["mask"]) == (direction, mask)]
        for index, (dtype, D) in enumerate(sorted({(row.dtype, row.setting["D"]) for row in panel})):
            curve = [row for row in panel if (row.dtype, row.setting["D"]) == (dtype, D)]
            curve.sort(key=lambda row: row.setting["S"])
            lengths = [row.setting["S"] for row in curve]
            axes.plot(lengths, gflops(curve, "median"), "o-", color=f"C{index}", label=f"{dtype} D={D}")
            if PEERS[against]:
                label = f"{dtype} D={D}, {against}"
                axes.plot(lengths, gflops(curve, "peer_median"), "x--", color=f"C{index}", label=label)
        axes.set(title=f"{direction}, {mask}", xlabel="S", ylabel="GFLOP/s", ylim=(0, None))
        axes.set_xscale("log", base=2)
        lengths = sorted({row.setting["S"] for row in panel})
        axes.set_xticks(lengths, [str(S) for S in lengths])
    # The same in every panel that has curves.
    legend = max((axes.get_legend_handles_labels() for axes in grid.flat), key=lambda found: len(found[1]))
    figure.legend(*legend, loc="lower center", ncol=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


@contextmanager
def panels_by_direction(rows, height, path):
    """Yields a panel and its rows for each direction that there is, side by side; the figure is written at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    there = [direction for direction in DIRECTIONS if any(row.setting["direction"] == direction for row in rows)]
    figure, grid = pyplot.subplots(1, len(there), figsize=(6 * len(there), height), sharey=True, squeeze=False)
    for axes, direction in zip(grid[0], there):
        axes.set_title(direction)
    yield [
        (axes, [row for row in rows if row.setting["direction"] == direction])
        for axes, direction in zip(grid[0], there)
    ]
    grid[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def gflops(rows, time):
    return [row.work / getattr(row, time) / 1e9 for row in rows]
