#!/usr/bin/env python3
"""Builds the GPU kernels of csrc/hip: one code object per target and kernel family.

    tools/build_kernels.py [--targets "gfx942;gfx1201;sm_90"] [--families "forward;backward"] [--out DIR] [--print]

Targets default to GPU_ARCHS, then PYTORCH_ROCM_ARCH (`;`-separated), then gfx942;gfx1201. AMD targets are compiled by
the first of ROCm's hipcc or amdclang++ and the distribution's clang++ (20 or later) that passes a probe compile; sm_*
by nvcc. Results are OUT/<target>/<family>.co (unbundled ELF) or .cubin. A file newer than every source is left alone.
Exit status 1 when a compiler is missing or a compile fails.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "hip"
DEFAULT_TARGETS = "gfx942;gfx1201"
AMD_COMPILERS = ["hipcc", "amdclang++", "/opt/rocm/bin/hipcc", "/opt/rocm/llvm/bin/amdclang++"] + [
    f"clang++-{version}" for version in range(30, 19, -1)
]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# Scores hold infinities, and NaN only if the inputs do; without IEEE mode maxima need no canonicalising instructions.
AMD_FLAGS = "-x hip --cuda-device-only --no-gpu-bundle-output -nogpuinc -nogpulib -O3 -std=c++20".split() + [
    "-mcode-object-version=5",
    "-fno-honor-nans",
    "-mno-amdgpu-ieee",
]
NVCC_FLAGS = "-x cu -cubin -O3 -std=c++20 --expt-relaxed-constexpr -Werror all-warnings".split()
INCLUDES = ["-I", str(ROOT / "csrc"), "-I", str(ROOT / "csrc" / "include")]


def families() -> list[str]:
    """Every kernels/<family>.hip."""
    return sorted(path.stem for path in (SOURCES / "kernels").glob("*.hip"))


@functools.cache
def amd_compiler(target: str) -> str | None:
    """The first compiler that can make a code object of this target with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        probe = pathlib.Path(folder) / "probe.hip"
        probe.write_text(
            'extern "C" __attribute__((global)) void probe(int* x) { *x = __builtin_amdgcn_workitem_id_x(); }\n'
        )
        for compiler in AMD_COMPILERS:
            if not shutil.which(compiler):
                continue
            command = [
                compiler,
                *AMD_FLAGS,
                f"--offload-arch={target}",
                str(probe),
                "-o",
                os.path.join(folder, "probe.co"),
            ]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return compiler
    return None


def command(target: str, source: pathlib.Path, output: pathlib.Path) -> list[str]:
    """The compile command; raises SystemExit with one sentence when no compiler will do."""
    if target.startswith("sm_"):
        nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
        if not nvcc:
            raise SystemExit(f"build_kernels: {target} needs nvcc (CUDA 12.4 or later) on PATH")
        return [nvcc, *NVCC_FLAGS, f"-arch={target}", *INCLUDES, str(source), "-o", str(output)]
    compiler = amd_compiler(target)
    if not compiler:
        raise SystemExit(
            f"build_kernels: no compiler for {target}; install ROCm (hipcc), "
            "or clang 20 or later (apt install clang-22 lld-22)"
        )
    return [compiler, *AMD_FLAGS, *WARNINGS, f"--offload-arch={target}", *INCLUDES, str(source), "-o", str(output)]


def newest_source() -> float:
    """Modification time of what a kernel can include."""
    files = [*SOURCES.rglob("*"), *(ROOT / "csrc" / "core").glob("*.h"), pathlib.Path(__file__)]
    return max(path.stat().st_mtime for path in files if path.is_file())


def build(targets: list[str], wanted: list[str], out: pathlib.Path, only_print: bool) -> int:
    """Builds what is out of date; returns the number of failures."""
    failures, newest = 0, newest_source()
    for target in targets:
        for family in wanted:
            output = out / target / (family + (".cubin" if target.startswith("sm_") else ".co"))
            line = command(target, SOURCES / "kernels" / (family + ".hip"), output)
            if only_print:
                print(" ".join(line))
                continue
            if output.exists() and output.stat().st_mtime > newest:
                print(f"{output}: up to date")
                continue
            output.parent.mkdir(parents=True, exist_ok=True)
            begin = time.monotonic()
            failed = subprocess.run(line).returncode != 0
            failures += failed
            state = "FAILED" if failed else f"{output.stat().st_size} bytes"
            print(f"{output}: {state}, {time.monotonic() - begin:.0f} s, {line[0]}", flush=True)
    return failures


def main() -> int:
    """Parses the command line."""
    environment = os.environ.get("GPU_ARCHS") or os.environ.get("PYTORCH_ROCM_ARCH") or DEFAULT_TARGETS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=environment, help="`;`-separated, such as gfx942;gfx1201;sm_90")
    parser.add_argument("--families", default=";".join(families()))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "kernels")
    parser.add_argument("--print", action="store_true", help="print the commands and build nothing")
    args = parser.parse_args()
    targets = [target for target in args.targets.split(";") if target]
    return 1 if build(targets, args.families.split(";"), args.out, args.print) else 0


if __name__ == "__main__":
    sys.exit(main())
