#!/usr/bin/env python3
"""Compiles the Triton kernels ahead of time for AMD GPUs, on a machine without one, and reports what they take.

    python tools/triton_compile.py                                 the cases of CI, for all targets
    python tools/triton_compile.py --all --targets gfx942 gfx950   every case
    python tools/triton_compile.py --json report.json --keep build/triton

What is compiled is what calls would launch: the backend's own code runs on tensors without memory, and its launches are
recorded instead of made. Leaves with status 1 if a kernel fails to compile, or needs more local memory than there is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import re
import sys
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Tuple

os.environ["TRITON_INTERPRET"] = "0"

import torch  # noqa: E402
import triton  # noqa: E402
from tqdm import tqdm  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flash_attn.flash_attn_triton_amd import interface_fa, tuning  # noqa: E402
from flash_attn.flash_attn_triton_amd.launch import Launch, recording  # noqa: E402

# Target -> (threads of a wave, bytes of local memory of a workgroup).
TARGETS = {
    "gfx90a": (64, 65536),
    "gfx942": (64, 65536),
    "gfx950": (64, 163840),
    "gfx1100": (32, 65536),
    "gfx1201": (32, 65536),
}
NVIDIA = {"sm_90": (32, 232448)}  # not compiled for unless asked; its registers are not reported
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A call whose launches are compiled; without --all for the targets of `quick`."""

    name: str
    dtype: str = "bf16"
    D: int = 128
    H: int = 8
    Hk: int = 2
    causal: bool = False
    window: Tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    dropout_p: float = 0.0
    varlen: bool = False
    cache: str = ""  # "rows", "pages"
    quick: Tuple[str, ...] = ()
    longest: int = 4096


EVERY, SOME = tuple(TARGETS), ("gfx942", "gfx1100", "gfx1201")
CASES = (
    Case("causal", causal=True, quick=EVERY),
    Case("D=64", D=64),
    Case("varlen", "fp16", 64, window=(255, 64), softcap=30.0, alibi=True, varlen=True, quick=SOME),
    Case("dropout", "fp16", 64, causal=True, dropout_p=0.1, quick=SOME),
    Case("dropout D=128", dropout_p=0.1),
    Case("fp32", "fp32", 64, causal=True),
    Case("D=80", "fp16", 80),
    Case("D=256", D=256, causal=True),
    Case("fp32 D=256", "fp32", D=256),
    Case("one row", "fp16", 64, H=2, causal=True, longest=1),  # arguments that are 1 are compile-time constants
    Case("pages", causal=True, cache="pages", quick=EVERY),
    Case("cache", "fp16", 64, cache="rows", window=(511, -1)),
)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(case: Case) -> None:
    """Forward and backward, or decoding, through the raw functions."""
    dtype, S, D = DTYPES[case.dtype], case.longest, case.D
    score = (D**-0.5, case.causal, *case.window, case.softcap)
    slopes = empty(case.H, dtype=torch.float32) if case.alibi else None
    if case.cache:
        decode(case, dtype, score)
        return
    rows = (2 * S,) if case.varlen else (2, S)
    q, dout = (empty(*rows, case.H, D, dtype=dtype) for _ in range(2))
    k, v = (empty(*rows, case.Hk, D, dtype=dtype) for _ in range(2))
    if case.varlen:
        cu = empty(3, dtype=torch.int32)
        options = (cu, cu, None, None, None, slopes, S, S, case.dropout_p, score[0], False, *score[1:], False)
        out, lse, _, rng_state = interface_fa.varlen_fwd(q, k, v, None, *options)
        options = (cu, cu, slopes, S, S, case.dropout_p, score[0], False, *score[1:], False, None, rng_state)
        interface_fa.varlen_bwd(dout, q, k, v, out, lse, None, None, None, *options)
        return
    out, lse, _, rng_state = interface_fa.fwd(q, k, v, None, slopes, case.dropout_p, *score, case.dropout_p > 0)
    saved = (dout, q, k, v, out, lse, None, None, None, slopes)
    interface_fa.bwd(*saved, case.dropout_p, *score, False, None, rng_state)


def decode(case: Case, dtype: torch.dtype, score) -> None:
    """One step with an appended, rotated key; pages with keys in four ranges."""
    B, S, D = 8, case.longest, case.D
    pages = case.cache == "pages"
    q, new = empty(B, 1, case.H, D, dtype=dtype), empty(B, 1, case.Hk, D, dtype=dtype)
    k_cache, v_cache = (empty(*((B * S // 256, 256) if pages else (B, S)), case.Hk, D, dtype=dtype) for _ in range(2))
    table = empty(B, S // 256, dtype=torch.int32) if pages else None
    cos = empty(S, D // 2, dtype=dtype)
    lengths = empty(B, dtype=torch.int32)
    cache = (lengths, cos, cos, None, None, table, None, None)
    interface_fa.fwd_kvcache(q, k_cache, v_cache, new, new, *cache, *score, True, 4 if pages else 1)


def source_of(launch: Launch) -> ASTSource:
    """The launch as the compiler takes it, specialized as launches are: 1 is a constant, multiples of 16 are known."""
    signature: Dict[str, Any] = {}
    constants: Dict[Tuple[int, ...], Any] = {}
    attributes: Dict[Tuple[int, ...], Any] = {}

    def typed(value: Any, path: Tuple[int, ...], constant: bool):
        if constant or value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            return tuple(typed(item, (*path, n), False) for n, item in enumerate(value))
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32" if -(2**31) <= value < 2**31 else "i64"

    for n, parameter in enumerate(launch.kernel.params):
        signature[parameter.name] = typed(launch.arguments[parameter.name], (n,), parameter.is_constexpr)
    return ASTSource(launch.kernel, signature, constants, attributes)


COSTS = {
    "vgprs": "vgpr_count",
    "agprs": "agpr_count",
    "sgprs": "sgpr_count",
    "spilled": "vgpr_spill_count",
    "scratch": "private_segment_fixed_size",
}


def costs(assembly: str) -> Dict[str, int]:
    """Registers, spilled registers and bytes of scratch memory a thread, from the assembly's metadata."""
    found = {name: re.search(rf"^\s*\.{key}:\s+(\d+)", assembly, re.MULTILINE) for name, key in COSTS.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}


def compiled(launch: Launch, target: str) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """What a kernel takes on a target, or the error; and its code by the compiler's names: amdgcn, hsaco, ..."""
    wave, local_memory = {**TARGETS, **NVIDIA}[target]
    begin = time.perf_counter()
    try:
        gpu = GPUTarget("hip", target, wave) if target in TARGETS else GPUTarget("cuda", int(target[3:]), wave)
        result = triton.compile(source_of(launch), target=gpu, options=launch.options)
    except Exception as error:  # the compiler raises what it likes; the report says which kernel it was
        return {"error": f"{type(error).__name__}: {str(error).strip()[-500:]}"}, {}
    code = code_object(result.asm)
    facts = {"seconds": round(time.perf_counter() - begin, 1), **costs(result.asm.get("amdgcn", ""))}
    facts.update(local_memory=result.metadata.shared, code_bytes=len(code), threads=wave * launch.options["num_warps"])
    if result.metadata.shared > local_memory:
        facts["error"] = f"{result.metadata.shared} bytes of local memory; {target} has {local_memory}"
    return facts, result.asm


def code_object(asm: Dict[str, Any]) -> bytes:
    return asm.get("hsaco") or asm.get("cubin") or b""


Item = Tuple[Case, str, Launch]
_items: List[Item] = []


def launches(targets: List[str], everything: bool, only: str) -> Iterator[Item]:
    for target in targets:
        with tuning.compiling_for(target):
            for case in CASES:
                if case.name == only or (not only and (everything or target in case.quick)):
                    with recording() as recorded:
                        call(case)
                    yield from ((case, target, launch) for launch in recorded)


def row_of(n: int) -> Tuple[Dict[str, Any], bytes]:
    """The report's row of an item, and its code object."""
    case, target, launch = _items[n]
    facts, asm = compiled(launch, target)
    tile = f"{launch.arguments['BLOCK_M']}x{launch.arguments['BLOCK_N']}"
    return {"target": target, "case": case.name, "kernel": launch.kernel.__name__, "tile": tile, **facts}, code_object(
        asm
    )


def keep(folder: str, row: Dict[str, Any], code: bytes) -> None:
    target = pathlib.Path(folder, row["target"])
    target.mkdir(parents=True, exist_ok=True)
    (target / (re.sub(r"\W+", "-", f"{row['case']}-{row['kernel']}") + ".hsaco")).write_bytes(code)


def table(rows: List[Dict[str, Any]]) -> str:
    columns = ["target", "case", "kernel", "tile", "vgprs", "agprs", "spilled", "scratch", "local_memory", "seconds"]
    cells = [columns] + [[str(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(line[n]) for line in cells) for n in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=[*TARGETS, *NVIDIA], metavar="TARGET")
    parser.add_argument("--all", action="store_true", help="every case, not only those of CI")
    parser.add_argument("--only", default="", choices=[case.name for case in CASES], metavar="CASE", help="one case")
    parser.add_argument("--json", metavar="FILE", help="write the report there as well")
    parser.add_argument("--keep", metavar="FOLDER", help="write the code objects there")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    _items.extend(launches(options.targets, options.all, options.only))
    rows = []
    # Forked, so that the processes have the items.
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        results = pool.imap(row_of, range(len(_items)))
        for row, code in tqdm(results, total=len(_items), unit="kernel", file=sys.stderr):
            rows.append(row)
            if options.keep and code:
                keep(options.keep, row, code)
    print(table(rows))
    errors = [row for row in rows if "error" in row]
    for row in errors:
        print(f"FAILED: {row['target']}, {row['case']}, {row['kernel']}: {row['error']}")
    spilled = sum(1 for row in rows if row.get("spilled"))
    print(f"{len(rows)} kernels, {len(errors)} failed, {spilled} spill; Triton {triton.__version__}")
    if options.json:
        report = {"triton": triton.__version__, "kernels": rows}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
