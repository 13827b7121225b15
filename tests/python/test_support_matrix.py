"""The README's support matrix: what is recorded, what a cell says, and that a stale table is noticed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import support_matrix

TESTS = """
import pytest

@pytest.mark.feature("softcap backward")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_softcap(dtype):
    assert dtype == "fp32"

@pytest.mark.feature("window forward", "window backward", dtype="fp64")
@pytest.mark.parametrize("n", range(5))
def test_window(n):
    pass

@pytest.mark.feature("split-KV", missing=True)
def test_split():
    with pytest.raises(ZeroDivisionError):
        1 / 0

@pytest.mark.feature("ALiBi forward")
def test_alibi():
    pytest.skip("not today")

@pytest.fixture
def broken():
    raise RuntimeError

@pytest.mark.feature("ALiBi backward")
def test_setup(broken):
    pass
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_recording(tmp_path, workers, pytestconfig):
    if workers and not pytestconfig.pluginmanager.hasplugin("xdist"):
        pytest.skip("pytest-xdist is not installed")
    (tmp_path / "conftest.py").write_text(
        (support_matrix.README.parent / "tests/python/conftest.py")
        .read_text()
        .replace("Path(__file__).resolve().parent", f"Path({str(support_matrix.README.parent / 'tests/python')!r})")
    )
    (tmp_path / "test_sample.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *workers,
        "--support-json",
        "out.json",
        ".",
    ]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=300)
    cells = json.loads((tmp_path / "out.json").read_text())
    assert {cell: support_matrix.cell(counts) for cell, counts in cells.items()} == {
        "softcap backward|CPU|fp32": "yes",
        "softcap backward|CPU|bf16": "fails",
        "window forward|CPU|fp64": "yes",
        "window backward|CPU|fp64": "yes",
        "split-KV|CPU|fp32": "missing",
        "ALiBi backward|CPU|fp32": "fails",
    }
    assert cells["window forward|CPU|fp64"] == {"passed": 5}


@pytest.mark.parametrize(
    "record, says",
    [
        ({}, "untested"),
        ({"passed": 3}, "yes"),
        ({"passed": 3, "failed": 1}, "fails"),
        ({"missing": 1}, "missing"),
        ({"missing": 1, "passed": 1}, "fails"),
        ({"missing": 1, "failed": 1}, "fails"),
    ],
    ids=str,
)
def test_cell(record, says):
    assert support_matrix.cell(record) == says


def test_write_and_check(tmp_path, capsys):
    readme, results = tmp_path / "README.md", tmp_path / "results.json"
    readme.write_text(f"head\n{support_matrix.BEGIN}\nold\n{support_matrix.END}\ntail\n")
    results.write_text(json.dumps({"causal forward|CPU|bf16": {"passed": 1}}))
    arguments = [str(results), "--readme", str(readme)]
    assert support_matrix.main([*arguments, "--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert support_matrix.main([*arguments, "--write"]) == 0
    assert support_matrix.main([*arguments, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("head\n") and text.endswith("\ntail\n")
    assert "| causal forward | untested | untested | yes | untested | untested |" in text
    results.write_text("{}")
    assert support_matrix.main([*arguments, "--check"]) == 1


def test_records_are_added(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, counts in zip(files, ({"failed": 1, "passed": 1}, {"passed": 2})):
        file.write_text(json.dumps({"causal forward|CPU|bf16": counts}))
    assert support_matrix.merged(files) == {"causal forward|CPU|bf16": {"passed": 3, "failed": 1}}


def test_rows_are_fixed():
    """The table has every row and column whatever has run, each once."""
    assert len(set(support_matrix.ROWS)) == len(support_matrix.ROWS)
    for results in ({}, {"causal forward|CPU|fp32": {"passed": 1}}):
        lines = support_matrix.table(results).splitlines()
        assert len(lines) == 2 + len(support_matrix.SECTIONS) + len(support_matrix.ROWS)
        columns = 1 + sum(len(dtypes) for dtypes in support_matrix.COLUMNS.values())
        assert all(line.count("|") == columns + 1 for line in lines)
