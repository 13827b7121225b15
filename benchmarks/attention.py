#!/usr/bin/env python3
"""Time attention by this package, beside torch's scaled_dot_product_attention (SDPA) in the same process.

One line per (dtype, D, S, mask, direction): median times, GFLOP/s, and the ratio peer time / our time, so that above 1
this package is the faster one. The two are timed in turn (ours, peer, ours, peer, ...), so that a machine that slows
down slows both. Before timing, one head of each line's result is compared with attention by its definition.

On a GPU (--device cuda) the peer is torch's FlashAttention-2, or with --against torch-math its attention by definition;
a sample is a queue of calls between two synchronisations, and the default is 16k tokens with H * D = 2048.

Each side gets the layout it is made for: ours contiguous (B, S, H, D), the peer contiguous (B, H, S, D). Backward means
torch.autograd.grad alone, on a graph that is kept. GFLOP counts 4 B H S^2 D forward, half of it with a causal mask,
and 2.5 times that backward. benchmarks/README.md says how to read the results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

import flash_attn

try:
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # before torch 2.3; only a peer on a GPU needs them
    SDPBackend = sdpa_kernel = None

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DIRECTIONS = ("forward", "backward")
MASKS = ("full", "causal")
# Largest deviation of the checked head, relative to the largest entry of the exact result. A few roundings of the
# output's dtype; a wrong mask, scale or tail is off by far more.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}
SHORTEST_SAMPLE = 0.01  # seconds; shorter calls are repeated within one sample
TOKENS, WIDTH = 16384, 2048  # on a GPU: B * S and H * D, where --batch and --heads do not say


@dataclass
class Row:
    """One line of the table; times are seconds per call."""

    dtype: str
    D: int
    S: int
    mask: str
    direction: str
    B: int
    H: int
    device: str = "cpu"
    kernel: str = ""
    instruction_set: str = ""
    error: float = math.nan
    seconds: list = field(default_factory=list)
    peer_seconds: list = field(default_factory=list)

    @property
    def name(self):
        return f"{self.dtype} D{self.D} S{self.S} {self.mask} {self.direction}"

    @property
    def flop(self):
        forward = 4 * self.B * self.H * self.S**2 * self.D / (2 if self.mask == "causal" else 1)
        return forward * (2.5 if self.direction == "backward" else 1)

    @property
    def ratio(self):
        """Peer's median time over ours, or None without a peer."""
        return statistics.median(self.peer_seconds) / statistics.median(self.seconds) if self.peer_seconds else None

    def record(self):
        """The row as JSON holds it."""
        ours = statistics.median(self.seconds)
        medians = {"median": ours, "gflops": self.flop / ours / 1e9}
        if self.peer_seconds:
            peer = statistics.median(self.peer_seconds)
            medians.update(peer_median=peer, peer_gflops=self.flop / peer / 1e9, ratio=self.ratio)
        return {"name": self.name, **asdict(self), **medians}


def our_attention(q, k, v, causal):
    return flash_attn.flash_attn_func(q, k, v, causal=causal)


def torch_attention(q, k, v, causal):
    """torch's own choice on the CPU, its FlashAttention-2 on a GPU."""
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def torch_math_attention(q, k, v, causal):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


PEERS = {"torch": torch_attention, "torch-math": torch_math_attention, "none": None}


def exact_attention(q, k, v, causal):
    """softmax(Q K^T / sqrt(D)) V of one head by its definition; q, k, v are (S, D)."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def call_of(attention, direction, tensors, dout, causal):
    """A function without arguments that does what is timed."""
    if direction == "forward":
        inputs = [x.detach() for x in tensors]
        return lambda: attention(*inputs, causal)
    inputs = [x.detach().requires_grad_() for x in tensors]
    out = attention(*inputs, causal)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def deviation(row, call, tensors, dout):
    """Largest deviation of the last head of the last sequence from the exact result, relative to the latter."""
    results = call()
    results = [results] if row.direction == "forward" else list(results)
    # One precision above the one tested.
    exact = torch.float64 if row.dtype == "fp32" else torch.float32
    head = [x[-1, :, -1].to(exact) for x in (*tensors, dout)]
    expected = call_of(exact_attention, row.direction, head[:3], head[3], row.mask == "causal")()
    expected = [expected] if row.direction == "forward" else list(expected)
    pairs = [(result[-1, :, -1].to(exact), reference) for result, reference in zip(results, expected)]
    return max(((result - reference).abs().max() / reference.abs().max()).item() for result, reference in pairs)


def sample(call):
    """Seconds per call, over enough calls to be measurable."""
    count, elapsed, begin = 0, 0.0, time.perf_counter()
    while elapsed < SHORTEST_SAMPLE:
        call()
        count += 1
        elapsed = time.perf_counter() - begin
    return elapsed / count


def gpu_sample(call, count):
    """Seconds per call of a queue of `count` calls."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def sampler(row, calls):
    """How the row's calls are timed."""
    if row.device == "cpu":
        return sample
    slowest = max(gpu_sample(call, 3) for call in calls)
    count = max(1, math.ceil(SHORTEST_SAMPLE / slowest))
    return lambda call: gpu_sample(call, count)


def measure(row, against, seconds):
    """Fill in the row: check, then time for about `seconds`, at least five samples a side."""
    generator = torch.Generator().manual_seed(0)
    shape = (row.B, row.S, row.H, row.D)
    *tensors, dout = (
        torch.randn(shape, generator=generator).to(row.device, DTYPES[row.dtype], copy=True) for _ in range(4)
    )
    causal = row.mask == "causal"
    recorded = [x.detach().requires_grad_(row.direction == "backward") for x in tensors]
    explanation = flash_attn.explain(*recorded, causal=causal)
    if row.direction == "backward":
        explanation = explanation.backward
    row.kernel, row.instruction_set = explanation.kernel, explanation.instruction_set

    ours = call_of(our_attention, row.direction, tensors, dout, causal)
    row.error = deviation(row, ours, tensors, dout)
    if not row.error <= TOLERANCE[row.dtype]:
        allowed = TOLERANCE[row.dtype]
        raise SystemExit(f"{row.name}: wrong by {row.error:.2g} of the largest entry; {allowed} is allowed")
    sides = [(ours, row.seconds)]
    if PEERS[against]:
        peer_tensors = [x.transpose(1, 2).contiguous() for x in (*tensors, dout)]
        peer = call_of(PEERS[against], row.direction, peer_tensors[:3], peer_tensors[3], causal)
        sides.append((peer, row.peer_seconds))
    for call, _ in sides:
        call()
    timed = sampler(row, [call for call, _ in sides])
    end = time.perf_counter() + seconds
    while len(row.seconds) < 5 or time.perf_counter() < end:
        for call, samples in sides:
            samples.append(timed(call))


def batch_and_heads(args, D, S):
    gpu = args.device == "cuda"
    return args.batch or (max(1, TOKENS // S) if gpu else 1), args.heads or (max(1, WIDTH // D) if gpu else 8)


def rows_of(args):
    """The rows asked for; a --rows pattern is words that must all be in the row's name."""
    every = [
        Row(dtype, D, S, mask, direction, *batch_and_heads(args, D, S), args.device)
        for dtype in args.dtypes
        for D in args.head_dims
        for S in args.lengths
        for mask in MASKS
        for direction in DIRECTIONS
    ]
    if not args.rows:
        return every
    patterns = [set(pattern.split()) for pattern in args.rows]
    return [row for row in every if any(pattern <= set(row.name.split()) for pattern in patterns)]


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
    shape = (
        f"B={args.batch} H={args.heads}" if args.device == "cpu" else f"{args.batch or tokens}, {args.heads or width}"
    )
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
    }


def line(row):
    ours = statistics.median(row.seconds)
    text = f"{row.name:<34}{ours * 1e3:>10.2f}{row.flop / ours / 1e9:>10.1f}"
    if row.peer_seconds:
        peer = statistics.median(row.peer_seconds)
        text += f"{peer * 1e3:>10.2f}{row.flop / peer / 1e9:>10.1f}{row.ratio:>8.2f}x"
    return f"{text}{row.error:>10.1e}  {row.instruction_set}"


def heading(against):
    peer = f"{'peer ms':>10}{'GFLOP/s':>10}{'ratio':>9}" if PEERS[against] else ""
    return f"{'row':<34}{'ours ms':>10}{'GFLOP/s':>10}{peer}{'error':>10}  instruction set"


def plot(rows, against, path):
    """GFLOP/s over S, one panel per direction and mask."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(12, 8), squeeze=False)
    for axes, (direction, mask) in zip(grid.flat, ((d, m) for d in DIRECTIONS for m in MASKS)):
        panel = [row for row in rows if (row.direction, row.mask) == (direction, mask)]
        for index, (dtype, D) in enumerate(sorted({(row.dtype, row.D) for row in panel})):
            curve = sorted((row for row in panel if (row.dtype, row.D) == (dtype, D)), key=lambda row: row.S)
            for style, samples in (("o-", "seconds"), ("x--", "peer_seconds"))[: 1 + bool(PEERS[against])]:
                speed = [row.flop / statistics.median(getattr(row, samples)) / 1e9 for row in curve]
                label = f"{dtype} D={D}" + (", peer" if samples == "peer_seconds" else "")
                axes.plot([row.S for row in curve], speed, style, color=f"C{index}", label=label)
        axes.set(title=f"{direction}, {mask}", xlabel="S", ylabel="GFLOP/s")
        axes.set_xscale("log", base=2)
        lengths = sorted({row.S for row in panel})
        axes.set_xticks(lengths, [str(S) for S in lengths])
        if panel:
            axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is also torch's name for AMD GPUs [cpu]")
    add("--against", choices=tuple(PEERS), default="torch", help="peer to compare with; torch-math on a GPU [torch]")
    add("--dtypes", nargs="+", choices=DTYPES, metavar="T", help="of fp32, bf16, fp16 [all; on a GPU bf16]")
    add("--head-dims", nargs="+", type=int, default=[64, 128], metavar="D", help="head dimensions [64 128]")
    add("--lengths", nargs="+", type=int, metavar="S", help="sequence lengths [2048; on a GPU 512 to 16384]")
    add("--batch", type=int, metavar="B", help=f"batch size [1; on a GPU {TOKENS} / S]")
    add("--heads", type=int, metavar="H", help=f"heads [8; on a GPU {WIDTH} / D]")
    add("--rows", nargs="+", metavar="WORDS", help='only rows with all these words, such as "bf16 D64 backward"')
    add("--seconds", type=float, metavar="T", help="time per row, at least five samples [3; on a GPU 0.3]")
    add("--threads", type=int, metavar="N", help="threads of both sides [torch's default]")
    add("--quick", action="store_true", help="small and short: does it run, not how fast is it")
    add("--json", metavar="FILE", help="write setting, medians and every sample")
    add("--plot", metavar="FILE", help="draw GFLOP/s over S (needs matplotlib)")
    add("--fail-under", type=float, metavar="R", help="exit with status 1 if a ratio is below R")
    args = parser.parse_args(arguments)
    defaults = dict(dtypes=list(DTYPES), lengths=[2048], batch=1, heads=8, seconds=3.0)
    if args.device == "cuda":
        defaults = dict(dtypes=["bf16"], lengths=[512, 1024, 2048, 4096, 8192, 16384], seconds=0.3)
    if args.quick:
        defaults.update(lengths=[256], batch=1, heads=2, seconds=0.1)
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; --device cpu measures the CPU backend")
    if args.device == "cpu" and args.against == "torch-math":
        parser.error("--against torch-math is for --device cuda; on the CPU use --against torch")
    if PEERS[args.against] and not hasattr(F, "scaled_dot_product_attention"):
        parser.error(
            f"torch {torch.__version__} has no scaled_dot_product_attention to compare with; use --against none"
        )
    if args.against == "none" and args.fail_under is not None:
        parser.error("--fail-under needs a ratio, so --against torch")
    return args


def main(arguments):
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = rows_of(args)
    if not rows:
        raise SystemExit(f"--rows {args.rows}: no row has these words; names look like 'fp32 D64 S2048 causal forward'")
    where = setting(args)
    for key, value in where.items():
        print(f"{key:>12}: {value}")
    print(f"\n{heading(args.against)}")
    for row in rows:
        measure(row, args.against, args.seconds)
        print(line(row), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"setting": where, "rows": [row.record() for row in rows]}, indent=1))
    if args.plot:
        plot(rows, args.against, args.plot)
    if args.against == "none":
        return 0
    slowest = min(rows, key=lambda row: row.ratio)
    mean = statistics.geometric_mean(row.ratio for row in rows)
    print(f"\ngeometric mean of the ratios {mean:.2f}x, lowest {slowest.ratio:.2f}x ({slowest.name})")
    below = [row.name for row in rows if args.fail_under is not None and row.ratio < args.fail_under]
    if below:
        print(f"below {args.fail_under}x: {', '.join(below)}")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
