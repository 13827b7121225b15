"""One training step of examples/train_gpt.py's model, with this package's attention and with torch's SDPA."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rows import Calls, Row

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# As the example promises of its runs: losses of the first batch in nats per byte, in fp32 and in the run's dtype.
FIRST_LOSS_DIFFERENCE, STEP_LOSS_DIFFERENCE = 1e-5, 0.02


def step_of(attention, dtype, options):
    """The example's run with its own defaults, and a function that does one optimizer step on the first batch."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from gpt_training import Run
        from train_gpt import parse_arguments
    finally:
        sys.path.remove(str(EXAMPLES))
    arguments = ["--dtype", dtype, "--seq-len", str(options.train_length)]
    arguments += ["--layers", "1", "--width", "32"] if options.quick else []
    args = parse_arguments(arguments)
    args.attention = attention
    run = Run(args)
    return run, lambda: run.step(run.model)


def train_calls(dtype, options):
    (ours, our_step), (peer, peer_step) = step_of("flash", dtype, options), step_of("sdpa", dtype, options)

    def check():
        first = abs(ours.first_loss() - peer.first_loss())
        step = abs(our_step() - peer_step())
        if not (first <= FIRST_LOSS_DIFFERENCE and step <= STEP_LOSS_DIFFERENCE):
            raise SystemExit(f"train {dtype}: losses differ by {first:.2g} in fp32, by {step:.2g} in {dtype}")
        return first

    return Calls(our_step, peer_step, check=check)


def train_rows(options):
    """bf16 (autocast) and fp32; S=1024, the rest as train_gpt.py has it by default."""
    rows = []
    for dtype in [dtype for dtype in options.suite_dtypes if dtype != "fp16"]:
        name = f"train {dtype} S{options.train_length} step"
        build = partial(train_calls, dtype, options)
        rows.append(Row("train", name, dtype, build, required=1.0, setting={"S": options.train_length}))
    return rows
