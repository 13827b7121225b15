"""Options, markers, and the record of passed features from which the README's support matrix is made.

@pytest.mark.feature("softcap backward", ..., dtype="fp32", backend="CPU", missing=False) names rows of that matrix.
Without `dtype` the test's parameter `dtype` counts, else fp32. `missing=True`: the test shows that the call raises.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import platform
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

# The tests' own modules and the tool that reads what is recorded here.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]

import instruction_sets  # noqa: E402
import support_matrix  # noqa: E402

TORCH_RELEASE = tuple(int(n) for n in torch.__version__.replace("a", ".").split(".")[:2])


def pytest_addoption(parser):
    parser.addoption("--support-json", metavar="FILE", help="write what passed, for tools/support_matrix.py")
    parser.addoption("--full", action="store_true", help="run the wide sweeps (marker slow) too")
    parser.addoption("--device", choices=("simulated", "cuda"), default="simulated", help="where tests marked gpu run")


def _keep_freed_memory():
    """The oracle's tensors, 100 MB and more, are made of what earlier ones left: to fault them in anew took longer than
    to compute them (mallopt(3))."""
    if platform.libc_ver()[0] == "glibc":
        mallopt, trim_threshold, mmap_threshold = ctypes.CDLL(None).mallopt, -1, -3
        for parameter in (trim_threshold, mmap_threshold):
            mallopt(parameter, 2**31 - 1)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: only with --full or -m slow")
    config.addinivalue_line("markers", "gpu: runs on simulated AMD GPUs (slow, needs tools/gfxsim), or on --device")
    config.addinivalue_line("markers", "simulated: of the tests marked gpu, about simulated ones only")
    config.addinivalue_line("markers", "second_torch: also run on the oldest supported torch, 1.13")
    config.addinivalue_line("markers", "requires_torch(major, minor, reason): needs that torch or newer")
    # One thread per worker: workers share the cores. Threads are the subject of test_threads.py.
    torch.set_num_threads(1)
    _keep_freed_memory()
    if config.getoption("support_json") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SupportRecord(config.getoption("support_json")), "support-record")


def _cells(item):
    for mark in item.iter_markers("feature"):
        params = getattr(item, "callspec", None)
        dtype = mark.kwargs.get("dtype") or (params.params.get("dtype") if params else None) or "fp32"
        backend = mark.kwargs.get("backend", "CPU")
        for row in support_matrix.ROWS if mark.args == ("*",) else mark.args:
            for one in support_matrix.COLUMNS[backend] if dtype == "*" else [dtype]:
                if row not in support_matrix.ROWS or one not in support_matrix.COLUMNS.get(backend, ()):
                    raise pytest.UsageError(f"{item.nodeid}: no cell ({row!r}, {backend}, {one}) in the support matrix")
                yield f"{row}|{backend}|{one}", bool(mark.kwargs.get("missing"))


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("full") or "slow" in (config.getoption("markexpr") or "")
    for item in items:
        # User properties travel with the report, from xdist's workers too.
        item.user_properties.extend(("support", cell) for cell in _cells(item))
        if item.get_closest_marker("slow") and not chosen:
            item.add_marker(pytest.mark.skip(reason="wide sweep: run with --full"))
        if item.get_closest_marker("simulated") and item.config.getoption("device") != "simulated":
            item.add_marker(pytest.mark.skip(reason="about simulated GPUs: run without --device"))
        for needs in item.iter_markers("requires_torch"):
            if TORCH_RELEASE < needs.args[:2]:
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__}: {needs.args[2]}"))
    items.sort(key=_simulated_target)


def _simulated_target(item) -> str:
    """Tests of a target stand together: a simulation of another than the last one's reads all of its code anew."""
    params = item.callspec.params if item.get_closest_marker("gpu") and hasattr(item, "callspec") else {}
    return str(getattr(params.get("device"), "name", params.get("target", params.get("gpu", ""))))


class SupportRecord:
    """Counts outcomes per cell. Lives in the process that prints the summary."""

    def __init__(self, path):
        self.path = Path(path)
        self.cells = defaultdict(Counter)

    def pytest_runtest_logreport(self, report):
        # A failure in set-up or tear-down counts as well; a skip anywhere says nothing.
        if report.outcome == "skipped" or (report.outcome == "passed" and report.when != "call"):
            return
        for cell, missing in (value for name, value in report.user_properties if name == "support"):
            outcome = "missing" if missing and report.outcome == "passed" else report.outcome
            self.cells[cell][outcome] += 1

    def pytest_sessionfinish(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({k: self.cells[k] for k in sorted(self.cells)}, indent=1) + "\n")


@pytest.fixture
def rng():
    """torch's generator at a known point; restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(params=instruction_sets.KNOWN)
def isa(request):
    """Each instruction set of the CPU in turn, forced while the test runs."""
    available, force = instruction_sets.available(), instruction_sets.cpu()._force_cpu_isa
    if request.param not in available:
        pytest.skip(f"this machine and build do not execute {request.param}, but {', '.join(available)}")
    force(request.param)
    yield request.param
    force("")


@pytest.fixture
def modules(monkeypatch):
    """The benchmarks' modules by name."""
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "benchmarks"))
    return importlib.import_module
