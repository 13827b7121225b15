"""Wheels of every combination: create_matrix.py, build_rocm.sh, the workflows and the Dockerfiles."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
NAMES = ["flash-attn-version", "python-version", "torch-version", "rocm-version"]


@pytest.fixture
def matrix(monkeypatch):
    """create_matrix.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT))
    import create_matrix

    return create_matrix


def run(*command, status=0, **environment):
    """Runs it in the source tree without variables that a build reads; returns what it printed."""
    unset = ("GPU_ARCHS", "PYTORCH_ROCM_ARCH", "MAX_JOBS", "BUILD_TRITON_BACKEND")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(command, cwd=ROOT, env={**env, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


# The matrix


def test_matrix_is_what_a_workflow_reads():
    found = json.loads(run(sys.executable, "create_matrix.py"))["include"]
    assert 50 < len(found) <= 256  # what a workflow's matrix can hold
    assert all(list(one) == NAMES for one in found)
    assert {one["python-version"] for one in found} == {"3.10", "3.11", "3.12", "3.13"}
    example = dict(zip(NAMES, ("2.8.3", "3.11", "2.5.1", "6.2")))
    assert example in found and {**example, "rocm-version": "7.2"} not in found


def test_every_version_of_the_matrix_is_used(matrix):
    found = [one for one in matrix.combinations(matrix.ROCM_MATRIX) if "reason" not in one]
    for name, values in matrix.ROCM_MATRIX.items():
        assert {one[name] for one in found} == set(values), name
    assert list(matrix.ROCM_OF_TORCH) == matrix.ROCM_MATRIX["torch-version"]


def test_what_is_left_out_has_a_reason(matrix, capsys):
    assert matrix.main(["--excluded", "--filter", "torch-version=2.15.0", "--filter", "python-version=3.10"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["include"]
    assert first["reason"] == "torch 2.15.0 has no wheel for Python 3.10"
    everything = list(matrix.combinations(matrix.ROCM_MATRIX))
    assert all(one["reason"] for one in everything if "reason" in one)


def test_filters(matrix, capsys):
    assert matrix.main(["--filter", "torch-version=2.9.1,2.10.0", "--filter", "python-version=3.12"]) == 0
    found = json.loads(capsys.readouterr().out)["include"]
    assert [(one["torch-version"], one["rocm-version"]) for one in found] == [
        ("2.9.1", "6.3"), ("2.9.1", "6.4"), ("2.10.0", "7.0"), ("2.10.0", "7.1"),
    ]  # fmt: skip
    for wrong, words in (("torch=2.9.1", "'torch' is none of flash-attn-version"), ("rocm-version=5.7", "'5.7'")):
        with pytest.raises(SystemExit, match=words):
            matrix.main(["--filter", wrong])


def test_nothing_left_says_why(matrix, capsys):
    assert matrix.main(["--filter", "torch-version=2.5.1", "--filter", "rocm-version=7.2"]) == 1
    assert "torch 2.5.1 has no wheel for ROCm 7.2" in capsys.readouterr().err


# build_rocm.sh


def test_dry_run_of_the_guides_example():
    printed = run("./build_rocm.sh", "2.8.3", "3.11", "2.5.1", "6.2", "--dry-run", MAX_JOBS="7")
    name = "dist/flash_attn-2.8.3+rocm62torch2.5-cp311-cp311-linux_x86_64.whl"
    assert f"wheel      {name}" in printed and printed.rstrip().endswith(f"tools/wheel.sh check {name}")
    words = shlex.split(printed.replace("\n", " "))
    for word in ("https://download.pytorch.org/whl/rocm6.2", "torch==2.5.1", "FLASH_ATTN_LOCAL_VERSION=rocm62torch2.5",
                 "BUILD_TRITON_BACKEND=false", "MAX_JOBS=7", "KEEP_PLATFORM=1"):  # fmt: skip
        assert word in words, word
    if not shutil.which("rocm_agent_enumerator"):
        (targets,) = (word for word in words if word.startswith("PYTORCH_ROCM_ARCH="))
        assert {"gfx90a", "gfx942", "gfx1030", "gfx1100"} <= set(targets.partition("=")[2].split(";"))


@pytest.mark.parametrize("value", ["true", "TRUE", "1"])
def test_dry_run_of_the_variant_with_triton(value):
    printed = run("./build_rocm.sh", "2.8.3", "3.12", "2.9.1", "6.4", "--dry-run", BUILD_TRITON_BACKEND=value)
    assert "dist/flash_attn-2.8.3+rocm64torch2.9triton-cp312-cp312-linux_x86_64.whl" in printed
    assert "BUILD_TRITON_BACKEND=true" in printed


def test_targets_are_the_machines_own(tmp_path):
    tool = tmp_path / "rocm_agent_enumerator"
    tool.write_text("#!/bin/sh\necho gfx000\necho gfx942\necho gfx942\n")
    tool.chmod(0o755)
    arguments = ["./build_rocm.sh", "2.8.3", "3.11", "2.5.1", "6.2", "--dry-run"]
    printed = run(*arguments, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "targets    gfx942\n" in printed and "GPU_ARCHS=gfx942 " in printed
    printed = run(*arguments, PATH=f"{tmp_path}:{os.environ['PATH']}", GPU_ARCHS="gfx1201")
    assert "targets    gfx1201\n" in printed


@pytest.mark.parametrize(
    "arguments, environment, words",
    [
        (["2.8.3", "3.11", "2.5.1"], {}, "3 versions were given; four are needed"),
        (["2.7.4", "3.11", "2.5.1", "6.2"], {}, "this source tree is flash-attn 2.8.3, not 2.7.4"),
        (["2.8.3", "3.11", "2.5.1", "7.2"], {}, "torch 2.5.1 has no wheel for ROCm 7.2; it has them for 6.1, 6.2"),
        (["2.8.3", "3.8", "2.5.1", "6.2"], {}, "Python 3.8 is not in the matrix"),
        (["2.8.3", "3.11", "2.5.1", "6.2", "--fast"], {}, "no option '--fast'"),
        (
            ["2.8.3", "3.11", "2.5.1", "6.2", "--dry-run"],
            {"BUILD_TRITON_BACKEND": "maybe"},
            "BUILD_TRITON_BACKEND is 'maybe'; accepted, in any case, are true, 1, on, yes, and false, 0, off, no",
        ),
        (
            ["2.8.3", "3.11", "2.5.1", "6.2", "--dry-run"],
            {"MAX_JOBS": "all"},
            "MAX_JOBS is 'all'; it must be an integer",
        ),
        (["2.8.3", "3.11", "2.5.1", "6.2", "--dry-run"], {"MAX_JOBS": ""}, None),
    ],
)
def test_what_build_rocm_refuses(arguments, environment, words):
    printed = run("./build_rocm.sh", *arguments, status=2 if words else 0, **environment)
    assert words is None or words in printed


def test_help_of_the_scripts():
    assert "<flash-attn-version> <python-version> <torch-version> <rocm-version>" in run("./build_rocm.sh", "--help")
    assert "tools/wheel.sh check WHEEL" in run("tools/wheel.sh", status=2)
    printed = run(sys.executable, "create_matrix.py", "--help")
    assert all(option in printed for option in ("--filter", "--excluded", "--check"))


@pytest.mark.parametrize("gate, accepted", [("==2.8.3", True), ("<=2.8.3", True), (">=2.8.3,<2.8.4", True),
                                            ("===2.8.3", False)])  # fmt: skip
def test_what_the_label_costs_in_requirements(gate, accepted):
    specifiers = pytest.importorskip("packaging.specifiers", reason="packaging knows the rules of version numbers")
    assert f"flash_attn{gate}`" in (ROOT / "docs" / "install-amd.md").read_text()
    assert specifiers.SpecifierSet(gate).contains("2.8.3")
    assert specifiers.SpecifierSet(gate).contains("2.8.3+rocm62torch2.5") == accepted


def test_what_the_label_costs_where_versions_are_compared():
    version = pytest.importorskip("packaging.version", reason="packaging knows the rules of version numbers").Version
    ours, bound, following = map(version, ("2.8.3+rocm62torch2.5", "2.8.3", "2.8.4"))
    assert not ours <= bound and ours != bound and bound <= ours < following


# Workflows


def yaml_of(path):
    yaml = pytest.importorskip("ruamel.yaml", reason="ruamel.yaml, which check-jsonschema brings, reads workflows")
    return yaml.YAML(typ="safe").load(path.read_text())


def check_schema(path, status=0):
    """By the copy of the schema that check-jsonschema brings, so without a network."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema holds the schema of workflows")
    command = ("-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path))
    return run(sys.executable, *command, status=status)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_follow_githubs_schema(path):
    check_schema(path)


def test_the_schema_notices_what_is_wrong(tmp_path):
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "runs_on:"))
    assert "runs_on" in check_schema(broken, status=1)


def test_inputs_of_the_reusable_workflow():
    inputs = yaml_of(ROOT / ".github" / "workflows" / "_build_rocm.yml")["on"]["workflow_call"]["inputs"]
    assert set(inputs) >= {*NAMES, "runner", "is-upload", "build-triton-backend"}
    jobs = yaml_of(ROOT / ".github" / "workflows" / "build.yml")["jobs"]
    callers = [job for job in jobs.values() if job.get("uses") == "./.github/workflows/_build_rocm.yml"]
    assert [job["with"]["build-triton-backend"] for job in callers] == [False, True]
    for job in callers:
        assert set(job["with"]) <= set(inputs)
        assert all(job["with"][name] == f"${{{{ matrix.{name} }}}}" for name in NAMES)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_that_workflows_run_exist(path):
    for job in yaml_of(path)["jobs"].values():
        for line in "\n".join(step.get("run", "") for step in job.get("steps", [])).splitlines():
            for program in line.split()[:1]:
                assert "/" not in program or os.access(ROOT / program, os.X_OK), line


# Dockerfiles


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_run_lines_are_scripts_that_ci_runs(path):
    stages = (ROOT / "tools" / "test.sh").read_text().split("test_wheel() {")[1].split("\n}\n")[0]
    lines = [line.split()[1:] for line in path.read_text().splitlines() if line.startswith("RUN")]
    assert lines
    for script, *arguments in lines:
        assert os.access(ROOT / script, os.X_OK), script
        # Of files, CI names others.
        command = " ".join([script, *(word for word in arguments if "/" not in word and word != "dist")])
        in_check = command == "tools/wheel.sh install" and 'tools/wheel.sh" install' in (ROOT / script).read_text()
        assert in_check or re.search(rf"^ .*{command}( |$|;)", stages, re.MULTILINE), f"CI does not run {command}"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_know_no_other_instruction(path):
    instructions = {line.split()[0] for line in path.read_text().splitlines() if line.strip() and line[0] != "#"}
    assert instructions <= {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}
    assert re.search(r"^#   docker run .*flash_attn:", path.read_text(), re.MULTILINE)
