"""setup.py: what it validates, where it finds torch, and what it packs."""

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
print("RESULT", build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))
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


def run_python(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    name = run_python("-c", HOOK, tmp_path).rsplit("RESULT ", 1)[1].strip()
    text = (tmp_path / name / "METADATA").read_text(encoding="utf-8")
    for line in ("Version: 2.8.3", "License: BSD-3-Clause", "Requires-Dist: torch>1.12.1", "Requires-Dist: einops"):
        assert line in text.splitlines()


def test_source_distribution_has_what_a_build_needs(tmp_path):
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    run_python("setup.py", "-q", "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [p.relative_to(ROOT) for folder in ("csrc", "cmake", "flash_attn") for p in (ROOT / folder).rglob("*.*")]
    wanted = {p.as_posix() for p in sources if p.suffix in (".h", ".cpp", ".txt", ".cmake", ".in", ".py")}
    assert wanted <= names, wanted - names
    assert {
        "CMakeLists.txt",
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "flash_attn_2_cuda.py",
        "flash_attn_interface.py",
        "flash_attention_amd.py",
    } <= names
    assert not [name for name in names if name.startswith("flash_attn/lib/")]
