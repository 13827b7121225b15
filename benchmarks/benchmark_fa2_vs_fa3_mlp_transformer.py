#!/usr/bin/env python3
"""Train the same small transformer with each backend, in two isolated processes, and compare speed, memory and loss.

    python benchmarks/benchmark_fa2_vs_fa3_mlp_transformer.py                      preset mi300x
    python benchmarks/benchmark_fa2_vs_fa3_mlp_transformer.py --preset cpu-small --allow-single
    python benchmarks/benchmark_fa2_vs_fa3_mlp_transformer.py --preset default --n-layers 2 --output-json speed.json

The processes differ in FLASH_ATTENTION_TRITON_AMD_ENABLE alone: FALSE runs the native backend (HIP kernels, or the
CPU's), TRUE the Triton backend. When one of them cannot run, this says which and why and exits with 1; with
--allow-single it reports the other and exits with 0. The .schema.json beside this file describes --output-json's file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCHEMA = "benchmark_fa2_vs_fa3_mlp_transformer/1"
WORKER = Path(__file__).resolve().parent / "mlp_transformer.py"
VARIABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
BACKENDS = {"native": "FALSE", "triton": "TRUE"}
DTYPES = ("bfloat16", "float16", "float32")

MI300X = dict(
    batch_size=4, seq_len=4096, d_model=1024, n_heads=16, n_layers=8, warmup_steps=20, timed_steps=80, dtype="bfloat16"
)
PRESETS = {
    "mi300x": MI300X,
    "default": {**MI300X, "seq_len": 2048, "n_layers": 6, "warmup_steps": 10, "timed_steps": 50},
    "cpu-small": dict(
        batch_size=1, seq_len=256, d_model=128, n_heads=4, n_layers=2, warmup_steps=1, timed_steps=5, dtype="float32"
    ),
}


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="mi300x", help="sizes and steps [mi300x]")
    for name in MI300X:
        values = ", ".join(f"{preset}: {config[name]}" for preset, config in PRESETS.items())
        kind = {"choices": DTYPES} if name == "dtype" else {"type": positive, "metavar": "N"}
        parser.add_argument("--" + name.replace("_", "-"), **kind, help=f"instead of the preset's ({values})")
    parser.add_argument("--output-json", metavar="FILE", help="write config, metrics and ratios")
    parser.add_argument("--allow-single", action="store_true", help="one backend that runs is enough")
    args = parser.parse_args(arguments)
    config = {name: getattr(args, name) or value for name, value in PRESETS[args.preset].items()}
    if config["d_model"] % config["n_heads"]:
        parser.error(f"--d-model {config['d_model']} is not a multiple of --n-heads {config['n_heads']}")
    return args, {"preset": args.preset, **config}


def run_backend(name, config):
    """Metrics of one backend, or {"problem": why}. Its process shows its own progress bar."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(WORKER), json.dumps(config), str(result)]
        status = subprocess.run(command, env={**os.environ, VARIABLE: BACKENDS[name]}).returncode
        if result.is_file():
            return json.loads(result.read_text())
    return {"problem": f"its process ended with status {status}"}


def ratios(native, triton):
    """Above 1 speed_up says that native is the faster; differences are native's minus Triton's."""
    memory = (native["peak_memory_bytes"], triton["peak_memory_bytes"])
    return {
        "speed_up": triton["median_step_ms"] / native["median_step_ms"],
        "memory_delta_bytes": None if None in memory else memory[0] - memory[1],
        "loss_difference": native["loss"] - triton["loss"],
    }


def text_of(name, metrics):
    if "problem" in metrics:
        return f"{name:<8}cannot run: {metrics['problem']}"
    memory = metrics["peak_memory_bytes"]
    peak = "unknown" if memory is None else f"{memory / 1e6:.0f} MB"
    return (
        f"{name:<8}{metrics['median_step_ms']:.1f} ms a step, {metrics['steps_per_second']:.2f} steps/s, "
        f"{metrics['tokens_per_second']:.0f} tokens/s, {peak} peak, "
        f"loss {metrics['loss']:.4f}\n        {metrics['backend_symbol']}"
    )


def main(arguments):
    args, config = parse_arguments(arguments)
    print(", ".join(f"{name} {value}" for name, value in config.items()), flush=True)
    backends = {}
    for name in BACKENDS:
        backends[name] = run_backend(name, config)
        print(text_of(name, backends[name]), flush=True)
    failed = [name for name, metrics in backends.items() if "problem" in metrics]
    compared = None if failed else ratios(**backends)
    if compared:
        delta = compared["memory_delta_bytes"]
        print(
            f"native against triton: {compared['speed_up']:.2f}x the speed, memory "
            f"{'unknown' if delta is None else f'{delta / 1e6:+.0f} MB'}, loss {compared['loss_difference']:+.1e}"
        )
    if args.output_json:
        record = {"schema": SCHEMA, "config": config, "backends": backends, "ratios": compared}
        Path(args.output_json).write_text(json.dumps(record, indent=1) + "\n")
    if len(failed) == len(BACKENDS) or (failed and not args.allow_single):
        hint = "; --allow-single reports the other alone" if len(failed) < len(BACKENDS) else ""
        print(f"not compared: {', '.join(failed)} cannot run{hint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
