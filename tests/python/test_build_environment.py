"""tools/build_environment.py: every variable that a build reads, what it accepts, and where torch is found."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SWITCHES = (
    "FLASH_ATTENTION_FORCE_BUILD",
    "FLASH_ATTENTION_SKIP_CUDA_BUILD",
    "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "BUILD_TRITON_BACKEND",
)
VARIABLES = (*SWITCHES, "MAX_JOBS", "FLASH_ATTN_LOCAL_VERSION", "FLASH_ATTN_TORCH_DIR")


@pytest.fixture
def environment(monkeypatch):
    """The module, with none of its variables set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("build_environment", ROOT / "tools" / "build_environment.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_environment", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(environment, monkeypatch, tmp_path):
    """Makes the module see a source tree with or without the Triton backend."""

    def make(triton):
        monkeypatch.setattr(environment, "ROOT", tmp_path)
        if triton:
            package = tmp_path / environment.TRITON_PACKAGE.replace(".", "/")
            package.mkdir(parents=True)
            (package / "__init__.py").touch()

    return make


def refusal(call):
    with pytest.raises(SystemExit) as error:
        call()
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["2", "maybe", "TRUE ", "-"])
def test_switches_name_what_they_accept(environment, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    message = refusal(environment.read)
    assert name in message and repr(value) in message and "true, 1, on, yes" in message and "false" in message


@pytest.mark.parametrize("value, meaning", [("", None), ("TRUE", True), ("1", True), ("False", False), ("off", False)])
def test_spellings_of_switches(environment, monkeypatch, value, meaning):
    monkeypatch.setenv("FLASH_ATTENTION_FORCE_BUILD", value)
    assert environment.switch("FLASH_ATTENTION_FORCE_BUILD") is meaning
    assert environment.read().compiles


def test_skip_leaves_out_compiled_code(environment, monkeypatch):
    assert environment.read().compiles
    monkeypatch.setenv("FLASH_ATTENTION_SKIP_CUDA_BUILD", "TRUE")
    assert not environment.read().compiles


@pytest.mark.parametrize("name", ["BUILD_TRITON_BACKEND", "FLASH_ATTENTION_TRITON_AMD_ENABLE"])
def test_triton_can_be_asked_for_where_it_is(environment, monkeypatch, tree, name):
    tree(triton=True)
    assert environment.read().triton
    monkeypatch.setenv(name, "true")
    assert environment.read().triton


@pytest.mark.parametrize("name", ["BUILD_TRITON_BACKEND", "FLASH_ATTENTION_TRITON_AMD_ENABLE"])
def test_triton_cannot_be_asked_for_where_it_is_not(environment, monkeypatch, tree, name):
    tree(triton=False)
    assert not environment.read().triton
    monkeypatch.setenv(name, "true")
    assert name in refusal(environment.read)


def test_triton_can_be_left_out(environment, monkeypatch, tree):
    tree(triton=True)
    monkeypatch.setenv("BUILD_TRITON_BACKEND", "false")
    assert not environment.read().triton
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    message = refusal(environment.read)
    assert "BUILD_TRITON_BACKEND" in message and "FLASH_ATTENTION_TRITON_AMD_ENABLE" in message


@pytest.mark.parametrize("value", ["rocm62torch2.5", "rocm62torch2.5triton", "cpu"])
def test_local_versions(environment, monkeypatch, value):
    assert environment.read().local == ""
    monkeypatch.setenv("FLASH_ATTN_LOCAL_VERSION", value)
    assert environment.read().local == value


@pytest.mark.parametrize("value", ["ROCm", "+cpu", "a b", "2.5.", "a-b", "a_b"])
def test_local_versions_that_a_version_cannot_hold(environment, monkeypatch, value):
    """Those that packaging tools would rewrite are refused too: the file's name would not say what was asked."""
    monkeypatch.setenv("FLASH_ATTN_LOCAL_VERSION", value)
    message = refusal(environment.read)
    assert repr(value) in message and "rocm62torch2.5" in message


def test_what_a_build_would_do_is_printed(environment):
    import torch

    env = {**os.environ, "MAX_JOBS": "3", "FLASH_ATTN_LOCAL_VERSION": "cpu"}
    env.update(FLASH_ATTN_TORCH_DIR=torch.__path__[0])
    command = [sys.executable, str(ROOT / "tools" / "build_environment.py")]
    printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert {"jobs      3", "local     cpu"} <= set(printed.splitlines()) and torch.__path__[0] in printed


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " 2"])
def test_max_jobs_must_be_a_positive_integer(environment, monkeypatch, value):
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(SystemExit) as error:
        environment.max_jobs()
    assert "MAX_JOBS" in str(error.value) and repr(value) in str(error.value) and "at least 1" in str(error.value)


def test_max_jobs_is_honoured(environment, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert environment.max_jobs() == 3
    monkeypatch.delenv("MAX_JOBS")
    assert 1 <= environment.max_jobs() <= os.cpu_count()


def test_torch_of_this_environment_is_found(environment, monkeypatch):
    import torch

    monkeypatch.delenv("FLASH_ATTN_TORCH_DIR", raising=False)
    assert pathlib.Path(environment.torch_dir()).samefile(torch.__path__[0])
    assert environment.torch_release(torch.__path__[0]) == ".".join(torch.__version__.split(".")[:2])


def test_torch_hidden_by_build_isolation_is_found(environment, monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert pathlib.Path(environment.torch_dir()).samefile(torch.__path__[0])


def test_releases_are_read_from_torchs_files(environment, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.5.1+cpu'\n")
    assert environment.torch_release(tmp_path) == "2.5"
    assert environment.torch_release(tmp_path / "nowhere") == "unknown"


def test_missing_torch_is_one_sentence_with_the_remedy(environment, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho\n")
    python.chmod(0o755)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(python))
    message = refusal(environment.torch_dir)
    for part in (str(python), "install torch first", "--no-build-isolation", "FLASH_ATTN_TORCH_DIR"):
        assert part in message


def test_given_torch_wins(environment, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_TORCH_DIR", "/some/torch")
    assert environment.torch_dir() == "/some/torch"
