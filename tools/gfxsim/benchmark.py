#!/usr/bin/env python3
"""Seconds that the simulator takes for one attention, forward and backward, with all checks on.

    tools/gfxsim/benchmark.py GFXSIM DIRECTORY [--problem B=1,H=2,S=512] [--kernels bf16_d128_plain] [--threads 2]
                              [--limit SECONDS]

GFXSIM is the command; DIRECTORY holds the code objects of the target it is named after, as build/dev/kernels/gfx942.
Waves run in a random order. Loading and decoding the code objects counts. Exit status 1 when a kernel reports findings,
or when all together take more than --limit seconds of processor time, which other load on the machine does not change.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time


def kernels(gfxsim: str, target: str, path: pathlib.Path, wanted: str) -> list[str]:
    """Names in the code object of the chosen kernels, and of the backward preprocess that goes with them."""
    listing = subprocess.run(
        [gfxsim, "stats", str(path), "--target", target, "--json"], capture_output=True, text=True, check=True
    )
    names = [kernel["kernel"] for kernel in json.loads(listing.stdout)]
    dtype = wanted.split("_")[0]
    return [name for name in names if name.endswith(wanted) or name.startswith(f"fa_backward_delta_{dtype}_")]


def processor_seconds() -> float:
    """Of all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gfxsim")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--problem", default="B=1,H=2,S=512")
    parser.add_argument("--kernels", default="bf16_d128_plain", help="how their names end")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=float, help="seconds")
    args = parser.parse_args()
    target = args.directory.resolve().name
    total, total_used, failures = 0.0, 0.0, 0
    for path in sorted(args.directory.glob("*.co")):
        for kernel in kernels(args.gfxsim, target, path, args.kernels):
            command = [args.gfxsim, "run", str(path), "--target", target, "--kernel", kernel]
            command += ["--attention", args.problem, "--schedule", "random", "--seed", "7", "--check", "all"]
            begin, used = time.monotonic(), processor_seconds()
            result = subprocess.run(
                [*command, "--threads", str(args.threads), "--json"], capture_output=True, text=True
            )
            seconds, used = time.monotonic() - begin, processor_seconds() - used
            if result.returncode > 1:
                raise SystemExit(result.stderr)
            report = json.loads(result.stdout)
            counts = report["statistics"]
            conflicts = 100 * counts["lds_conflict_clocks"] / max(1, counts["lds_clocks"])
            print(
                f"{kernel:40} {seconds:6.2f} s, {used:5.2f} s of processors, {counts['instructions']:10} instructions, "
                f"{100 * counts['matrix_share']:4.1f} % matrix, {conflicts:4.1f} % of LDS clocks are bank conflicts, "
                f"{len(report['reports'])} findings"
            )
            total += seconds
            total_used += used
            failures += bool(report["reports"])
    print(f"{total:.2f} s, {total_used:.2f} s of processors")
    if args.limit and total_used > args.limit:
        print(f"that is more than {args.limit} s of processors")
        failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
