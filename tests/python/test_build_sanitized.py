"""Builds with sanitizers, but for files whose instruction set the processor that will test them cannot execute."""

from __future__ import annotations

import json
import re

import pytest
from cmake_tree import CMAKE, configure

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")

SANITIZE = "-DFLASH_ATTN_SANITIZE=address,undefined"


def test_files_of_the_sets_named_are_compiled_as_they_are(tmp_path):
    status, output = configure(tmp_path, SANITIZE, "-DFLASH_ATTN_NOT_SANITIZED=portable", GPU_ARCHS="none")
    assert status == 0, output
    entries = json.loads((tmp_path / "tree" / "compile_commands.json").read_text())
    seen = {True: 0, False: 0}
    for entry in entries:
        flags = re.findall(r" -f(?:no-)?sanitize=(?:address,undefined|all)", entry["command"])
        left_out = re.search(r"_portable(_\w+)?\.cpp$", entry["file"]) is not None
        assert flags == [" -fsanitize=address,undefined"] + [" -fno-sanitize=all"] * left_out, entry["file"]
        seen[left_out] += 1
    assert all(seen.values()), seen


def test_a_set_that_is_none_is_refused(tmp_path):
    status, output = configure(tmp_path, SANITIZE, "-DFLASH_ATTN_NOT_SANITIZED=portable;avx9", GPU_ARCHS="none")
    assert status != 0
    assert "FLASH_ATTN_NOT_SANITIZED names 'avx9'; accepted are portable, avx2," in output
