#!/usr/bin/env python3
"""Executes the Triton kernels' AMD code objects on a simulated gfx942 (tools/gfxsim), compared with double precision.

    cmake -S tools/gfxsim -B build/gfxsim && cmake --build build/gfxsim --target gfxsim_hip
    python tools/triton_simulate.py [--only TEXT] [--check LIST] [--library build/gfxsim/hip/libamdhip64.so]

The kernels are compiled as by `tools/triton_compile.py`, but for one thing: they access memory with global instead of
buffer instructions, which gfxsim does not know. Their assembly is made into code objects by clang 22, since gfxsim does
not know the newer LLVM's name of the target either. Leaves with status 1 when gfxsim finds a fault or a result is off.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "python"), str(HERE.parent)]
os.environ["AMDGCN_USE_BUFFER_OPS"] = "0"  # read when Triton is imported

import harness  # noqa: E402
import kvcache_model as model  # noqa: E402
import oracle  # noqa: E402
import tolerances  # noqa: E402
import torch  # noqa: E402
import triton_cases  # noqa: E402
import triton_compile  # noqa: E402
from cases import Case  # noqa: E402

from flash_attn.flash_attn_triton_amd import attention, interface_fa, tuning  # noqa: E402
from flash_attn.flash_attn_triton_amd.launch import Launch, recording  # noqa: E402
from flash_attn.flash_attn_triton_amd.problem import Problem  # noqa: E402

TARGET = "gfx942"
# All but races: where a tile is smaller than the workgroup, Triton lets the waves that hold copies of a value all write
# it to one address of local memory, which gfxsim takes for a race.
CHECKS = "undefined,waits,barriers,unit-checks"
CASES = (
    Case("bf16", ((40, 70),), H=1, Hk=1, D=64, causal=True),
    Case("fp32", ((20, 70),), H=2, Hk=1, D=32, window=(30, 5), alibi="BH"),
    # D = 64: of rows whose length is no multiple of 16 bytes the compiler stores pairs of bf16 unaligned, which the
    # hardware allows and gfxsim does not.
    Case("bf16", ((33, 70), (0, 9), (5, 3)), True, H=2, Hk=1, D=64, softcap=15.0),
    Case("bf16", ((20, 70),), H=1, Hk=1, D=64, causal=True, dropout_p=0.3),
)
# Stored keys, as rows of triton_cases.CACHES: appended, rotated, in pages or chosen rows, whole or in ranges.
CACHES = {
    "pages, split": {**triton_cases.PLAIN_CACHE, "storage": "page 16", "dtype": "bf16", "rotary": "interleaved",
                     "num_splits": 3},
    "rows": {**triton_cases.PLAIN_CACHE, "storage": "cache_batch_idx", "Sq": 5, "new": 5, "rotary": "halves",
             "leftpad": True, "mask": "both", "extra": "alibi", "heads": "mqa"},
}  # fmt: skip


class Buffer(ctypes.Structure):
    """gfxsim_buffer of tools/gfxsim/hip/abi.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_ulonglong),
        ("writable", ctypes.c_int),
        ("name", ctypes.c_char_p),
    ]


class Simulator:
    def __init__(self, library: str, checks: str, schedule: str, seed: int):
        self.hip = ctypes.CDLL(library)
        self.hip.gfxsim_last_message.restype = ctypes.c_char_p
        self.hip.gfxsim_instructions.restype = ctypes.c_ulonglong
        self.call("gfxsim_configure", TARGET.encode(), schedule.encode(), ctypes.c_ulonglong(seed), checks.encode(), 1)

    def call(self, name: str, *arguments) -> None:
        if getattr(self.hip, name)(*arguments) != 0:
            raise RuntimeError(f"{name}: {self.hip.gfxsim_last_message().decode()}")

    def run(self, launch: Launch) -> None:
        facts, asm = triton_compile.compiled(launch, TARGET)
        if "error" in facts:
            raise RuntimeError(facts["error"])
        code = assembled(asm["amdgcn"])
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("hipModuleLoadData", ctypes.byref(module), code)
        self.call("hipModuleGetFunction", ctypes.byref(function), module, launch.kernel.__name__.encode())
        tensors = {n: x for n, x in launch.arguments.items() if isinstance(x, torch.Tensor)}
        buffers = (Buffer * len(tensors))(*(storage(name, x) for name, x in tensors.items()))
        self.hip.gfxsim_set_buffers(buffers, len(tensors))
        values = parameters(launch)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        block = (facts["threads"], 1, 1, facts["local_memory"])
        self.call("hipModuleLaunchKernel", function, *launch.grid, *block, None, pointers, None)
        self.call("hipModuleUnload", module)


def assembled(text: str) -> bytes:
    """The code object of an assembly text, under the target's name that LLVM 22 has."""
    text = re.sub(r"amdgpu[\d.]+-amd-amdhsa-unknown-", "amdgcn-amd-amdhsa--", text)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.s"), Path(folder, "kernel.co")
        source.write_text(text)
        clang = ["clang-22", "--target=amdgcn-amd-amdhsa", f"-mcpu={TARGET}", "-mcode-object-version=5"]
        subprocess.run([*clang, "-fuse-ld=lld-22", "-o", str(result), str(source)], check=True)
        return result.read_bytes()


def storage(name: str, x: torch.Tensor) -> Buffer:
    """All memory that the tensor is a view of."""
    whole = x.untyped_storage()
    return Buffer(whole.data_ptr(), whole.nbytes(), 1, name.encode())


def parameters(launch: Launch) -> List[Any]:
    """The kernel's arguments, tuples item by item, without constants; then Triton's two scratch pointers."""
    signature = triton_compile.source_of(launch).signature
    kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
    found: List[Any] = []

    def add(kind, value) -> None:
        if isinstance(kind, tuple):
            for one, item in zip(kind, value):
                add(one, item)
        elif kind.startswith("*"):
            found.append(ctypes.c_void_p(value.data_ptr()))
        elif kind != "constexpr":
            found.append(kinds[kind](value))

    for name, kind in signature.items():
        add(kind, launch.arguments[name])
    return [*found, ctypes.c_void_p(), ctypes.c_void_p()]


def simulate(case: Case, simulator: Simulator) -> Dict[str, int]:
    """Forward and backward of a case, compared with the oracle. Returns instructions executed by each kernel."""
    inputs = harness.make_inputs(case)
    q, k, v = (x.detach() for x in inputs.leaves)
    score = (case.dropout_p, case.D**-0.5, case.causal, *case.window, case.softcap, inputs.alibi_slopes)
    problem = Problem(q, k, v, *score, inputs.cu_seqlens_q, inputs.cu_seqlens_k, *inputs.max_seqlens)
    problem.rng_state = torch.tensor([20, 21]) if case.dropout_p else None
    grads = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
    with tuning.compiling_for(TARGET), recording() as launches:
        out, lse, _ = attention.forward(problem)
        attention.backward(problem, inputs.dout, out, lse, grads)
    counts = execute(launches, simulator)
    keep = harness.rebuilt_mask(case, (20, 21))
    ref, pt = (harness.reference(inputs, keep, a) for a in harness.arithmetics(case))
    harness.compare(inputs, out, lse, grads, ref, pt)
    return counts


def execute(launches: List[Launch], simulator: Simulator) -> Dict[str, int]:
    """Instructions executed by each kernel."""
    counts = {}
    for launch in launches:
        before = simulator.hip.gfxsim_instructions()
        simulator.run(launch)
        counts[launch.kernel.__name__] = simulator.hip.gfxsim_instructions() - before
    return counts


def simulate_cache(name: str, simulator: Simulator) -> Dict[str, int]:
    """A call over stored keys, compared with the plain model of the cache and the oracle."""
    row = CACHES[name]
    call = triton_cases.cache_call(row)
    expected = model.appended(call)
    ref, pt = (model.attend(call, expected, a) for a in (oracle.EXACT, oracle.same_precision(call.q.dtype)))
    options = dict(call.options)
    score = (call.q.shape[-1] ** -0.5, options.get("causal", False), *options["window_size"], 0.0)
    storage = (call.cache_seqlens, call.rotary_cos, call.rotary_sin, call.cache_batch_idx, call.cache_leftpad)
    storage += (call.block_table, options.get("alibi_slopes"), None)
    tensors = (call.q, call.k_cache, call.v_cache, call.k, call.v)
    with tuning.compiling_for(TARGET), recording() as launches:
        out, lse = interface_fa.fwd_kvcache(*tensors, *storage, *score, call.rotary_interleaved, options["num_splits"])
    counts = execute(launches, simulator)
    assert torch.equal(call.v_cache, expected[1]), "v_cache differs from what was to be appended"
    torch.testing.assert_close(call.k_cache, expected[0], rtol=1e-3, atol=1e-3)
    tolerances.assert_within("out", out, ref[0], pt[0], 3, 1e-5, name)
    tolerance = 1e-4 if row["dtype"] == "fp32" else 2e-2
    torch.testing.assert_close(lse.double(), ref[1], rtol=tolerance, atol=tolerance)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=str(HERE.parent / "build" / "gfxsim" / "hip" / "libamdhip64.so"))
    parser.add_argument("--check", default=CHECKS, help=f"gfxsim's checks (default {CHECKS})")
    parser.add_argument("--schedule", default="random", choices=("in-order", "round-robin", "random"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    if not os.path.isfile(options.library):
        print(f"gfxsim's library {options.library} is not there; --help says how to build it", file=sys.stderr)
        return 2
    simulator = Simulator(options.library, options.check, options.schedule, options.seed)
    failed = 0
    runs = {case.id: functools.partial(simulate, case) for case in CASES}
    runs.update({f"stored keys, {name}": functools.partial(simulate_cache, name) for name in CACHES})
    for name, run in runs.items():
        if options.only not in name:
            continue
        begin = time.perf_counter()
        try:
            counts = run(simulator)
            text = "agrees; instructions: " + ", ".join(f"{name} {count}" for name, count in counts.items())
        except (AssertionError, RuntimeError, subprocess.CalledProcessError) as error:
            failed += 1
            text = f"FAILED: {error}"
        print(f"{TARGET} {name}: {text} ({time.perf_counter() - begin:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
