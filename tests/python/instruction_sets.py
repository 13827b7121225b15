"""The CPU's instruction sets: of this machine's architecture, and what it executes. See the fixture `isa`."""

from __future__ import annotations

import platform

import pytest

TILED = ("amx_bf16_emulated", "amx_bf16")
OF_X86 = ("portable", "avx2", "avx512", "avx512_bf16", *TILED)
KNOWN = ("portable", "neon", "neon_bf16") if platform.machine().lower() in ("aarch64", "arm64") else OF_X86
with_tiles = pytest.mark.parametrize("isa", TILED, indirect=True)


def cpu():
    """The extension module, which lists and forces instruction sets.

    Imported here, not above: conftest.py loads this file before the Triton backend's suite chooses that backend.
    """
    from flash_attn import flash_attn_interface

    return flash_attn_interface.flash_attn_gpu


def available():
    return cpu()._cpu_isas()
