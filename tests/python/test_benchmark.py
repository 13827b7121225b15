"""benchmarks/attention.py runs, checks its rows, and writes what it says. Speed is not judged here."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "attention.py"
needs_sdpa = pytest.mark.requires_torch(2, 0, "the peer is torch's scaled_dot_product_attention")


def benchmark(*arguments, status=0):
    """Returns what it printed."""
    command = [sys.executable, str(BENCHMARK), "--quick", "--seconds=0.01", "--threads=1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_sdpa
def test_every_row_against_torch(tmp_path):
    printed = benchmark("--head-dims", "64", "--json", str(tmp_path / "times.json"))
    stored = json.loads((tmp_path / "times.json").read_text())
    assert len(stored["rows"]) == 3 * 1 * 1 * 2 * 2  # dtypes, D, S, masks, directions
    for row in stored["rows"]:
        assert row["name"] in printed
        assert len(row["seconds"]) == len(row["peer_seconds"]) >= 5
        assert row["ratio"] == pytest.approx(row["peer_median"] / row["median"])
    assert torch.__version__ in stored["setting"]["torch"]


@pytest.mark.second_torch
def test_without_a_peer(tmp_path):
    benchmark("--against=none", "--rows", "fp32 D64 causal", "--json", str(tmp_path / "times.json"))
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["fp32 D64 S256 causal forward", "fp32 D64 S256 causal backward"]
    assert all("ratio" not in row for row in rows)


@needs_sdpa
def test_plot_over_lengths(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    benchmark("--rows", "fp32 D64 forward", "--lengths", "64", "128", "--plot", str(tmp_path / "speed.png"))
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@needs_sdpa
def test_fail_under():
    rows = ("--suites=dense", "--rows", "fp32 D64 full forward")
    assert "below 1000.0x: fp32 D64 S256 full forward" in benchmark(*rows, "--fail-under", "1000", status=1)
    benchmark(*rows, "--fail-under", "0.0001")


def test_unknown_rows_say_so():
    assert "no row has these words" in benchmark("--against=none", "--rows", "fp8", status=1)


@needs_sdpa
def test_every_cpu_suite_fills_the_documented_json(tmp_path, documented):
    """Rows of each suite in one run: what README.md says of the file is what is in it, and the summary counts them."""
    path = tmp_path / "times.json"
    patterns = ["area fp32 D64 forward", "dims fp32 D80", "features fp32 D64 forward", "features fp32 D64 dropout"]
    patterns += [
        "decode bf16",
        "few fp32 D36 Sq1",
        "uneven bf16",
        "small fp32",
        "calls fp32",
        "threads bf16 H1 forward",
        "avx2 fp32 D64 full forward",
        "train fp32",
    ]
    printed = benchmark("--rows", "fp32 D64 full dense", *patterns, "--json", str(path))
    stored = json.loads(path.read_text())
    left_out = {line.split()[0] for line in printed.splitlines() if " left out: " in line}
    suites = stored["setting"]["suites"].split()
    assert len(suites) == 12
    assert {row["suite"] for row in stored["rows"]} == set(suites) - left_out
    always = {name for name, (_, present) in documented.items() if present == "always"}
    for row in stored["rows"]:
        assert always <= set(row) <= set(documented), row["name"]
        for name, value in row.items():
            assert_type(value, documented[name][0], f"{row['name']}: {name}")
        assert len(row["seconds"]) == len(row["peer_seconds"]) >= 5
        assert (row["met"] is None) == (row["required"] is None)
        assert row["name"] in printed
    assert not (tmp_path / "times.json.partial").exists()
    for suite in set(suites) - left_out:
        counts = re.search(rf"^{suite} +(\d+) +(\d+) +(\d+) +(\d+)$", printed, re.MULTILINE).groups()
        verdicts = [row["met"] for row in stored["rows"] if row["suite"] == suite]
        assert list(map(int, counts)) == [len(verdicts), *(verdicts.count(kind) for kind in (True, False, None))]


@needs_sdpa
def test_drawn_problems_are_the_seeds(tmp_path, documented, modules):
    """As many as asked for, the same for the same seed, with what is documented of each, and all in the summary."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    path, plot = tmp_path / "drawn.json", tmp_path / "drawn.png"
    drawn = ("--suites", "drawn", "--draw", "5", "--seed", "1")
    printed = benchmark(*drawn, "--json", str(path), "--plot", str(plot))
    rows = json.loads(path.read_text())["rows"]
    always = {name for name, (_, present) in documented.items() if present == "always"}
    assert all(always <= set(row) <= set(documented) for row in rows)
    least = min(rows, key=lambda row: row["ratio"])
    assert re.search(rf"least:\n +{least['ratio']:.2f} {re.escape(least['name'])}\n", printed)
    assert sum(map(int, re.findall(r"^\w+ (?:for|back)ward \w+ +(\d+)", printed, re.MULTILINE))) == 5
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [row["dtype"] for row in rows] == ["fp32", "bf16", "fp16", "fp32", "bf16"]

    def names(seed):
        options = argparse.Namespace(draw=5, seed=seed, dtypes=["fp32", "bf16", "fp16"])
        return [row.name for row in modules("drawn_suite").drawn_rows(options)]

    assert [row["name"] for row in rows] == names(1) != names(2)


@needs_sdpa
def test_models_are_timed_and_drawn(tmp_path, documented):
    """Both directions of each of two models in the dtypes asked for, as documented, and a plot of them."""
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    path, plot = tmp_path / "models.json", tmp_path / "models.png"
    models = ("--suites", "models", "--dtypes", "fp16", "fp32", "--rows", "CLIP-text", "Whisper-cross")
    benchmark(*models, "--json", str(path), "--plot", str(plot))
    rows = json.loads(path.read_text())["rows"]
    assert all(set(row) <= set(documented) for row in rows)
    assert len({row["name"] for row in rows}) == len(rows) == 2 * 2 * 2
    sizes = {row["name"].split()[2]: (row["B"], row["H"], row["Hk"], row["D"], row["mask"]) for row in rows}
    assert sizes == {"CLIP-text": (8, 12, 12, 64, "causal"), "Whisper-cross": (1, 20, 20, 64, "full")}
    assert {row["Sq"] for row in rows if "Whisper-cross" in row["name"]} == {1}
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def documented():
    """The fields of README.md's table of a row: name to (type, where it is present)."""
    text = (BENCHMARK.parent / "README.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name: (kind, present) for names, kind, present, _ in cells for name in re.findall("`(.+?)`", names)}


TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "number or null": (int, float, type(None)),
    "string or null": (str, type(None)),
    "boolean or null": (bool, type(None)),
    "object": dict,
}


def assert_type(value, kind, where):
    if kind == "numbers":
        assert all(isinstance(number, float) for number in value), where
    else:
        assert isinstance(value, TYPES[kind]), where


def row_of(modules, words, *options):
    """The first quick row with these words."""
    attention = modules("attention")
    return attention.rows_of(attention.parse_arguments(["--quick", *options, "--rows", words]))[0]


def test_wrong_result_is_refused(modules, monkeypatch):
    """A row whose numbers are wrong must not be timed."""
    row = row_of(modules, "fp32 D64 full forward", "--against=none")
    monkeypatch.setattr(modules("problems"), "our_attention", lambda q, k, v, causal: 1.01 * q)
    with pytest.raises(SystemExit, match="wrong by"):
        modules("rows").measure(row, 0.01)
    assert not row.seconds


@needs_sdpa
@pytest.mark.parametrize("H", [1, 4])
def test_drawn_problems_may_be_wrong_by_what_torch_is(modules, monkeypatch, H):
    """Two keys' gradients nearly cancel; what both round is no reason to end, what only ours has wrong is."""
    suite, rows = modules("drawn_suite"), modules("rows")
    problem = suite.Drawn("fp16", "forward", B=2, Sq=3, Sk=5, H=H, Hk=1, D=64, causal=False)
    calls, right = suite.drawn_calls(problem), modules("reference").attention_of
    row = rows.Row("drawn", "drawn", "fp16")
    assert calls.peer_check() == pytest.approx(calls.check(), abs=1e-3)
    monkeypatch.setattr(modules("reference"), "attention_of", lambda *arguments: 1.05 * right(*arguments))
    rows.check(row, calls)
    calls.peer_check = lambda: row.error / 3
    with pytest.raises(SystemExit, match="wrong by"):
        rows.check(row, calls)


@needs_sdpa
@pytest.mark.parametrize(
    "words",
    [
        "dense fp32 causal backward",
        "area fp32 window-both backward",
        "area fp32 varlen backward",
        "dims fp32 D576 forward",
        *(f"features fp32 D64 {feature} backward" for feature in ("alibi", "bias", "dropout", "sink", "padding-mask")),
        "decode fp16 contiguous sum",
        "decode bf16 pages-16 torch",
        "small fp32 forward+backward",
        "threads fp32 H1 forward",
    ],
)
def test_every_suite_is_checked_by_definition(modules, monkeypatch, words):
    """A twentieth off is seen in every suite; without it the same row passes."""
    suite = words.split()[0]
    monkeypatch.setattr(modules("attention"), "missing", lambda suite: None)
    row = row_of(modules, words, "--suites", suite)
    row.build().check()
    reference = modules("reference")
    right = reference.attention_of
    monkeypatch.setattr(reference, "attention_of", lambda *arguments: 1.05 * right(*arguments))
    with pytest.raises(SystemExit, match="wrong by"):
        modules("rows").measure(row, 0.01)


@needs_sdpa
def test_training_step_is_checked(modules, monkeypatch):
    row = row_of(modules, "train fp32", "--suites", "train")
    calls = row.build()
    assert calls.check() <= 1e-5
    model = modules("gpt_model")
    monkeypatch.setitem(model.ATTENTION, "sdpa", lambda q, k, v, slopes: 2 * model.sdpa_attention(q, k, v, slopes))
    with pytest.raises(SystemExit, match="train fp32: losses differ"):
        row.build().check()


@pytest.mark.parametrize(
    ("quantity", "scale", "aside", "required", "value", "met"),
    [
        ("ratio", 1.0, [], 1.9, 2.0, True),
        ("ratio", 1.0, [], 2.1, 2.0, False),
        ("rate", 0.5, [], 0.88, 1.0, True),
        ("cost", 1.0, [], 0.6, 0.5, True),
        ("cost", 1.0, [], 0.4, 0.5, False),
        ("cost", 1.0, [1.0, 1.0, 1.0], 0.3, 0.25, True),
        ("ratio", 1.0, [], None, 2.0, None),
    ],
)
def test_value_and_verdict(modules, quantity, scale, aside, required, value, met):
    """Ours takes 2 s in the median, the peer 4 s."""
    rows, report = modules("rows"), modules("report")
    row = rows.Row("area", "area x", "fp32", quantity=quantity, scale=scale, required=required, work=1e9)
    row.seconds, row.peer_seconds, row.aside_seconds = [1.0, 2.0, 9.0], [4.0, 3.0, 5.0], aside
    assert (row.value, row.met) == (value, met)
    assert {True: " ok", False: "BELOW" if quantity != "cost" else "ABOVE", None: "reported"}[met] in report.line(row)
    counts = [str(int(met is kind)) for kind in (True, False, None)]
    assert report.summary([row])[1].split() == ["area", "1", *counts]


def test_check_required_is_an_exit_status(modules):
    attention, rows = modules("attention"), modules("rows")
    args = attention.parse_arguments(["--against=none"])
    row = rows.Row("small", "small x", "fp32", required=1.5, seconds=[1.0], peer_seconds=[1.0])
    assert attention.status([row], args) == 0
    args.check_required = True
    assert attention.status([row], args) == 1
    row.required = 0.5
    assert attention.status([row], args) == 0


def stored_run(modules, path, peer_seconds, **setting):
    """Writes a run whose row takes 1 s, next to a peer that takes peer_seconds; returns the path as text."""
    rows, report = modules("rows"), modules("report")
    where = {"machine": "x", "threads": 2, "torch": "2", "peer": "torch", **setting}
    row = rows.Row("dense", "dense row", "fp32", required=2.0, seconds=[1.0], peer_seconds=[peer_seconds])
    other = rows.Row("decode", "decode row", "fp32", seconds=[1.0], peer_seconds=[peer_seconds])
    report.write_json(path, where, [row, other])
    return str(path)


def test_runs_are_combined(modules, tmp_path, capsys):
    """The median of three runs decides; the least and the greatest are shown."""
    runs = [stored_run(modules, tmp_path / f"{n}.json", peer) for n, peer in enumerate((1.5, 2.5, 2.25))]
    main = modules("attention").main
    assert main(["--combine", *runs, "--check-required"]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("dense row"))
    assert row.split() == "dense row 1000.00 ms 2250.00 ms 2.25 1.50 2.50 >= 2 ok 2 of 3".split()
    assert re.search(r"^decode row .* 2.25 +1.50 +2.50 reported +- of 3$", printed, re.MULTILINE)
    assert re.search(r"^dense +1 +1 +0 +0$", printed, re.MULTILINE)
    assert "missed:" not in printed
    assert main(["--combine", runs[0], "--check-required"]) == 1
    assert re.search(r"^missed:\ndense row +1.50 >= 2 +BELOW$", capsys.readouterr().out, re.MULTILINE)


def test_runs_that_cannot_be_combined_say_so(modules, tmp_path, capsys):
    main = modules("attention").main
    one, other = stored_run(modules, tmp_path / "1.json", 2.0), stored_run(modules, tmp_path / "2.json", 2.0, threads=4)
    with pytest.raises(SystemExit, match="2.json has threads 4 and .*1.json 2"):
        main(["--combine", one, other])
    (tmp_path / "3.json").write_text("[]")
    with pytest.raises(SystemExit, match="3.json: not a file that --json has written"):
        main(["--combine", one, str(tmp_path / "3.json")])
    with pytest.raises(SystemExit):
        main(["--combine", one, "--threads", "2"])
    assert "--threads is for a run that measures" in capsys.readouterr().err


def test_only_is_another_name_of_suites(modules):
    assert modules("attention").parse_arguments(["--against=none", "--only", "dense"]).suites == ["dense"]


@needs_sdpa
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against=none", "--suites", "area"], "--suites area: these are for --device cpu --against torch"),
        (["--suites", "area", "--lengths", "128"], "--lengths is for the dense rows; add dense to --suites area"),
        (["--suites", "area", "--plot", "x.png"], "--plot is for the dense rows"),
        (["--cold", "--device", "cuda"], "--cold is for --device cpu" if torch.cuda.is_available() else "no GPU here"),
        (["--draw", "3"], "--draw is for the drawn rows; add drawn to --suites"),
        (["--suites", "dense", "--seed", "0"], "--seed is for the drawn rows; add drawn to --suites dense"),
        (["--sweep", "--lengths", "128"], "--sweep sets the lengths"),
        (["--against=none", "--check-required"], "--fail-under and --check-required need a ratio"),
    ],
)
def test_contradictions_say_so(modules, capsys, arguments, message):
    with pytest.raises(SystemExit):
        modules("attention").parse_arguments(arguments)
    assert message in capsys.readouterr().err


@needs_sdpa
def test_required_rows_are_all_there(modules):
    """The whole list on the CPU: every suite, and what each asks for."""
    attention = modules("attention")
    args = attention.parse_arguments([])
    rows = {suite: make(args) for suite, make in attention.SUITES.items()}
    dense = {row.name: row.required for row in rows["dense"]}
    assert len(dense) == 3 * 2 * 2 * 2 + 3
    assert None not in dense.values()
    expected = {
        "bf16 D64 S2048 full forward": 2.2,
        "bf16 D64 S2048 full backward": 1.8,
        "bf16 D128 S2048 full backward": 1.6,
        "bf16 D64 S512 causal forward": 3.0,
        "fp32 D64 S512 causal forward": 1.3,
        "fp16 D128 S2048 full backward": 10.0,
    }
    assert {name: dense[name] for name in expected} == expected
    assert {row.required for row in rows["avx2"]} == {1.1}
    assert {row.required for row in rows["area"]} == {0.88}
    assert {row.required for row in rows["dims"]} == {0.85, 0.75}
    assert {row.required for row in rows["features"]} == {1.15, 1.25, 1.35}
    assert {row.required for row in rows["decode"]} == {0.7, 2.5, None}
    assert {row.required for suite in ("few", "uneven", "calls", "models", "drawn") for row in rows[suite]} == {None}
    assert {row.required for row in rows["threads"]} == {1.85, 1.7}
    assert {row.required for suite in ("small", "train") for row in rows[suite]} == {1.0}
    swept = attention.parse_arguments(["--sweep"])
    assert {row.setting["S"] for row in attention.dense_rows(swept)} == {128 * 2**n for n in range(8)}
    assert {row.setting["D"] for row in attention.dense_rows(swept)} == {64, 128}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the measurement of the peak is written for x86-64")
def test_peak_compiles_as_it_says_and_measures(tmp_path):
    source = BENCHMARK.with_name("peak.cpp")
    command = re.search(r"c\+\+ (.*) benchmarks/peak.cpp -o peak", source.read_text()).group(1).split()
    subprocess.run(["c++", *command, "-Wall", "-Wextra", "-Werror", source, "-o", tmp_path / "peak"], check=True)
    printed = subprocess.run([tmp_path / "peak", "1"], check=True, capture_output=True, text=True).stdout
    assert float(re.search(r"1 threads: fp32 +([0-9.]+) GFLOP/s", printed).group(1)) > 0.1
