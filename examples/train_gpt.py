#!/usr/bin/env python3
"""Train a small GPT on real text, with attention by this package and by its plain definition (or by torch's SDPA).

The runs start from the same weights and see the same batches. Each runs in a process of its own, one after the
other, so that each has its own peak of memory. Then the script prints their figures side by side, a sample of
generated text, and whether three promises hold; if one does not, it exits with status 1:

  1. each held-out loss is below that of an interpolated trigram model of the same text and the same split;
  2. the held-out losses of the runs differ by at most 0.02 nats per byte;
  3. the losses on the first batch, computed in fp32, differ by at most 1e-5.

The text is read as bytes; its last tenth is held out. By default it is the standard library of the running Python
(the top-level modules, sorted by name).

Written to --out: train_gpt.json (all figures), train_gpt.png (loss curves), and per run a .json and a checkpoint .pt;
without --resume they replace those of earlier runs.
Ctrl-C ends the step in progress, writes a checkpoint and exits with status 130; --resume continues from it, with the
same losses as if nothing had happened. Several processes: torchrun --nproc_per_node 2 examples/train_gpt.py; they
share each batch, so the losses stay the same up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

RUNS = ("flash", "plain", "sdpa")
RUN_DIFFERENCE = 0.02
FIRST_LOSS_DIFFERENCE = 1e-5
INTERRUPTED = 130
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CAVEAT = """The runs ran one after the other, so their step times carry the machine's noise. Memory on the CPU is the
resident memory of the whole process: Python, torch and the text are in it."""


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--attention", default="flash,plain", metavar="NAMES", help="runs, of flash, plain and sdpa [flash,plain]")
    add("--data", metavar="FILE", help="text to train on [the standard library's sources]")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is also torch's name for AMD GPUs [cpu]")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of matrix products and attention [fp32]")
    add("--seq-len", type=positive, default=512, metavar="S", help="bytes that the model sees at once [512]")
    add("--steps", type=positive, default=500, metavar="N", help="optimizer steps [500]")
    add("--batch", type=positive, default=4, metavar="B", help="sequences per step, over all processes [4]")
    add("--seed", type=int, default=0, metavar="N", help="of weights, batches and the sample [0]")
    add("--layers", type=positive, default=4, metavar="N", help="transformer blocks [4]")
    add("--width", type=positive, default=128, metavar="C", help="model width [128]")
    add("--heads", type=positive, default=4, metavar="H", help="attention heads [4]")
    add("--lr", type=float, default=2e-3, metavar="X", help="peak learning rate [0.002]")
    add("--threads", type=positive, metavar="N", help="threads per process [torch's default]")
    add("--sample", type=positive, default=300, metavar="N", help="bytes of text to generate [300]")
    add("--checkpoint-every", type=positive, default=100, metavar="N", help="steps between checkpoints [100]")
    add("--resume", action="store_true", help="continue from the checkpoints in --out, where there are any")
    add("--no-check", action="store_true", help="report the promises, but exit with 0 even if one fails")
    add("--out", default="out", metavar="DIR", help="folder for results and checkpoints [out]")
    add("--worker", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.runs = args.attention.split(",")
    if not set(args.runs) <= set(RUNS) or len(set(args.runs)) < len(args.runs):
        parser.error(f"--attention {args.attention}: give one or more of {', '.join(RUNS)}, as in flash,plain")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if args.data is not None and not Path(args.data).is_file():
        parser.error(f"--data {args.data}: no such file")
    return args


def run_in_process(name, arguments):
    """Train with attention `name` in a process of its own; returns its exit status. Ctrl-C is passed on to it."""
    worker = subprocess.Popen([sys.executable, __file__, *arguments, "--worker", name])
    handlers = {number: signal.signal(number, lambda n, _: worker.send_signal(n)) for number in STOP_SIGNALS}
    try:
        return worker.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check_promises(reports, trigram_loss):
    """List of (what is promised, measured, limit, kept); the runs after the first are compared with it."""
    promises = []
    for name, report in reports.items():
        loss = report["held_out_loss"]
        promises.append((f"held-out loss, {name}, below the trigram model's", loss, trigram_loss, loss < trigram_loss))
    first, *others = reports
    differences = (
        ("held-out losses of the two runs differ by at most", "held_out_loss", RUN_DIFFERENCE),
        ("first losses in fp32 differ by at most", "first_loss_fp32", FIRST_LOSS_DIFFERENCE),
    )
    for other in others:
        for what, field, limit in differences:
            difference = abs(reports[first][field] - reports[other][field])
            note = f", {first} and {other}" if len(others) > 1 else ""
            promises.append((what + note, difference, limit, difference <= limit))
    return promises


def table(reports, trigram_loss):
    """Lines of the figures, one column per run; of two runs also the second's figure over the first's."""

    def row(title, values, form="{:.4f}", ratio=False):
        cells = [form.format(value) if value is not None else "unknown" for value in values]
        if ratio and len(values) == 2 and None not in values:
            cells.append(f"{values[1] / values[0]:.2f}x" if values[0] > 0 else "-")
        return f"{title:<34}" + "".join(f"{cell:>14}" for cell in cells)

    def column(field, scale=1.0):
        return [None if r[field] is None else r[field] * scale for r in reports.values()]

    last_losses = [statistics.mean(report["train_losses"][-20:]) for report in reports.values()]
    peak, before = column("memory_peak_bytes", 1e-6), column("memory_before_bytes", 1e-6)
    grown = [None if p is None else p - b for p, b in zip(peak, before)]
    heading = [*reports, " / ".join(reversed(list(reports)))] if len(reports) == 2 else list(reports)
    return [
        row("", heading, "{}"),
        row("first loss in fp32, nats/byte", column("first_loss_fp32"), "{:.6f}"),
        row("last train loss, nats/byte", last_losses),
        row("held-out loss, nats/byte", column("held_out_loss")),
        row("  trigram model", [trigram_loss] * len(reports)),
        row("median step, ms", column("step_seconds", 1e3), "{:.1f}", ratio=True),
        row("tokens/s", column("tokens_per_second"), "{:,.0f}"),
        row("peak memory, MB", peak, "{:.0f}", ratio=True),
        row("  of which grown by the steps", grown, "{:.0f}", ratio=True),
    ]


def plot(reports, trigram_loss, path):
    try:
        import matplotlib
    except ImportError:
        print("train_gpt: matplotlib is not installed, so there is no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    # The first run is drawn broad: the curves of the two lie on each other.
    for style, width, (name, report) in zip(("o-C0", "x--C1", "+:C2"), (5, 1.5, 1.5), reports.items()):
        steps = range(1, len(report["train_losses"]) + 1)
        axes.plot(steps, report["train_losses"], color=style[-2:], alpha=0.3, lw=width / 2)
        axes.plot(*zip(*report["held_out_curve"]), style, lw=width, ms=7, label=f"{name}, held out (pale: train)")
    axes.axhline(trigram_loss, color="gray", ls="--", label="trigram model, held out")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="GPT on bytes")
    axes.legend()
    figure.savefig(path, dpi=120)


def summarise(args):
    """Print, plot and store the figures of the finished runs; returns the exit status."""
    from gpt_data import Text, Trigram, read_text
    from gpt_training import FINAL_TOKENS

    out = Path(args.out)
    reports = {name: json.loads((out / f"{name}.json").read_text()) for name in args.runs}
    text = Text(read_text(args.data), args.seq_len)
    trigram_loss = Trigram(text.train).loss(text.held_out, text.held_out_targets(FINAL_TOKENS))
    promises = check_promises(reports, trigram_loss)
    name, report = next(iter(reports.items()))
    print(f"\nSample ({name}):\n{report['sample']}\n")
    print(f"{report['parameters']:,} parameters, {len(text.train):,} bytes to train on, torch {report['torch']},")
    print(f"{report['device']}, {args.dtype}, {report['processes']} process(es) of {report['threads']} thread(s)\n")
    print("\n".join(table(reports, trigram_loss)))
    print(f"\n{CAVEAT}\n")
    for what, measured, limit, kept in promises:
        print(f"{'kept' if kept else 'BROKEN'}: {what} {limit:.6g} (measured {measured:.6g})")
    plot(reports, trigram_loss, out / "train_gpt.png")
    keys = ("promise", "measured", "limit", "kept")
    summary = {"trigram_loss": trigram_loss, "promises": [dict(zip(keys, p)) for p in promises], "runs": reports}
    (out / "train_gpt.json").write_text(json.dumps(summary, indent=1))
    print(f"\nFigures: {out / 'train_gpt.json'}; curves: {out / 'train_gpt.png'}")
    return 0 if args.no_check or all(kept for *_, kept in promises) else 1


def main(arguments):
    args = parse_arguments(arguments)
    if args.worker:
        from gpt_training import run

        args.attention = args.worker
        return run(args)
    first_process = int(os.environ.get("RANK", 0)) == 0
    if first_process and not args.resume:
        # What is left of an earlier run must not pass for a part of this one.
        for name in args.runs:
            for suffix in (".pt", ".json"):
                (Path(args.out) / (name + suffix)).unlink(missing_ok=True)
    for name in args.runs:
        status = run_in_process(name, arguments)
        if status in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            print(f"train_gpt: interrupted; the same command with --resume continues from {args.out}", file=sys.stderr)
            return INTERRUPTED
        if status:
            print(f"train_gpt: the {name} run failed with exit status {status}", file=sys.stderr)
            return 1
    return summarise(args) if first_process else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
