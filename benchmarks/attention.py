#!/usr/bin/env python3
"""Time attention by this package, beside torch's scaled_dot_product_attention (SDPA) in the same process.

On the CPU the rows come in suites, most with a bound that they must reach; the others are "reported":
  dense     ours against torch, forward and backward, full and causal
  area      causal, windowed and varlen work over the dense rate
  dims      other head dims over the rate of D=128
  features  score features over the plain call's time
  decode    one query over a long cache: share of a plain sum's bandwidth, and against torch; short caches
  few       few queries over a short cache, against torch
  uneven    work that divides badly over the same where it divides well; caches that are partly full; rotary
  small     short calls through Python against torch
  calls     what calls cost beside their arithmetic, against torch
  threads   two threads over one
  avx2      dense, with this package, torch, oneDNN and MKL held to AVX2
  train     a training step of examples/train_gpt.py against the same with torch's SDPA
  models    layers of well-known models, against torch; only when asked for
  drawn     problems drawn at random, against torch; only when asked for

All calls of a row are timed in turn (ours, peer, ours, peer, ...), so that a machine that slows down slows both, and
the value is taken from medians. Before timing, one head of each row's result is compared with attention by its
definition. On a GPU (--device cuda) there are the dense rows, whose peer is torch's FlashAttention-2, or with --against
torch-math its attention by definition, by default 16k tokens with H * D = 2048; and with --suites decode caches.

Each side gets the layout it is made for: ours contiguous (B, S, H, D), torch contiguous (B, H, S, D). Backward means
torch.autograd.grad alone, on a graph that is kept. benchmarks/README.md says how to read the results.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

import avx2
import combine
import drawn_suite
import models_suite
import report
import torch
import torch.nn.functional as F
from calls_suite import calls_rows
from cpu_suites import area_rows, dims_rows, features_rows, small_rows, threads_rows
from decode_suite import decode_rows
from dense_suite import TOKENS, WIDTH, avx2_rows, dense_rows
from few_suite import few_rows
from problems import DTYPES, PEERS
from rows import chosen, measure
from timing import other_work
from train_suite import train_rows
from uneven_suite import uneven_rows

from flash_attn import _native

SUITES = {
    "dense": dense_rows,
    "area": area_rows,
    "dims": dims_rows,
    "features": features_rows,
    "decode": decode_rows,
    "few": few_rows,
    "uneven": uneven_rows,
    "small": small_rows,
    "calls": calls_rows,
    "threads": threads_rows,
    "avx2": avx2_rows,
    "train": train_rows,
    "models": models_suite.models_rows,
    "drawn": drawn_suite.drawn_rows,
}
WHEN_ASKED = ("models", "drawn")
# What --plot draws: the first of these that runs.
PLOTS = {"dense": report.plot, "models": models_suite.plot, "drawn": drawn_suite.plot}
SWEEP = [2**power for power in range(7, 15)]  # 128 to 16384
SET_UP_SECONDS = 3.0  # per row
DENSE_ONLY = ("head_dims", "lengths", "batch", "heads", "sweep")
# Sizes of the suites: S, H, (B, S) of the long cache, lengths of the short ones, S of the training step.
SIZES = dict(S=2048, H=8, cache=(8, 16384), short_caches=(128, 512, 2048), train_length=1024)
QUICK_SIZES = dict(S=256, H=2, cache=(2, 512), short_caches=(64,), train_length=64)


def parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is also torch's name for AMD GPUs [cpu]")
    add("--against", choices=tuple(PEERS), default="torch", help="peer to compare with; torch-math on a GPU [torch]")
    add(
        "--suites",
        "--only",
        nargs="+",
        choices=SUITES,
        metavar="NAME",
        help=f"of {', '.join(SUITES)} [all but {', '.join(WHEN_ASKED)}; "
        "dense on a GPU, without a peer, or where an option of dense rows is given]",
    )
    add("--dtypes", nargs="+", choices=DTYPES, metavar="T", help="of fp32, bf16, fp16 [README.md; on a GPU bf16]")
    add("--head-dims", nargs="+", type=int, metavar="D", help="dense rows: head dimensions [64 128]")
    add("--lengths", nargs="+", type=int, metavar="S", help="dense rows: lengths [2048; on a GPU 512 to 16384]")
    add("--sweep", action="store_true", help="dense rows: lengths 128 to 16384, of bf16 and fp32 unless --dtypes says")
    add("--batch", type=int, metavar="B", help=f"dense rows: batch size [1; on a GPU {TOKENS} / S]")
    add("--heads", type=int, metavar="H", help=f"dense rows: heads [8; on a GPU {WIDTH} / D]")
    add("--draw", type=int, metavar="N", help="drawn rows: how many [24]")
    add("--seed", type=int, metavar="N", help="drawn rows: of the random problems [0]")
    add("--rows", nargs="+", metavar="WORDS", help='only rows with all these words, such as "bf16 D64 backward"')
    add("--seconds", type=float, metavar="T", help="time per row, at least five samples [3; on a GPU 0.3]")
    add("--cold", action="store_true", help="other work, not timed, before each call, as between layers of a model")
    add("--threads", type=int, metavar="N", help="threads of both sides [torch's default]")
    add("--quick", action="store_true", help="small and short: does it run, not how fast is it")
    add("--json", metavar="FILE", help="write setting, medians and every sample; rewritten after each row")
    add("--combine", nargs="+", metavar="FILE", help="measure nothing: one table of what --json wrote in several runs")
    add(
        "--plot",
        metavar="FILE",
        help="draw GFLOP/s of the dense rows over S; without these, ratios of models or drawn ones (needs matplotlib)",
    )
    add("--fail-under", type=float, metavar="R", help="exit with status 1 if a ratio to the peer is below R")
    add("--check-required", action="store_true", help="exit with status 1 if a row misses what it must reach")
    return parser


def parse_arguments(arguments):
    """The arguments with every default filled in, and the sizes of the suites."""
    this = parser()
    args = this.parse_args(arguments)
    if args.combine:
        refuse_beside_combine(args, this)
        return args
    refuse(args, this.error)
    dense_only = args.device == "cuda" or args.against == "none" or any(getattr(args, name) for name in DENSE_ONLY)
    args.suites = args.suites or (["dense"] if dense_only else [name for name in SUITES if name not in WHEN_ASKED])
    args.short_rows = args.device == "cpu" and not (args.lengths or args.sweep or args.quick)
    # fp16 runs the fp32 kernels: the rows that compare this package with itself take it when it is asked for.
    args.suite_dtypes = args.dtypes or ["bf16", "fp32"]
    defaults = dict(dtypes=list(DTYPES), lengths=[2048], head_dims=[64, 128], seconds=3.0, draw=24, seed=0)
    if args.device == "cuda":
        defaults.update(dtypes=["bf16"], lengths=[512, 1024, 2048, 4096, 8192, 16384], seconds=0.3)
    if args.quick:
        defaults.update(lengths=[256], seconds=0.1)
        args.batch, args.heads = args.batch or 1, args.heads or 2
    if args.sweep:
        defaults.update(lengths=SWEEP, dtypes=args.suite_dtypes)
    for name, value in {**defaults, **(QUICK_SIZES if args.quick else SIZES)}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def refuse_beside_combine(args, this):
    """Ends with a message if an option is given that --combine would ignore."""
    used = ("combine", "fail_under", "check_required")
    ignored = [name for name, value in vars(args).items() if name not in used and value != this.get_default(name)]
    if ignored:
        option = ignored[0].replace("_", "-")
        this.error(f"--combine reads what other runs have measured; --{option} is for a run that measures")


def refuse(args, error):
    """Ends with a message if the options contradict each other or the machine."""
    if args.device == "cuda" and not torch.cuda.is_available():
        error("--device cuda: torch finds no GPU here; --device cpu measures the CPU backend")
    if args.device == "cpu" and args.against == "torch-math":
        error("--against torch-math is for --device cuda; on the CPU use --against torch")
    if PEERS[args.against] and not hasattr(F, "scaled_dot_product_attention"):
        error(f"torch {torch.__version__} has no scaled_dot_product_attention to compare with; use --against none")
    if args.against == "none" and (args.fail_under is not None or args.check_required):
        error("--fail-under and --check-required need a ratio, so --against torch")
    if args.cold and args.device == "cuda":
        error("--cold is for --device cpu: a queue of calls runs on a GPU without anything in between")
    everywhere = ["dense", "decode"] if args.device == "cuda" and args.against == "torch" else ["dense"]
    others = [name for name in args.suites or [] if name not in everywhere]
    if others and (args.device == "cuda" or args.against == "none"):
        error(
            f"--suites {' '.join(others)}: these are for --device cpu --against torch; dense is for all, "
            "decode for --device cuda --against torch too"
        )
    suites = args.suites or ["dense"]
    of_suites = {**dict.fromkeys(DENSE_ONLY, ["dense"]), "plot": list(PLOTS)}
    of_suites.update(dict.fromkeys(("draw", "seed"), ["drawn"]))
    for name, needed in of_suites.items():
        value = getattr(args, name)
        if value is not None and value is not False and not set(needed) & set(suites):
            option = name.replace("_", "-")
            error(f"--{option} is for the {needed[0]} rows; add {needed[0]} to --suites {' '.join(args.suites or [])}")
    if args.sweep and args.lengths:
        error("--sweep sets the lengths; give it or --lengths")


def missing(suite):
    """Why this machine cannot run the suite, or None."""
    if suite == "threads" and len(os.sched_getaffinity(0)) < 2:
        return "one processor"
    if suite == "avx2" and "avx2" not in _native.load()._cpu_isas():
        return "this processor has no AVX2"
    return None


def expected_minutes(rows, seconds):
    """About how long the rows take: tensors, checks and rounds that are too long add to the time asked for."""
    return len(rows) * (seconds + SET_UP_SECONDS) / 60


def rows_of(args):
    """The rows asked for; a --rows pattern is words that must all be in the row's name."""
    rows = []
    for suite in args.suites:
        reason = missing(suite)
        if reason:
            print(f"{suite} left out: {reason}", file=sys.stderr)
        else:
            rows += chosen(SUITES[suite](args), args.rows)
    if not rows:
        raise SystemExit(f"--rows {args.rows}: no row has these words; names look like 'fp32 D64 S2048 causal forward'")
    return rows


def measured(rows, args):
    """Yields each row when it is measured."""
    before = other_work() if args.cold else None
    for suite, group in itertools.groupby(rows, key=lambda row: row.suite):
        if suite == "avx2":
            yield from avx2.measured(list(group), args)
            continue
        for row in group:
            measure(row, args.seconds, before)
            yield row


def progress(rows, total):
    """The rows with tqdm's bar on a terminal, where tqdm is installed; and how to print beside it."""
    try:
        from tqdm import tqdm
    except ImportError:
        return rows, print
    bar = tqdm(rows, total=total, unit="row", disable=not sys.stderr.isatty(), leave=False)
    return bar, lambda text: tqdm.write(text, file=sys.stdout)


def status(rows, args):
    """The exit status, after saying which rows it is for."""
    failed = []
    if args.fail_under is not None:
        below = [row.name for row in rows if row.quantity == "ratio" and row.ratio < args.fail_under]
        failed += [f"below {args.fail_under}x: {', '.join(below)}"] if below else []
    if args.check_required:
        missed = [row.name for row in rows if row.met is False]
        failed += [f"misses what is required: {', '.join(missed)}"] if missed else []
    print("\n".join(failed), end="\n" if failed else "")
    return 1 if failed else 0


def main(arguments):
    args = parse_arguments(arguments)
    if args.combine:
        return status(combine.show(args.combine), args)
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = rows_of(args)
    where = report.setting(args)
    for key, value in where.items():
        print(f"{key:>12}: {value}")
    print(f"{'rows':>12}: {len(rows)}, about {expected_minutes(rows, args.seconds):.0f} minutes")
    print(f"\n{report.heading(args.against)}", flush=True)
    done = []
    bar, show = progress(measured(rows, args), len(rows))
    for row in bar:
        done.append(row)
        if args.json:
            report.write_json(args.json, where, done)
        show(report.line(row))
        sys.stdout.flush()
    if args.plot:
        suite = next(suite for suite in PLOTS if suite in args.suites)
        PLOTS[suite]([row for row in rows if row.suite == suite], args.against, args.plot)
    if PEERS[args.against]:
        drawn = [row for row in rows if row.suite == "drawn"]
        print("", *report.summary(rows), *drawn_suite.summary(drawn), sep="\n")
    return status(rows, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
