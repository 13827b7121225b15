"""Proof scripts: test_fa3.py, prove_fa3_mi300x.py and `python -m flash_attn verify`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flash_attn
from flash_attn import _native, _raw, testing, verify

ROOT = Path(__file__).resolve().parents[2]
FACTS = ["torch", "flash_attn", "device", "architecture", "backend symbol", "core library", "forward", "backward"]


def run(*arguments, status=0, cwd=ROOT, **environment):
    """Returns what it printed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env={**env, **environment}, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def names(printed):
    return [line[:16].strip() for line in printed.splitlines()]


@pytest.mark.second_torch
def test_lines_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert verify.main([]) == 0
    printed = capsys.readouterr().out
    assert names(printed) == [*FACTS, "verdict"] and printed.endswith("all good\n")
    assert "no GPU: torch" in printed and "cpu.forward.bfloat16" in printed and torch.__version__ in printed
    library = Path(_native.core_library(_native.load().__file__))
    assert hashlib.sha256(library.read_bytes()).hexdigest() in printed


def test_wrong_results_fail(capsys, monkeypatch):
    right = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda q, k, v, causal: 1.02 * right(q, k, v, causal=causal))
    assert verify.main(["--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["good"] is False
    assert {line["what"] for line in facts["lines"] if not line["good"]} == {"forward", "backward"}


def test_one_wrong_line_is_enough(capsys, monkeypatch):
    right = flash_attn.flash_attn_func

    def wrong_forward(q, k, v, causal):
        out = right(q, k, v, causal=causal)
        return out + 0.02 * out.detach()

    monkeypatch.setattr(flash_attn, "flash_attn_func", wrong_forward)
    assert verify.main(["--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["good"] is False and [line["what"] for line in facts["lines"] if not line["good"]] == ["forward"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_results_that_are_no_numbers_fail(wrong):
    place = verify.find_place()
    lines = verify.check_results(place, lambda q, k, v, causal: wrong * (q + k + v))
    assert [line.good for line in lines] == [False, False]


@pytest.mark.parametrize("name, limit", [("out", 2), ("dq", 3), ("dk", 3), ("dv", 3)])
def test_multiples_of_the_error_of_plain_torch(monkeypatch, name, limit):
    """Plain torch is wrong by 1 everywhere: each result fails its own line just above its limit, and not at it."""
    errors = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)

    def results(attention, inputs, dtype):
        if attention is verify.definition:
            return [torch.tensor(float(dtype == torch.bfloat16))] * len(errors)
        return [torch.tensor(error) for error in errors.values()]

    monkeypatch.setattr(verify, "_results", results)
    for errors[name], good in ((limit, True), (-limit, True), (limit + 1e-3, False), (-limit - 1e-3, False)):
        forward, backward = verify.check_results(verify.find_place(), flash_attn.flash_attn_func)
        assert (forward.good, backward.good) == (good or name != "out", good or name == "out")


def test_a_broken_installation_is_told_by_verify():
    printed = run("-m", "flash_attn", "verify", status=1, FLASH_ATTENTION_TRITON_AMD_ENABLE="perhaps")
    assert printed.startswith("problem") and "'perhaps'" in printed


def test_a_missing_simulator_says_how_to_build_it(tmp_path):
    library = tmp_path / "libamdhip64.so"
    environment = {testing.LIBRARY_VARIABLE: str(library)}
    printed = run(ROOT / "prove_fa3_mi300x.py", "--simulate", "gfx942", status=1, **environment)
    assert str(library) in printed and "cmake -S tools/gfxsim" in printed and "FAILED" in printed


def test_a_tree_without_a_build_that_hides_an_installed_package_says_so(tmp_path):
    """`pip install .` and then Python in the same folder."""
    (tmp_path / "site" / "flash_attn" / "lib" / "torch-2.13").mkdir(parents=True)
    tree = tmp_path / "tree"
    for path in (ROOT / "flash_attn").rglob("*.py"):
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (tree / "setup.py").touch()
    code = "try:\n  import flash_attn\nexcept ImportError as error:\n  print(error)"
    printed = run("-c", code, cwd=tree, PYTHONPATH=tmp_path / "site")
    assert f"imported from the source tree {tree / 'flash_attn'}, where nothing was built" in printed
    assert f"installed in {tmp_path / 'site' / 'flash_attn'}" in printed and "pip install -e ." in printed


def test_hashes_of_code_that_does_not_run_are_not_shown(monkeypatch):
    here = verify.find_place()
    monkeypatch.setattr(_raw, "USE_TRITON_ROCM", True)
    (line,) = verify._code(verify.Place("gpu", "cuda", "a GPU", "gfx942"))
    assert line.good and "sha256" not in line.text and "Triton compiles" in line.text
    assert here.kind == "gpu" or all("sha256" in line.text for line in verify._code(here))


def test_the_current_gpu_is_verified_unless_one_is_simulated(monkeypatch):
    gpus = [{"target": "gfx942"}, {"target": "gfx1100"}]
    monkeypatch.setattr(_native, "load", lambda: SimpleNamespace(_gpus=lambda: gpus))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", "GPU {}".format)
    assert verify.find_place() == verify.Place("gpu", "cuda", "GPU 1", "gfx1100")
    assert verify.find_place("gfx90a").kind == "simulated"


def test_a_simulation_is_started_as_asked(monkeypatch):
    calls = []
    module = SimpleNamespace(_start_simulation=lambda *x: calls.append(x), _stop_simulation=lambda: calls.append("end"))
    monkeypatch.setattr(_native, "load", lambda: module)
    with testing.simulated("gfx90a", schedule="random", seed=5, checks="races", threads=2, library="there"):
        pass
    with testing.simulated(library="there"):
        pass
    asked, by_default = ("there", "gfx90a", "random", 5, "races", 2), ("there", "gfx942", "in-order", 0, "all", 1)
    assert calls == [asked, "end", by_default, "end"]


@pytest.mark.gpu
@pytest.mark.simulated
def test_a_simulated_gpu_is_proven():
    printed = run(ROOT / "prove_fa3_mi300x.py", "--simulate", "gfx942")
    assert names(printed) == ["torch", "flash_attn", "device", "architecture", "backend symbol", "code object",
                              "code object", "forward", "backward", "verdict"]  # fmt: skip
    assert "simulated gfx942" in printed and "fa_forward_bf16_d64_plain" in printed
    for name in ("forward", "backward"):
        code = _native.load()._code_object("gfx942", name)
        assert code.startswith(b"\x7fELF") and hashlib.sha256(code).hexdigest() in printed


@pytest.mark.skipif(not _native.load()._code_objects(), reason="this build has no GPU code")
def test_a_code_object_that_is_not_there(monkeypatch):
    with pytest.raises(RuntimeError, match="no code object forward for gfx000"):
        _native.load()._code_object("gfx000", "forward")
    place = verify.Place("gpu", "cpu", "an unknown GPU", "gfx000")
    monkeypatch.setattr(verify, "find_place", lambda simulate: place)
    monkeypatch.setattr(verify, "_symbols", lambda place: verify.Line("backend symbol", "kernel"))
    *_, last = verify.lines()
    assert not last.good and "no code object backward for gfx000" in last.text and "GPU_ARCHS=gfx000" in last.text
