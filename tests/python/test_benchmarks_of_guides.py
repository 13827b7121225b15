"""The benchmarks that guides for AMD GPUs name: they run, say which backend cannot and why, and write their schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_interface as interface

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--preset=cpu-small", "--seq-len=16", "--d-model=16", "--n-heads=2", "--n-layers=1", "--timed-steps=2"]


def validate(path, name):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks what benchmarks write")
    schema = json.loads((BENCHMARKS / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    record = json.loads(path.read_text())
    jsonschema.Draft202012Validator(schema).validate(record)
    return record


def test_flash_against_standard(modules, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    path, picture = tmp_path / "speed.json", tmp_path / "speed.png"
    options = ["--seq-lens", "32", "80", "--repeats=2", "--heads=2", "--json", str(path), "--plot", str(picture)]
    assert modules("benchmark_flash_attn").main([*options, "--backward", "--causal", "--dtype=float32"]) == 0
    printed = capsys.readouterr().out
    record = validate(path, "benchmark_flash_attn")
    assert [row["seq_len"] for row in record["rows"]] == [32, 80]
    assert all(row["max_difference"] < 1e-4 and row["speed_up"] > 0 for row in record["rows"])
    assert all("forward" in row["backend_symbol"] for row in record["rows"])
    assert "geometric mean speed up" in printed and torch.__version__ in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_defaults_are_those_of_the_guides(modules):
    args = modules("benchmark_flash_attn").parse_arguments([], torch.device("cuda"))
    assert (args.seq_lens[0], args.seq_lens[-1], args.batch_size, args.heads, args.head_dim) == (128, 4096, 2, 8, 64)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_of_standard_attention_is_its_matrix(modules):
    measuring = modules("measuring")
    S, device = 1024, torch.device("cpu")
    q = torch.randn(1, S, 4, 16)
    matrix = 4 * S * S * 4
    extra = measuring.extra_memory(lambda: modules("benchmark_flash_attn").standard_attention(q, q, q, False), device)
    assert matrix <= extra <= 5 * matrix
    assert (
        measuring.extra_memory(lambda: modules("benchmark_flash_attn").flash_attention(q, q, q, False), device) < matrix
    )


def test_presets(modules):
    benchmark = modules("benchmark_fa2_vs_fa3_mlp_transformer")
    assert benchmark.parse_arguments([])[1] == {
        "preset": "mi300x", "batch_size": 4, "seq_len": 4096, "d_model": 1024, "n_heads": 16, "n_layers": 8,
        "warmup_steps": 20, "timed_steps": 80, "dtype": "bfloat16",
    }  # fmt: skip
    default = benchmark.parse_arguments(["--preset", "default", "--dtype", "float16"])[1]
    assert [default[n] for n in ("seq_len", "n_layers", "warmup_steps", "timed_steps", "dtype")] == [
        2048, 6, 10, 50, "float16",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options, words",
    [(["--d-model=10", "--n-heads=3"], "not a multiple"), (["--seq-len=0"], "'0'"), (["--preset=mi999"], "cpu-small")],
)
def test_wrong_options_are_named(modules, capsys, options, words):
    with pytest.raises(SystemExit):
        modules("benchmark_fa2_vs_fa3_mlp_transformer").parse_arguments(options)
    assert words in capsys.readouterr().err


def test_one_backend_alone(tmp_path):
    """Where Triton cannot run the other is reported; where it can, both train the same model."""
    path = tmp_path / "speed.json"
    script = str(BENCHMARKS / "benchmark_fa2_vs_fa3_mlp_transformer.py")
    command = [sys.executable, script, *TINY, "--allow-single", "--output-json", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    record = validate(path, "benchmark_fa2_vs_fa3_mlp_transformer")
    native, triton = record["backends"]["native"], record["backends"]["triton"]
    assert native["median_step_ms"] > 0 and len(native["step_ms"]) == 2 and native["backend_symbol"]
    if "problem" in triton:
        assert record["ratios"] is None and f"triton  cannot run: {triton['problem']}" in done.stdout
    else:
        assert record["ratios"]["loss_difference"] == pytest.approx(0, abs=1e-3)


def test_another_backend_than_the_selected_one_is_not_measured(modules, monkeypatch):
    """On a machine without a GPU Triton may be installed, and CPU tensors keep the CPU backend."""
    worker = modules("mlp_transformer")
    why = "FLASH_ATTENTION_TRITON_AMD_ENABLE selects Triton for tensors on GPUs"
    explanation = flash_attn.explain(*torch.zeros(3, 1, 8, 2, 8, requires_grad=True))
    monkeypatch.setattr(flash_attn, "explain", lambda *_, **__: replace(explanation, reasons=[why]))
    model, x = torch.nn.Sequential(worker.Block(16, 2, flash_attn.flash_attn_func)), torch.zeros(1, 8, 16)
    assert worker.symbols(model, x).startswith("cpu.forward.")
    monkeypatch.setattr(interface, "USE_TRITON_ROCM", True)
    with pytest.raises(RuntimeError, match=f"cpu.forward.* would run: {why}"):
        worker.symbols(model, x)


METRICS = {
    "setting": dict.fromkeys("date command device processor threads python torch flash_attn".split(), ""),
    "backend_symbol": "kernel", "step_ms": [2.0], "median_step_ms": 2.0, "steps_per_second": 500.0,
    "tokens_per_second": 8000.0, "peak_memory_bytes": 10, "loss": 1.0,
}  # fmt: skip
PROBLEM = {"problem": "ImportError: no such backend"}


@pytest.mark.parametrize(
    "native, triton, options, status, said",
    [
        (METRICS, METRICS, [], 0, ""),
        (METRICS, PROBLEM, [], 1, "not compared: triton cannot run; --allow-single reports the other alone"),
        (METRICS, PROBLEM, ["--allow-single"], 0, ""),
        (PROBLEM, METRICS, [], 1, "not compared: native cannot run; --allow-single reports the other alone"),
        (PROBLEM, PROBLEM, ["--allow-single"], 1, "not compared: native, triton cannot run\n"),
    ],
)
def test_a_backend_that_cannot_run(modules, monkeypatch, capsys, tmp_path, native, triton, options, status, said):
    benchmark, path = modules("benchmark_fa2_vs_fa3_mlp_transformer"), tmp_path / "speed.json"
    sides = {"native": native, "triton": triton}
    monkeypatch.setattr(benchmark, "run_backend", lambda name, config: sides[name])
    assert benchmark.main([*TINY, *options, "--output-json", str(path)]) == status
    printed = capsys.readouterr()
    assert said in printed.err and printed.out.count("cannot run: ImportError: no such backend") == [
        native, triton].count(PROBLEM)  # fmt: skip
    record = validate(path, "benchmark_fa2_vs_fa3_mlp_transformer")
    assert (record["ratios"] is None) == (PROBLEM in (native, triton)) and record["config"]["seq_len"] == 16


def test_a_backend_whose_process_dies(modules, monkeypatch):
    benchmark = modules("benchmark_fa2_vs_fa3_mlp_transformer")
    monkeypatch.setattr(benchmark, "WORKER", BENCHMARKS / "there_is_no_such_file.py")
    assert benchmark.run_backend("native", {}) == {"problem": "its process ended with status 2"}


def test_ratios(modules):
    benchmark = modules("benchmark_fa2_vs_fa3_mlp_transformer")
    native = {"median_step_ms": 2.0, "peak_memory_bytes": 10, "loss": 1.0}
    triton = {"median_step_ms": 3.0, "peak_memory_bytes": 14, "loss": 1.5}
    assert benchmark.ratios(native, triton) == {"speed_up": 1.5, "memory_delta_bytes": -4, "loss_difference": -0.5}
    assert benchmark.ratios(native, {**triton, "peak_memory_bytes": None})["memory_delta_bytes"] is None
