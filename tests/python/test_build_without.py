"""Environments that lack torch, wheel or setuptools, really made: what installing and importing say there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a build reads before it needs torch.
TREE = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CMakeLists.txt", "tools", "flash_attn",
        "flash_attn_2_cuda.py", "flash_attn_interface.py", "flash_attention_amd.py")  # fmt: skip
INSTALL = ("-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", ".")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("lib", "gfxsim", "__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(python, tree, *arguments, **environment):
    """(status, what it prints), with the environment's own modules alone."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FLASH_ATTN_TORCH_DIR")}
    command = [python, *arguments]
    done = subprocess.run(command, cwd=tree, env={**env, **environment}, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def make_environment(folder, tree):
    done = subprocess.run([sys.executable, "-m", "venv", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this Python makes no environments: {done.stdout + done.stderr}")
    python = folder / "bin" / "python"
    for module in ("torch", "wheel"):
        assert f"No module named '{module}'" in run(python, tree, "-c", f"import {module}")[1]
    return python


@pytest.fixture(scope="module")
def bare(tree, tmp_path_factory):
    """Python of an environment as venv makes it: without torch and wheel; up to Python 3.11 with an old setuptools."""
    return make_environment(tmp_path_factory.mktemp("bare") / "venv", tree)


@pytest.fixture(scope="module")
def without_setuptools(tree, tmp_path_factory):
    python = make_environment(tmp_path_factory.mktemp("without_setuptools") / "venv", tree)
    run(python, tree, "-m", "pip", "uninstall", "--yes", "setuptools")
    return python


@pytest.fixture(scope="module")
def setuptools_here(tmp_path_factory):
    """A folder with this environment's setuptools and wheel, and nothing of torch, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("setuptools")
    for name in ("setuptools", "wheel", "packaging"):  # wheel needs the last
        module = pytest.importorskip(name, reason=f"{name} is not installed here")
        for path in Path(module.__file__).parents[1].glob(f"{name}*"):
            (folder / path.name).symlink_to(path)
    return str(folder)


def refused(result, words):
    status, printed = result
    assert status != 0 and words in printed, printed
    assert "ModuleNotFoundError" not in printed and "No module named" not in printed, printed


@pytest.mark.parametrize("arguments", [INSTALL, ("setup.py", "install")], ids=["pip", "setup.py"])
def test_without_torch(bare, tree, setuptools_here, arguments):
    result = run(bare, tree, *arguments, PYTHONPATH=setuptools_here)
    refused(result, f"{bare} has none: install torch first, and where it is installed but hidden")


@pytest.mark.parametrize("arguments", [INSTALL, ("setup.py", "bdist_wheel")], ids=["pip", "setup.py"])
def test_without_wheel(bare, tree, arguments):
    status, _ = run(bare, tree, "-c", "import setuptools; assert setuptools.__version__ < '70'")
    if status:
        pytest.skip("environments of this Python have no setuptools that would need wheel")
    refused(run(bare, tree, *arguments), "run `pip install --upgrade setuptools` or `pip install wheel` first.")


@pytest.mark.parametrize("arguments", [INSTALL, ("setup.py", "install")], ids=["pip", "setup.py"])
def test_without_setuptools(without_setuptools, tree, arguments):
    result = run(without_setuptools, tree, *arguments)
    refused(result, f"{without_setuptools} has no setuptools, with which flash_attn is built: run `pip install .`")


@pytest.mark.parametrize("module", ["flash_attn", "flash_attn_2_cuda", "flash_attn_interface", "flash_attention_amd"])
def test_importing_without_torch(bare, tree, module):
    code = f"try:\n    import {module}\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    status, printed = run(bare, tree, "-c", code)
    assert status == 0 and printed.startswith(f"ImportError flash_attn computes with torch, and {bare} has none: ")


@pytest.mark.parametrize("arguments", [(), ("verify",)])
def test_report_without_torch(bare, tree, arguments):
    refused(run(bare, tree, "-m", "flash_attn", *arguments), "problem         flash_attn computes with torch, and")
