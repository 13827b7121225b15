"""What users have asked for (docs/asks.md), continued: installation, build, what an import does, and GPUs."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from devices import OTHERS, SIMULATED, Device, needs_code

import flash_attn
from flash_attn import _native, flash_attn_func
from flash_attn import flash_attn_interface as interface
from flash_attn.testing import simulated

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
SUFFIXES = (".cpp", ".h", ".hip")
simulation = [pytest.mark.gpu, pytest.mark.simulated]


def python(*arguments, **environment):
    """A fresh interpreter that finds the package; None removes a variable."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    merged = {**os.environ, "PYTHONPATH": search, **environment}
    merged = {name: value for name, value in merged.items() if value is not None}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=merged, capture_output=True, text=True, timeout=300
    )


def sources(folder):
    return [file for file in sorted((ROOT / "csrc" / folder).rglob("*")) if file.suffix in SUFFIXES]


@pytest.fixture
def setup_module(monkeypatch):
    """setup.py as a module, without its call of setup()."""
    pytest.importorskip("setuptools", reason="setuptools is not installed here")
    monkeypatch.setattr("setuptools.setup", lambda **kwargs: None)
    spec = importlib.util.spec_from_file_location("flash_attn_setup_of_asks", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small(dtype=torch.bfloat16, S=40):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, S, heads, 64, generator=g).to(dtype).requires_grad_() for heads in (2, 1, 1)]


def results(leaves, **options):
    torch.manual_seed(1)
    out = flash_attn_func(*leaves, causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("target", [pytest.param(target, marks=simulation) for target in SIMULATED + OTHERS])
def test_ask_01_runs_on_amd_gpus_forward_and_backward(target):
    """Simulated: data-center and consumer cards. The CPU's results, up to bf16's rounding."""
    needs_code(target)
    expected = results(small())
    with Device(target, "random", 1).scope():
        assert flash_attn.explain(*small(), causal=True).instruction_set == target
        for a, b in zip(results(small()), expected):
            assert (a.float() - b.float()).abs().max() <= 0.02 * (1 + b.float().abs().max())


@pytest.mark.parametrize("target", [pytest.param(t, marks=simulation) for t in ("gfx908", "gfx1200")])
def test_ask_01_other_gpus_are_refused_by_name(target):
    if target in {entry["target"] for entry in _native.load()._code_objects()}:
        pytest.skip(f"this build has code for {target}")
    q = torch.zeros(1, 8, 1, 64)
    with (
        simulated(target),
        pytest.raises(NotImplementedError, match=f"{target}.*(GPU_ARCHS={target}|kernels exist for)"),
    ):
        flash_attn_func(q, q, q)


@pytest.mark.second_torch
def test_ask_02_one_package_serves_many_torches_and_pythons(tmp_path, monkeypatch):
    """Bindings lie side by side, the running torch and Python choose one, and the core is built once for all."""
    suffixes = (_native.extension_suffix(), ".cpython-314-x86_64-linux-gnu.so")
    for release in ("2.9", "2.13"):
        (tmp_path / f"torch-{release}").mkdir()
        for suffix in suffixes:
            (tmp_path / f"torch-{release}" / (_native.MODULE_NAME + suffix)).touch()
    monkeypatch.setattr(_native, "LIBRARY_DIR", str(tmp_path))
    assert {release: len(names) for release, names in _native.available_bindings().items()} == {"2.9": 2, "2.13": 2}
    for version in ("2.9.1+rocm6.4", "2.13.0+cpu"):
        path = pathlib.Path(_native.binding_path(version))
        assert path.parent.name == f"torch-{_native.torch_release(version)}" and path.name.endswith(suffixes[0])
    assert _native.core_library(str(path)) == str(tmp_path / "libflash_attn.so")


def test_ask_03_core_is_standard_cpp():
    """No GNU extension in what a CPU build compiles besides torch, and no path that Windows would not open."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    cpu = [ROOT / "csrc/cpu" / f"{name}.cpp" for name in ("backend", "cache", "cpuid", "workspace", "isa_portable")]
    files = [*(ROOT / "csrc/core").glob("*.cpp"), *cpu]
    assert len(files) >= 12
    command = [compiler, "-std=c++20", "-pedantic-errors", "-fsyntax-only", "-Icsrc", "-Icsrc/include"]
    done = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set(CMAKE_CXX_EXTENSIONS OFF)" in (ROOT / "cmake/FlashAttnCompile.cmake").read_text()
    code = [file for folder in ("csrc", "flash_attn", "cmake") for file in (ROOT / folder).rglob("*")]
    assert max(len(str(file.relative_to(ROOT))) for file in code if "lib" not in file.parts) < 120


@pytest.mark.second_torch
@pytest.mark.parametrize("broken", [False, True], ids=["another torch", "undefined symbol"])
def test_ask_06_torch_mismatch_is_one_sentence_with_the_remedy(broken, tmp_path, monkeypatch):
    if broken:
        monkeypatch.setattr(_native, "LIBRARY_DIR", str(tmp_path))
        folder = tmp_path / f"torch-{_native.torch_release(torch.__version__)}"
        folder.mkdir()
        (folder / (_native.MODULE_NAME + _native.extension_suffix())).write_bytes(b"another ABI")
    else:
        monkeypatch.setattr(torch, "__version__", "2.99.0+rocm7.0")
    with pytest.raises(ImportError) as caught:
        _native.load.__wrapped__()
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and torch.__version__ in text
    assert "pip install --no-build-isolation ." in text
    if not broken:
        assert re.search(r"is built for torch \d+\.\d+ \(cpython-3", text)


@pytest.mark.second_torch
def test_ask_07_no_tuning_at_run_time():
    """The kernel of a call follows from the call: a fresh process and one that has run it say the same."""
    q = torch.zeros(1, 40, 2, 64)
    flash_attn_func(q, q, q)
    here = str(flash_attn.explain(q, q, q))
    code = "import torch, flash_attn; q = torch.zeros(1, 40, 2, 64); print(flash_attn.explain(q, q, q))"
    assert python("-c", code).stdout == here + "\n"
    assert "--against" in (ROOT / "benchmarks/attention.py").read_text()  # what users time it against: make bench


def test_ask_08_metadata_without_torch_or_compiler():
    """setup.py reports name and version where torch cannot be imported and nothing is on PATH."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--name', '--version'];"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here")
    done = python("-c", code, PATH="/nowhere")
    assert done.stdout.replace("_", "-").split()[-2:] == ["flash-attn", flash_attn.__version__], done.stderr


def test_ask_09_build_is_small_and_knows_the_memory(setup_module, monkeypatch):
    """Two GiB a compiler at a time; torch's headers in one folder; a few dozen translation units."""
    gibibytes = {"SC_PHYS_PAGES": 4 * 2**30 // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sysconf", gibibytes.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert setup_module.build_environment.max_jobs() == 2
    with_torch = {
        file.parent.name for file in sources("") if re.search(r"#include <(torch|ATen|c10)/", file.read_text())
    }
    assert with_torch == {"torch"}
    assert sum(file.suffix != ".h" for file in sources("")) < 60


@pytest.mark.parametrize("target", [pytest.param(t, marks=simulation) for t in ("gfx906", "gfx908")])
def test_ask_13_old_instinct_and_vega(target):
    """Forward and backward by fused multiply-adds, in the dtypes of the others, to the CPU's results."""
    needs_code(target)
    for dtype, tolerance in ((torch.float16, 0.004), (torch.bfloat16, 0.02), (torch.float32, 1e-5)):
        expected = results(small(dtype))
        with Device(target, "random", 1).scope():
            assert flash_attn.explain(*small(dtype), causal=True).instruction_set == target
            for a, b in zip(results(small(dtype)), expected):
                assert (a.float() - b.float()).abs().max() <= tolerance * (1 + b.float().abs().max())


@pytest.mark.second_torch
def test_ask_22_no_switch_no_compiler_no_triton_at_import():
    """An import needs no variable and starts no program; the device of the tensors is what chooses."""
    code = """
import sys
def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn") and "flash_attn" in sys.modules:
        raise SystemExit(f"{event} {arguments}")
import torch
sys.modules["triton"] = sys.modules["aiter"] = None
before = set(sys.modules)
sys.addaudithook(refuse)
import flash_attn
q = torch.zeros(1, 4, 1, 8)
print(flash_attn.explain(q, q, q).backend, flash_attn.flash_attn_func(q, q, q).sum().item())
"""
    switches = {name: None for name in os.environ if name.startswith(("FLASH_", "GPU_ARCHS"))}
    done = python("-c", code, PATH="/nowhere", **switches)
    assert (done.returncode, done.stdout) == (0, "cpu 0.0\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif("config.getoption('device') != 'cuda'", reason="graphs are captured by a real GPU's runtime only")
def test_ask_23_graph_capture():
    """Forward and backward replayed on new inputs; more in test_gpu_stress.py."""
    leaves = [x.detach().cuda().requires_grad_() for x in small()]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        results(leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(leaves)
    for _ in range(3):
        with torch.no_grad():
            leaves[0].mul_(0.5)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, results(leaves)))


@pytest.mark.parametrize("target", [pytest.param(target, marks=simulation) for target in SIMULATED])
def test_ask_25_dropout_masks_of_gpus_are_the_cpus(target):
    """The same elements are dropped: one wrong one would move a result by far more than rounding."""
    expected = results(small(), dropout_p=0.4)
    with simulated(target):
        for a, b in zip(results(small(), dropout_p=0.4), expected):
            assert (a.float() - b.float()).abs().max() <= 0.03 * (1 + b.float().abs().max())


IMPORTED_BY_CLIENTS = """
flash_attn.bert_padding: unpad_input pad_input index_first_axis
flash_attn.flash_attn_interface: _flash_attn_forward _flash_attn_varlen_backward flash_attn_gpu
flash_attn.layers.rotary: apply_rotary_emb RotaryEmbedding apply_rotary_emb_qkv_
flash_attn.layers.patch_embed: PatchEmbed
flash_attn.ops.triton.rotary: apply_rotary
flash_attn.ops.triton.cross_entropy: cross_entropy_loss
flash_attn.losses.cross_entropy: CrossEntropyLoss
flash_attn.ops.rms_norm: RMSNorm rms_norm
flash_attn.ops.layer_norm: DropoutAddLayerNorm
flash_attn.ops.fused_dense: FusedDense
flash_attn.ops.activations: swiglu
flash_attn.modules.mha: MHA FlashSelfAttention
flash_attn.modules.mlp: GatedMlp
flash_attn.modules.block: Block
flash_attn.utils.generation: InferenceParams
"""


@pytest.mark.second_torch
def test_ask_27_modules_that_clients_import_without_triton():
    lines = [line.split(": ") for line in IMPORTED_BY_CLIENTS.strip().splitlines()]
    imports = [f"from {module} import {', '.join(names.split())}" for module, names in lines]
    done = python("-c", "\n".join(["import sys; sys.modules['triton'] = None", *imports]))
    assert done.returncode == 0, done.stderr


@pytest.mark.second_torch
def test_ask_28_versions():
    """Upstream's version for comparisons, our own beside it; semantics since 2.1: causal is bottom-right aligned."""
    assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 8, 3)
    assert re.fullmatch(r"\d+\.\d+\.\d+", flash_attn.__backend_version__)
    q, k, v = (torch.randn(1, n, 1, 8) for n in (1, 5, 5))
    assert torch.allclose(flash_attn_func(q, k, v, causal=True), flash_attn_func(q, k, v), atol=1e-6)
    assert interface.flash_attn_gpu is _native.load()


@pytest.mark.parametrize("target", [pytest.param(target, marks=simulation) for target in SIMULATED])
def test_ask_29_no_races_in_any_order_of_waves(target):
    """The simulator's race detector is on; waves run in three random orders and leave the same bits."""
    runs = []
    for seed in range(3):
        with simulated(target, schedule="random", seed=seed, checks="all"):
            runs.append(results(small(S=70)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


def test_every_ask_has_a_test_and_a_row():
    """docs/asks.md has one row for each, which names what is there; no test belongs to an ask that is not there."""
    text = "".join((HERE / name).read_text() for name in ("test_user_asks.py", "test_user_asks_package.py"))
    tested = {int(n) for n in re.findall(r"^def test_ask_(\d\d)_", text, re.MULTILINE)}
    rows = [int(n) for n in re.findall(r"^\| (\d+) \|", (ROOT / "docs/asks.md").read_text(), re.MULTILINE)]
    assert rows == list(range(1, 32)) and tested == set(rows)
