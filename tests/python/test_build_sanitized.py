"""Builds with sanitizers, but for files whose instruction set the processor that will test them cannot execute."""

from __future__ import annotations

import json
import re

import pytest
from cmake_tree import CMAKE, configure

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")

SANITIZE = "-DFLASH_ATTN_SANITIZE=address,undefined"


def commands(path, *arguments):
    """Command lines of the core's files and their tests, by file."""
    path.mkdir()
    status, output = configure(path, *arguments, GPU_ARCHS="none")
    assert status == 0, output
    entries = json.loads((path / "tree" / "compile_commands.json").read_text())
    # Not compared: folders of the build tree, and what the files about GPUs alone read.
    left_out = re.compile(r' (-o \S+|-c \S+|-I\S+|-DFLASH_ATTN_NO_CODE_OBJECTS="[^"]*"[^"]*"")')
    return {entry["file"]: left_out.sub("", entry["command"]) for entry in entries}


def test_files_of_the_sets_named_are_compiled_as_without_sanitizers(tmp_path):
    plain = commands(tmp_path / "plain")
    sanitized = commands(tmp_path / "sanitized", SANITIZE, "-DFLASH_ATTN_NOT_SANITIZED=portable")
    seen = {True: 0, False: 0}
    for file, command in sanitized.items():
        as_it_is = re.search(r"/csrc/cpu/\w+_portable(_\w+)?\.cpp$", file) is not None
        assert (command == plain[file]) == as_it_is, file
        assert (" -fsanitize=address,undefined" in command) != as_it_is, file
        assert as_it_is or command.rindex(" -O1") > command.rindex(" -O3"), file
        assert as_it_is or command.rindex(" -UNDEBUG") > command.rindex(" -DNDEBUG"), file
        seen[as_it_is] += 1
    assert all(seen.values()), seen


def test_a_set_that_is_none_is_refused(tmp_path):
    status, output = configure(tmp_path, SANITIZE, "-DFLASH_ATTN_NOT_SANITIZED=portable;avx9", GPU_ARCHS="none")
    assert status != 0
    assert "FLASH_ATTN_NOT_SANITIZED names 'avx9'; accepted are portable, avx2," in output
