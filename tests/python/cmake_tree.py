"""This tree, configured by CMake into a folder of a test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake")


def configure(tmp_path, *options, path=None, **environment):
    """Runs CMake on the tree; returns (status, output)."""
    env = {k: v for k, v in os.environ.items() if k not in ("GPU_ARCHS", "PYTORCH_ROCM_ARCH")}
    env.update(environment)
    if path is not None:
        env["PATH"] = path
    command = [CMAKE, "-S", str(ROOT), "-B", str(tmp_path / "tree"), "-DFLASH_ATTN_TESTS=OFF", *options]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, " ".join(done.stdout.split())
