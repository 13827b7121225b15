"""setup.py: which build folders it reuses, and what it packs. What it reads is in test_build_environment.py."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

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


def test_compilers_at_a_time_are_said_and_what_to_do_when_memory_runs_out(setup_module, monkeypatch, capsys):
    """A compiler that the system kills for its memory fails with no word about memory."""
    from setuptools import Distribution

    settings = setup_module.build_environment.Settings(jobs=4, compiles=True, triton=True, local="")
    monkeypatch.delenv("MAX_JOBS", raising=False)
    text = "flash_attn: compilers at a time: 4 (from processors and memory; MAX_JOBS changes it)"
    assert settings.jobs_text() == text
    monkeypatch.setattr(setup_module, "SETTINGS", settings)
    killed = "import sys; sys.exit(137 if '--build' in sys.argv else 0)"
    run_cmake = setup_module.run_cmake
    monkeypatch.setattr(setup_module, "run_cmake", lambda _, *a, **k: run_cmake(sys.executable, "-c", killed, *a, **k))
    monkeypatch.setattr(setup_module.CMakeBuild, "_configure", lambda *_: None)
    command = setup_module.CMakeBuild(Distribution())
    with pytest.raises(
        SystemExit, match="failed with status 137; .* A compiler that was killed .*: set MAX_JOBS below 4"
    ):
        command.run()
    assert text in capsys.readouterr().out


def run_python(*arguments, status=0, **environment):
    """Runs it in the source tree; returns its output, of a failure its messages."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def build_wheel(folder, **environment):
    """A wheel without compiled code, built beside the source tree's own build folders."""
    base = ["-q", "egg_info", "--egg-base", folder, "build", "--build-base", folder / "build"]
    environment = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", **environment}
    run_python("setup.py", *base, "bdist_wheel", "--dist-dir", folder, **environment)
    (path,) = folder.glob("*.whl")
    return path


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
    # Older wheel packages put versions in brackets.
    text = re.sub(r"^(Requires-Dist: \S+) \((.*)\)$", r"\1\2", text, flags=re.MULTILINE)
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


def test_label_in_file_name_and_metadata(tmp_path):
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    path = build_wheel(tmp_path, FLASH_ATTN_LOCAL_VERSION="rocm62torch2.5triton")
    assert path.name == "flash_attn-2.8.3+rocm62torch2.5triton-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        assert "Version: 2.8.3+rocm62torch2.5triton" in archive.read(metadata).decode().splitlines()
        assert b'__version__ = "2.8.3"' in archive.read("flash_attn/__init__.py")


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_package_with_and_without_the_triton_backend(tmp_path, value):
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    with zipfile.ZipFile(build_wheel(tmp_path, BUILD_TRITON_BACKEND=value)) as archive:
        held = [name for name in archive.namelist() if "triton_amd" in name]
    assert bool(held) == (value == "true")


def test_two_builds_are_the_same_bytes(tmp_path):
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    first, second = (tmp_path / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
    paths = build_wheel(first), build_wheel(second, TZ="Asia/Tokyo")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    assert build_wheel(other, SOURCE_DATE_EPOCH="1000000000").read_bytes() != paths[0].read_bytes()


# Runs setup.py as if modules were not installed.
WITHOUT = """
import runpy, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if any(name == hidden or name.startswith(hidden + ".") for hidden in {hidden!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
sys.argv = ["setup.py", *{arguments!r}]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_missing_setuptools_is_one_sentence_with_the_remedy():
    said = run_python("-c", WITHOUT.format(hidden=["setuptools"], arguments=["install"]), status=1)
    assert said.count("\n") == 1 and "pip install ." in said and "ModuleNotFoundError" not in said


def test_missing_wheel_is_one_sentence_with_the_remedy():
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    hidden = ["wheel", "setuptools.command.bdist_wheel"]
    said = run_python("-c", WITHOUT.format(hidden=hidden, arguments=["bdist_wheel"]), status=1)
    assert said.count("\n") == 1 and "pip install wheel" in said and "ModuleNotFoundError" not in said


def test_wrong_value_ends_the_build_with_one_sentence():
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    said = run_python("setup.py", "--version", status=1, FLASH_ATTENTION_FORCE_BUILD="perhaps")
    assert said.count("\n") == 1 and "'perhaps'" in said
