"""benchmarks/builds.py: builds make the same call, and say what is wrong with one. Speed is not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_attn import _native

BUILDS = Path(__file__).resolve().parents[2] / "benchmarks" / "builds.py"
LIBRARY = Path(_native.core_library())


@pytest.fixture
def builds(modules, capsys):
    """Runs it with arguments, in this process, as importing torch takes longer than a call; returns what it printed."""

    def run(*arguments):
        threads = torch.get_num_threads()
        try:
            modules("builds").main(list(map(str, arguments)))
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out

    return run


def test_builds_are_compared_by_the_same_call(tmp_path, builds):
    copy, path = tmp_path / LIBRARY.name, tmp_path / "builds.json"
    shutil.copy(LIBRARY, copy)
    shape = ["--rounds=2", "--batch=2", "--heads=4", "--kv-heads=2", "--head-dim=24", "--queries=3", "--keys=64"]
    for options in (
        ["--causal", "--one-thread", "--after-dense"],
        ["--window", "16", "0"],
        ["--backward", "--causal"],
        *(["--feature", feature] for feature in ("alibi", "softcap", "padding-mask", "dropout")),
        ["--backward", "--feature", "bias"],
        ["--page=16", "--sum", "--json", path],
    ):
        printed = builds(LIBRARY, copy, *shape, *options)
        assert len(printed.splitlines()) == 3 + ("--sum" in options) and "other bits" not in printed
    seconds = json.loads(path.read_text())["seconds"]
    assert {name: len(times) for name, times in seconds.items()} == {str(LIBRARY): 2, str(copy): 2, "sum": 2}


def test_a_dense_call_goes_before_each_timed_one(modules, monkeypatch):
    module, events = modules("builds"), []
    monkeypatch.setattr(module, "sample", lambda call: events.append(call) or 1.0)
    assert module.measured(["a", "b"], 3, 0, lambda: events.append("dense")) == [[1.0] * 3] * 2
    assert events[::2] == ["dense"] * 6 and sorted(events[1::2]) == ["a"] * 3 + ["b"] * 3

    args = module.parse_arguments([str(LIBRARY), "--heads=1", "--queries=64", "--keys=64", "--window", "8", "0"])
    calls = []
    monkeypatch.setattr(module.Call, "by", lambda call, path: calls.append((call, path)))
    module.dense_call(args)
    (call, path), window = calls[0], module.Call(args)
    assert path == str(LIBRARY) and call.problem.window_left == -1 and window.problem.window_left == 8
    assert not torch.equal(call.tensors["q"], window.tensors["q"])


def test_builds_say_what_a_call_lacks(builds, capsys):
    script = [sys.executable, str(BUILDS), str(LIBRARY), "--keys=100", "--page=16"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 2 and "--keys 100 is no multiple of --page 16" in done.stderr
    with pytest.raises(SystemExit, match="2"):
        builds(LIBRARY, "--page=16", "--backward")
    assert "caches have no gradients" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="flash_attn: .*heads"):
        builds(LIBRARY, "--heads=3", "--kv-heads=2")
