"""Checks an installed flash_attn, run where the source tree is not importable: python check_installed.py FOLDER WHEEL

FOLDER is where it must have been installed, WHEEL the name of the file that it came from. Checks the metadata, that the
binding stays under 1 MB, that GPU code is what its target says, and one attention call with its gradients against the
definition. A wheel whose label begins with rocm must hold GPU code, and the Triton backend only if its label ends so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

import flash_attn
import flash_attn_2_cuda

BINDING_LIMIT = 1_000_000  # bytes
ELF_AMDGPU = 224
# EF_AMDGPU_MACH, the lowest byte of an ELF file's flags (LLVM, AMDGPUUsage).
MACHINE = {
    "gfx900": 0x2C, "gfx906": 0x2F, "gfx908": 0x30, "gfx90a": 0x3F, "gfx942": 0x4C, "gfx950": 0x4F,
    "gfx1010": 0x33, "gfx1011": 0x34, "gfx1012": 0x35, "gfx1030": 0x36, "gfx1031": 0x37, "gfx1032": 0x38,
    "gfx1034": 0x3E, "gfx1035": 0x3D, "gfx1036": 0x45, "gfx1100": 0x41, "gfx1101": 0x46, "gfx1102": 0x47,
    "gfx1103": 0x44, "gfx1150": 0x43, "gfx1151": 0x4A, "gfx1200": 0x48, "gfx1201": 0x4E,
}  # fmt: skip


def attention(q, k, v):
    """softmax(q k^T / sqrt(D)) v for (B, S, H, D), under a causal mask."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def check_gpu_code(label: str) -> None:
    """Every code object is an ELF file for the machine that it is kept under."""
    found = [entry for entry in flash_attn_2_cuda._code_objects() if entry["target"].startswith("gfx")]
    if label.startswith("rocm") and not found:
        sys.exit(f"a wheel for ROCm has no GPU code: {flash_attn_2_cuda._missing_code_objects()}")
    for entry in found:
        code = flash_attn_2_cuda._code_object(entry["target"], entry["name"])
        kind, machine = int.from_bytes(code[18:20], "little"), code[48]
        if code[:4] != b"\x7fELF" or kind != ELF_AMDGPU or machine != MACHINE[entry["target"]]:
            sys.exit(f"{entry['name']} for {entry['target']} is not such code: ELF machine {kind}, flags {machine:#x}")
        print(f"{entry['target']} {entry['name']}: {len(code)} bytes of machine code, {entry['stored_bytes']} stored")


def check_triton(label: str) -> None:
    held = importlib.util.find_spec("flash_attn.flash_attn_triton_amd") is not None
    if label.startswith("rocm") and held != label.endswith("triton"):
        sys.exit(f"the label is {label} and the Triton backend is{'' if held else ' not'} there")


def main(folder: str, wheel: str) -> None:
    folder = Path(folder).resolve()
    for module in (flash_attn, flash_attn_2_cuda):
        if folder not in Path(module.__file__).resolve().parents:
            sys.exit(f"{module.__name__} was imported from {module.__file__}, not from {folder}")
    version = importlib.metadata.version("flash-attn")
    if version.partition("+")[0] != flash_attn.__version__ or wheel.split("-")[1] != version:
        sys.exit(
            f"the metadata's version is {version}, the package's {flash_attn.__version__}, and the file is {wheel}"
        )
    label = version.partition("+")[2]
    check_gpu_code(label)
    check_triton(label)
    bindings = list(folder.glob("**/flash_attn/lib/torch-*/*"))
    if len(bindings) != 1 or bindings[0].stat().st_size >= BINDING_LIMIT:
        sys.exit(f"there should be one binding of less than {BINDING_LIMIT} bytes, not {bindings}")

    torch.manual_seed(0)
    inputs = [torch.randn(2, 100, 3, 40, requires_grad=True) for _ in range(3)]
    ours, expected = flash_attn.flash_attn_func(*inputs, causal=True), attention(*inputs)
    weights = torch.randn_like(expected)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, inputs, weights)), (expected, *torch.autograd.grad(expected, inputs, weights))
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    print(f"flash_attn {flash_attn.__version__} in {folder}: binding {bindings[0].stat().st_size} bytes, results agree")


if __name__ == "__main__":
    main(*sys.argv[1:])
