"""GPU targets of a build: what the variables accept, what is refused, and what a build without GPU code says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cmake_tree import CMAKE, configure

from flash_attn import _native

ROOT = Path(__file__).resolve().parents[2]
CLANG = any(shutil.which(f"clang++-{version}") for version in range(20, 31))

pytestmark = pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH")
needs_clang = pytest.mark.skipif(not CLANG, reason="no clang 20 or later here, so AMD targets have no compiler")


@pytest.mark.parametrize("variable", ["GPU_ARCHS", "PYTORCH_ROCM_ARCH"])
def test_an_unknown_target_is_refused(tmp_path, variable):
    status, output = configure(tmp_path, **{variable: "gfx942;mi300"})
    assert status != 0
    assert f"{variable} names the GPU target 'mi300'; accepted are gfx900;gfx906;" in output


def test_a_target_without_kernels_is_refused_when_asked_for(tmp_path):
    status, output = configure(tmp_path, GPU_ARCHS="gfx803")
    assert status != 0 and "'gfx803'" in output and "accepted are" in output


@needs_clang
def test_rocm_arch_of_an_image_may_name_more_than_there_is(tmp_path):
    status, output = configure(tmp_path, PYTORCH_ROCM_ARCH="gfx803;gfx90a:xnack-;gfx1201")
    assert status == 0, output
    assert "gfx803 (from PYTORCH_ROCM_ARCH): no kernels for it yet, skipped" in output
    assert "GPU target gfx90a: " in output and "GPU target gfx1201: " in output


def test_cmake_and_the_host_name_the_same_targets():
    listed = re.search(r"set\(flash_attn_amd_targets ([^)]*)\)", (ROOT / "cmake" / "FlashAttnGpu.cmake").read_text())
    kinds = re.findall(r"\bX\((gfx\w+), \w+\)", (ROOT / "csrc" / "hip" / "targets.h").read_text())
    assert listed.group(1).split() == kinds
    machines = re.findall(r'"(gfx\w+)": 0x', (ROOT / "tools" / "check_installed.py").read_text())
    assert machines == kinds  # A wheel for any of them can be checked.


def test_rocm_arch_without_any_target_that_there_is_is_refused(tmp_path):
    status, output = configure(tmp_path, PYTORCH_ROCM_ARCH="gfx701;gfx803")
    assert status != 0
    assert "no kernels for any GPU target of PYTORCH_ROCM_ARCH, which is 'gfx701;gfx803'; accepted are gfx900" in output


@needs_clang
def test_gpu_archs_comes_before_pytorch_rocm_arch(tmp_path):
    status, output = configure(tmp_path, GPU_ARCHS="gfx942", PYTORCH_ROCM_ARCH="gfx1201")
    assert status == 0, output
    assert "GPU target gfx942: " in output and "gfx1201" not in output


def test_none(tmp_path):
    status, output = configure(tmp_path, GPU_ARCHS="none")
    assert status == 0 and "GPU kernels: none (none were asked for)" in output


def test_native_without_a_gpu_says_what_was_asked(tmp_path):
    if any(shutil.which(name) for name in ("nvidia-smi", "rocm_agent_enumerator", "amdgpu-arch")):
        pytest.skip("this machine has a tool that finds GPUs")
    status, output = configure(tmp_path, GPU_ARCHS="native")
    assert status != 0 and "no GPU was found" in output and "GPU_ARCHS=gfx942" in output


@needs_clang
@pytest.mark.parametrize("listed, built", [("gfx000\ngfx90a\ngfx90a", ["gfx90a"]), ("gfx000", ["gfx942", "gfx1201"])])
def test_the_default_is_the_machines_own_gpus_or_else_two(tmp_path, listed, built):
    tool = tmp_path / "rocm_agent_enumerator"
    tool.write_text(f"#!/bin/sh\nprintf '{listed}\\n'\n")
    tool.chmod(0o755)
    status, output = configure(tmp_path, path=f"{tmp_path}:{os.environ['PATH']}")
    assert status == 0, output
    assert re.findall(r"GPU target (gfx\w+): ", output) == built


def bare_path(tmp_path):
    """A PATH with a C++ compiler and what CMake needs, and no compiler for GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("c++", "cc", "gcc", "g++", "make", "ninja", "ld", "as", "ar", "ranlib", "nm", "uname", "sh"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return str(folder)


def test_without_a_compiler_the_default_is_no_gpu_code(tmp_path):
    status, output = configure(tmp_path, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", path=bare_path(tmp_path))
    assert status == 0, output
    assert "GPU kernels: none (no compiler for gfx942 (install ROCm, or clang 20 or later" in output
    # The reason is compiled in, for `explain`.
    entries = json.loads((tmp_path / "tree" / "compile_commands.json").read_text())
    entry = next(entry for entry in entries if entry["file"].endswith("hip/runtime/code_objects.cpp"))
    assert "no compiler for gfx942" in entry["command"] and "no compiler for gfx1201" in entry["command"]
    command = re.sub(r" -o \S+", " -fsyntax-only", entry["command"])
    assert subprocess.run(command, shell=True, cwd=entry["directory"]).returncode == 0


def test_without_a_compiler_an_explicit_target_is_an_error(tmp_path):
    status, output = configure(tmp_path, path=bare_path(tmp_path), GPU_ARCHS="gfx942")
    assert status != 0 and "GPU kernels were asked for and there is no compiler for gfx942" in output


@pytest.mark.skipif(not _native.load()._code_objects(), reason="this build has no GPU code")
def test_code_objects_hold_nothing_of_the_folder_they_were_compiled_in():
    """clang would end the name of a symbol with a hash of the source's path."""
    module = _native.load()
    for entry in module._code_objects():
        code = module._code_object(entry["target"], entry["name"])
        assert not re.search(rb"__hip_cuid_\w", code) and str(ROOT).encode() not in code, entry


def test_kernels_dir_without_objects_is_refused(tmp_path):
    status, output = configure(tmp_path, f"-DFLASH_ATTN_KERNELS_DIR={tmp_path}", GPU_ARCHS="gfx942")
    assert status != 0 and "which has no gfx942/*.co or .cubin" in output
