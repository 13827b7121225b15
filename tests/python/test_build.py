"""setup.py: what it validates, where it finds torch, and what it packs. Compiling is what every other test depends on."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tarfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A build backend's process in which importing torch is an error.
HOOK = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise AssertionError("torch was imported")
sys.meta_path.insert(0, NoTorch())
from setuptools import build_meta
print("RESULT", getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture
def setup_module(monkeypatch):
    """setup.py as a module, without its call of setup()."""
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    monkeypatch.setattr("setuptools.setup", lambda **kwargs: None)
    spec = importlib.util.spec_from_file_location("flash_attn_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_hook(hook, folder):
    command = [sys.executable, "-c", HOOK, hook, str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.rsplit("RESULT ", 1)[1].strip()


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " 2"])
def test_max_jobs_must_be_a_positive_integer(setup_module, monkeypatch, value):
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(SystemExit) as error:
        setup_module.max_jobs()
    assert "MAX_JOBS" in str(error.value) and repr(value) in str(error.value) and "at least 1" in str(error.value)


def test_max_jobs_is_honoured(setup_module, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert setup_module.max_jobs() == 3
    monkeypatch.delenv("MAX_JOBS")
    assert 1 <= setup_module.max_jobs() <= os.cpu_count()


def test_torch_of_this_environment_is_found(setup_module, monkeypatch):
    import torch

    monkeypatch.delenv("FLASH_ATTN_TORCH_DIR", raising=False)
    assert pathlib.Path(setup_module.torch_dir()).samefile(torch.__path__[0])
    assert setup_module.torch_release(torch.__path__[0]) == ".".join(torch.__version__.split(".")[:2])


def test_torch_hidden_by_build_isolation_is_found(setup_module, monkeypatch, tmp_path):
    hidden = tmp_path / "site-packages" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "version.py").write_text("__version__ = '2.5.1+cpu'\n")
    monkeypatch.delenv("FLASH_ATTN_TORCH_DIR", raising=False)
    monkeypatch.setattr(setup_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup_module.sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    monkeypatch.setattr(setup_module.site, "getsitepackages", lambda: [str(hidden.parent)])
    assert setup_module.torch_dir() == str(hidden)
    assert setup_module.torch_release(hidden) == "2.5"


def test_missing_torch_is_one_sentence_with_the_remedy(setup_module, monkeypatch, tmp_path):
    monkeypatch.delenv("FLASH_ATTN_TORCH_DIR", raising=False)
    monkeypatch.setattr(setup_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup_module.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(setup_module.site, "getsitepackages", lambda: [])
    monkeypatch.setattr(setup_module.site, "getusersitepackages", lambda: str(tmp_path))
    with pytest.raises(SystemExit) as error:
        setup_module.torch_dir()
    message = str(error.value)
    for part in (sys.executable, "install torch first", "--no-build-isolation", "FLASH_ATTN_TORCH_DIR"):
        assert part in message
    assert "\n" not in message


def test_given_torch_wins(setup_module, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_TORCH_DIR", "/some/torch")
    assert setup_module.torch_dir() == "/some/torch"


def test_build_directory_of_another_tree_compiler_or_generator_is_not_reused(setup_module, monkeypatch, tmp_path):
    cache = tmp_path / "CMakeCache.txt"
    reusable = setup_module.CMakeBuild._reusable
    monkeypatch.delenv("CXX", raising=False)
    assert reusable(None, cache, "Ninja")
    lines = [
        f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}",
        "CMAKE_GENERATOR:INTERNAL=Ninja",
        "CMAKE_CXX_COMPILER:STRING=/x/c++",
    ]
    cache.write_text("\n".join(lines) + "\n")
    assert reusable(None, cache, "Ninja")
    assert not reusable(None, cache, "Unix Makefiles")
    monkeypatch.setenv("CXX", sys.executable)  # any program that is not the cached one
    assert not reusable(None, cache, "Ninja")
    monkeypatch.delenv("CXX")
    cache.write_text("\n".join(["CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere", *lines[1:]]) + "\n")
    assert not reusable(None, cache, "Ninja")


def test_metadata_without_torch(tmp_path):
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    text = (run_hook("prepare_metadata_for_build_wheel", tmp_path) / "METADATA").read_text(encoding="utf-8")
    for line in ("Version: 2.8.3", "License: BSD-3-Clause", "Requires-Dist: torch>1.12.1", "Requires-Dist: einops"):
        assert line in text.splitlines()


def test_source_distribution_has_what_a_build_needs(tmp_path):
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    with tarfile.open(run_hook("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("csrc", "cmake", "flash_attn"):
        wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob("*") if p.is_file()}
        wanted = {name for name in wanted if "__pycache__" not in name and not name.startswith("flash_attn/lib/")}
        assert wanted <= names, wanted - names
    assert {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "README.md", "flash_attn_2_cuda.py"} <= names
    assert not [name for name in names if name.startswith("flash_attn/lib/")]
