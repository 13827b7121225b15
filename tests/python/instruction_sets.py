"""The CPU's instruction sets: those that there are, and those that this machine executes. See the fixture `isa`."""

from __future__ import annotations

import pytest

from flash_attn import flash_attn_interface as interface

module = interface.flash_attn_gpu
AVAILABLE = module._cpu_isas()
KNOWN = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16_emulated", "amx_bf16")
with_tiles = pytest.mark.parametrize("isa", KNOWN[4:], indirect=True)
