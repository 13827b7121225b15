"""Checks an installed flash_attn, run where the source tree is not importable: python check_installed.py FOLDER WHEEL

FOLDER is where it must have been installed, WHEEL the name of the file that it came from. Checks the metadata, that the
binding stays under 1 MB, and one attention call with its gradients against the definition.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import torch

import flash_attn
import flash_attn_2_cuda

BINDING_LIMIT = 1_000_000  # bytes


def attention(q, k, v):
    """softmax(q k^T / sqrt(D)) v for (B, S, H, D), under a causal mask."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


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
