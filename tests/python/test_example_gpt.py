"""examples/train_gpt.py: what it promises, interruption and resumption, several processes.

The runs are tiny; only the slow test trains to the point where the model beats the trigram model.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--width=32", "--heads=2", "--layers=1", "--seq-len=64", "--sample=20", "--threads=1"]

needs_torchrun = pytest.mark.requires_torch(2, 0, "torch.distributed.run of torch 1.13 stops on Python 3.11")


@pytest.fixture
def gpt_data(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import gpt_data

    return gpt_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text of this folder's own sources: the same on every machine."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_bytes(b"".join(source.read_bytes() for source in sorted(EXAMPLES.glob("*.py"))) * 3)
    return path


def command(out, data, *arguments):
    return [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, "--data", str(data), "--out", str(out), *arguments]


def train(out, data, *arguments, launcher=(), status=0):
    """Run the example; returns what it printed."""
    python, *rest = command(out, data, *arguments)
    done = subprocess.run([python, *launcher, *rest], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def report(out, name="flash"):
    return json.loads((out / f"{name}.json").read_text())


def test_trigram_probabilities_sum_to_one(gpt_data):
    text = torch.tensor(list(b"abracadabra, abracadabra! " * 4))
    trigram = gpt_data.Trigram(text)
    for context in (b"ab", b"a!", b"zz"):
        probabilities = []
        for byte in range(256):
            probabilities.append(math.exp(-trigram.loss(torch.tensor([*context, byte]), torch.tensor([2]))))
        assert sum(probabilities) == pytest.approx(1.0, abs=1e-9)


def test_trigram_backs_off_where_that_predicts_unseen_text_best(gpt_data):
    """In the last tenth B is followed as often by x as by y, but after the other letter before it."""
    text = b".ABx.CBy" * 900 + b".ABy.CBx" * 100
    trigram = gpt_data.Trigram(torch.tensor(list(text)))
    assert (trigram.k2, trigram.k3) == (min(trigram.STRENGTHS), max(trigram.STRENGTHS))


def test_trigram_predicts_the_bytes_that_the_model_predicts(gpt_data):
    text = gpt_data.Text(bytes(range(256)) * 40, seq_len=32)
    for tokens in (1, 100, 10**6):
        windows = text.held_out_windows(tokens)
        targets = text.held_out_targets(tokens)
        assert torch.equal(windows[:, 1:].flatten(), text.held_out[targets])
        assert targets.min() >= 2
        assert len(targets.unique()) == len(targets)


def test_batches_depend_on_seed_and_step_alone(gpt_data):
    text = gpt_data.Text(os.urandom(4000), seq_len=32)
    assert text.batch(4, 7, 3).shape == (4, 33)
    assert torch.equal(text.batch(4, 7, 3), text.batch(4, 7, 3))
    assert not torch.equal(text.batch(4, 7, 3), text.batch(4, 7, 4))
    assert not torch.equal(text.batch(4, 7, 3), text.batch(4, 8, 3))
    assert not torch.equal(text.batch(4, 7, 4), text.batch(4, 8, 3))  # another seed is no later start


def test_text_too_short_says_so(gpt_data):
    with pytest.raises(SystemExit, match="--seq-len 64 needs at least"):
        gpt_data.Text(b"too short", seq_len=64)


def test_learning_rate_rises_and_falls(gpt_data):
    from gpt_training import learning_rate

    rates = [learning_rate(step, 100, 2.0) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert rates[10] == 2.0 and rates[55] == pytest.approx(1.05) and rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate(0, 1, 2.0) == 2.0


def test_promises_are_kept_up_to_their_limits(gpt_data):
    from train_gpt import check_promises

    def kept(flash, plain, trigram=2.0, first=(5.0, 5.0)):
        pairs = zip(("flash", "plain"), (flash, plain), first)
        reports = {name: {"held_out_loss": loss, "first_loss_fp32": one} for name, loss, one in pairs}
        return [promise[-1] for promise in check_promises(reports, trigram)]

    assert kept(1.5, 1.515) == kept(1.515, 1.5) == [True] * 4
    assert kept(1.5, 1.525) == kept(1.525, 1.5) == [True, True, False, True]
    assert kept(1.5, 1.5, first=(5.0, 5.0001)) == kept(1.5, 1.5, first=(5.0001, 5.0)) == [True, True, True, False]
    assert kept(1.5, 1.51, trigram=1.51) == [True, False, True, True]


@pytest.mark.second_torch
@pytest.mark.parametrize(("dtype", "check", "status"), [("fp32", (), 1), ("bf16", ("--no-check",), 0)])
def test_runs_with_both_attentions(tmp_path, data, dtype, check, status):
    printed = train(tmp_path, data, "--steps=20", f"--dtype={dtype}", *check, status=status)
    summary = json.loads((tmp_path / "train_gpt.json").read_text())
    assert list(summary["runs"]) == ["flash", "plain"]
    for run in summary["runs"].values():
        assert len(run["train_losses"]) == 20
        assert run["train_losses"][-1] < run["train_losses"][0] - 0.5
        assert run["memory_peak_bytes"] > run["memory_before_bytes"] > 0
        assert run["sample"].startswith("def ")
    kept = {promise["promise"]: promise["kept"] for promise in summary["promises"]}
    assert kept.pop("held-out losses of the two runs differ by at most")
    assert kept.pop("first losses in fp32 differ by at most")
    # So few steps cannot beat the trigram model: the script says so, and fails unless told not to.
    assert list(kept.values()) == [False, False]
    assert "BROKEN: held-out loss, flash, below the trigram model's" in printed
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "there is no plot" in printed


def interrupt_after_first_checkpoint(out, data, *arguments):
    process = subprocess.Popen(
        command(out, data, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "flash.pt").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "--resume" in printed


@pytest.mark.second_torch
def test_interrupted_run_resumes_exactly(tmp_path, data):
    arguments = ["--steps=150", "--attention=flash", "--checkpoint-every=5", "--no-check"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, data, *arguments)
    interrupt_after_first_checkpoint(parts, data, *arguments)
    done = len(torch.load(parts / "flash.pt")["losses"])
    assert 5 <= done < 150
    assert not (parts / "flash.json").exists()
    train(parts, data, *arguments, "--resume")
    for figures in ("train_losses", "held_out_curve", "held_out_loss", "first_loss_fp32", "sample"):
        assert report(parts)[figures] == report(whole)[figures], figures
    printed = train(parts, data, "--steps=151", "--attention=flash", "--resume", status=1)
    assert "was made with --steps 150, not 151" in printed


@needs_torchrun
def test_two_processes_train_as_one(tmp_path, data):
    # The test's own conditions for torchrun: any free port, and one thread in each process.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    one, two, arguments = tmp_path / "one", tmp_path / "two", ("--steps=12", "--attention=flash", "--no-check")
    train(one, data, *arguments)
    train(two, data, *arguments, launcher=launcher)
    single, shared = report(one), report(two)
    assert shared["processes"] == 2
    assert shared["train_losses"] == pytest.approx(single["train_losses"], abs=1e-4)
    assert shared["held_out_loss"] == pytest.approx(single["held_out_loss"], abs=1e-4)


THREADS_LEFT = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from gpt_training import Processes, torch

processes = Processes("threads", "cpu")
processes.wrap(torch.nn.Linear(2, 2))
processes.close()
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
assert not [name for name in names if "gloo" in name], names
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in Linux's /proc")
@needs_torchrun
def test_closed_processes_leave_no_thread(tmp_path):
    """A thread of gloo that is still there when Python ends aborts the process, once in tens of runs."""
    script = tmp_path / "threads_left.py"
    script.write_text(THREADS_LEFT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launcher, str(script), str(EXAMPLES)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--steps=0", "0 is not positive"),
        ("--heads=3", "--width 32 is not a multiple of --heads 3"),
        ("--attention=flush", "--attention flush: give one or more of flash, plain, sdpa"),
        ("--data=/nowhere", "--data /nowhere: no such file"),
    ],
)
def test_bad_arguments_say_what_is_wrong(tmp_path, data, argument, message):
    assert message in train(tmp_path, data, argument, status=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_promises_hold_for_the_default_run(tmp_path, seed):
    """Trains on the standard library for minutes: below the trigram model, flash and plain within 0.02."""
    script = [sys.executable, str(EXAMPLES / "train_gpt.py"), f"--seed={seed}", "--out", str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(promise["kept"] for promise in json.loads((tmp_path / "train_gpt.json").read_text())["promises"])
