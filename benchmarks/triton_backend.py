#!/usr/bin/env python3
"""The Triton backend beside the native GPU kernels, on the GPU of this machine: one table of TFLOP/s.

    python benchmarks/triton_backend.py [--json FILE] [--head-dims 64 128] [--lengths 4096 16384] [--dtype bf16]

Both get the same contiguous tensors through upstream's raw functions, 16k tokens with H * D = 2048, and run in turn.
Forward counts 4 B H S^2 D operations, half of it with a causal mask; backward 2.5 times that. Before timing, the two
results are compared. FLASH_ATTENTION_TRITON_AMD_AUTOTUNE=TRUE tunes the Triton kernels first. A row that cannot run
says why, the others run on; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys

import torch
import triton

from flash_attn import _native
from flash_attn.flash_attn_triton_amd import interface_fa

TOKENS, WIDTH = 16384, 2048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 4e-3}  # relative to the largest entry of the native result


def milliseconds(call, samples: int = 7) -> list:
    """Per call, by events around enough calls for 20 ms."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(count: int) -> float:
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    count = max(1, int(20 / max(run(3), 1e-3)))
    return [run(count) for _ in range(samples)]


def calls(module, dtype, D: int, S: int, causal: bool):
    """Forward and backward as functions of no arguments, that return what they compute."""
    B, H = TOKENS // S, WIDTH // D
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, S, H, D, device="cuda", generator=generator, dtype=torch.float32).to(dtype) for _ in range(4)
    )
    score = (0.0, D**-0.5, causal, -1, -1, 0.0)
    out, lse, _, rng_state = module.fwd(q, k, v, None, None, *score, False, None)
    grads = [torch.empty_like(x) for x in (q, k, v)]

    def forward():
        return module.fwd(q, k, v, out, None, *score, False, None)[:1]

    def backward():
        return module.bwd(dout, q, k, v, out, lse, *grads, None, *score, False, None, rng_state)[:3]

    return forward, backward


def deviation(results, expected) -> float:
    return max(((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in zip(results, expected))


def measure(dtype: str, D: int, S: int, causal: bool):
    """A row for each direction."""
    pairs = zip(*(calls(module, DTYPES[dtype], D, S, causal) for module in (interface_fa, _native.load())))
    for direction, (ours, native) in zip(("forward", "backward"), pairs):
        row = {"dtype": dtype, "D": D, "S": S, "causal": causal, "direction": direction}
        row["deviation"] = deviation(ours(), native())
        flop = 4 * TOKENS * S * WIDTH / (2 if causal else 1) * (2.5 if direction == "backward" else 1)
        for name, call in (("triton", ours), ("native", native)):
            row[f"{name}_ms"] = statistics.median(milliseconds(call))
            row[f"{name}_tflops"] = flop / row[f"{name}_ms"] / 1e9
        if not row["deviation"] <= TOLERANCE[dtype]:
            row["error"] = f"the results differ by {row['deviation']:.2g} of the largest entry"
        yield row


def text(row) -> str:
    name = (
        f"{row['dtype']} D{row['D']:<3} S{row['S']:<5} {'causal' if row['causal'] else 'full  '} {row['direction']:8}"
    )
    if "triton_ms" not in row:
        return f"{name}  FAILED: {row['error']}"
    speeds = f"{row['triton_tflops']:8.1f} {row['native_tflops']:8.1f} {row['native_ms'] / row['triton_ms']:7.2f}"
    return f"{name} {speeds}  {row['deviation']:.1e}" + (f"  FAILED: {row['error']}" if "error" in row else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU on this machine: nothing to measure", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; TFLOP/s")
    print(f"{'':34}   Triton   native   ratio  deviation", flush=True)
    rows = []
    for D, S, causal in itertools.product(options.head_dims, options.lengths, (False, True)):
        try:
            for row in measure(options.dtype, D, S, causal):
                rows.append(row)
                print(text(row), flush=True)
        except Exception as error:  # whatever a compiler or a GPU raises: the other rows are still worth having
            row = {"dtype": options.dtype, "D": D, "S": S, "causal": causal, "direction": ""}
            rows.append({**row, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
            print(text(rows[-1]), flush=True)
    if options.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        pathlib.Path(options.json).write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
