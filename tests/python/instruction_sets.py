"""The CPU's instruction sets: those that there are, and those that this machine executes. See the fixture `isa`."""

from __future__ import annotations

import pytest

KNOWN = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16_emulated", "amx_bf16")
with_tiles = pytest.mark.parametrize("isa", KNOWN[4:], indirect=True)


def cpu():
    """The extension module, which lists and forces instruction sets.

    Imported here, not above: conftest.py loads this file before the Triton backend's suite chooses that backend.
    """
    from flash_attn import flash_attn_interface

    return flash_attn_interface.flash_attn_gpu


def available():
    return cpu()._cpu_isas()
