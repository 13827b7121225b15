"""Importing the package, the loader of the binding, `flash_attn.explain` and the report of `python -m flash_attn`."""

import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from small_calls import calls, dense, varlen

import flash_attn
import flash_attn.__main__
from flash_attn import _backend_choice, _explain, _native
from flash_attn import flash_attn_interface as interface

pytestmark = pytest.mark.second_torch

SOURCE = pathlib.Path(flash_attn.__file__).resolve().parent.parent
TRITON = "FLASH_ATTENTION_TRITON_AMD_ENABLE"


def python(*arguments, **environment):
    """Runs a fresh interpreter that finds this package; `None` unsets an environment variable."""
    search_path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    merged = {**os.environ, "PYTHONPATH": search_path, TRITON: None, **environment}
    merged = {name: value for name, value in merged.items() if value is not None}
    return subprocess.run([sys.executable, *arguments], env=merged, capture_output=True, text=True, timeout=300)


# Importing


def test_versions():
    assert flash_attn.__version__ == "2.8.3"
    literal = re.search(r'^__version__ = "(.*)"$', pathlib.Path(flash_attn.__file__).read_text(), re.MULTILINE)
    assert literal and literal[1] == flash_attn.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", flash_attn.__backend_version__)


def test_distribution_metadata():
    try:
        installed = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash_attn is not installed here, only on the path")
    assert installed.split("+")[0] == flash_attn.__version__
    if hasattr(importlib.metadata, "packages_distributions"):  # Python >= 3.10; transformers asks this
        owners = importlib.metadata.packages_distributions().get("flash_attn", [])
        assert "flash-attn" in [name.replace("_", "-") for name in owners]


@pytest.mark.parametrize(
    "statement",
    [
        "import flash_attn",
        "import flash_attn_2_cuda",
        "import flash_attn.flash_attn_interface",
        "import flash_attn_interface",
        "import flash_attn.bert_padding",
        "from flash_attn_2_cuda import varlen_bwd",
    ],
)
def test_every_module_can_come_first_and_warns_of_nothing(statement):
    code = f"""
import torch, sys, warnings
warnings.simplefilter("error")
{statement}
import flash_attn, flash_attn_2_cuda
from flash_attn.flash_attn_interface import flash_attn_gpu
assert flash_attn_2_cuda is flash_attn_gpu is sys.modules["flash_attn_2_cuda"]
for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"):
    assert callable(getattr(flash_attn_2_cuda, name))
assert torch.ops.flash_attn.attention.default
"""
    result = python("-c", code)
    assert (result.returncode, result.stderr) == (0, "")


def test_other_distributions_can_add_modules(tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "addition.py").write_text("value = 3\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import flash_attn.addition as a; print(a.value)"
    assert python("-c", code).stdout == "3\n"


@pytest.mark.parametrize(
    "value, requested",
    [(v, False) for v in (None, "", "FALSE", "0", "off", "No")]
    + [(v, True) for v in ("TRUE", "true", "1", "On", "yes")],
)
def test_spellings_of_the_triton_switch(monkeypatch, value, requested):
    monkeypatch.setenv(TRITON, value) if value is not None else monkeypatch.delenv(TRITON, raising=False)
    assert _backend_choice.triton_requested() is requested


def test_these_tests_set_up_without_choosing_a_backend():
    """The Triton backend's suite loads conftest.py before it chooses, which importing the package would have done."""
    tests = str(pathlib.Path(__file__).parent)
    result = python(
        "-c", f"import sys; sys.path.insert(0, {tests!r}); import conftest; print('flash_attn' in sys.modules)"
    )
    assert result.stdout == "False\n", result.stderr


def test_triton_is_not_chosen_here():
    assert interface.USE_TRITON_ROCM is False


@pytest.mark.parametrize(
    "value, words", [("TRUE", ["is not installed", "pip install triton"]), ("maybe", ["'maybe'", "true", "false"])]
)
def test_triton_that_cannot_be_used(value, words):
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
try:
    import flash_attn
except ImportError as error:
    print(error)
"""
    result = python("-c", code, **{TRITON: value})
    assert result.stdout.count("\n") == 1 and TRITON in result.stdout, result.stderr
    assert all(word in result.stdout for word in words)


# The loader


def test_torch_release():
    assert [_native.torch_release(v) for v in ("2.13.0+cpu", "1.13.0a0", "2.9.1")] == ["2.13", "1.13", "2.9"]
    with pytest.raises(ImportError, match="unknown"):
        _native.torch_release("unknown")


def test_core_library_beside_a_binding_comes_first(tmp_path):
    common, binding = os.path.join(_native.LIBRARY_DIR, _native.CORE_NAME), str(tmp_path / "binding.so")
    assert _native.core_library() == _native.core_library(binding) == common
    beside = tmp_path / _native.CORE_NAME
    beside.touch()
    assert _native.core_library(binding) == str(beside)


def test_load_is_cached():
    assert _native.load() is _native.load() is interface.flash_attn_gpu


def one_sentence(text):
    return "\n" not in text and text.endswith(".") and text.count(". ") == 0


def test_no_binding_for_this_torch():
    with pytest.raises(ImportError) as caught:
        _native.binding_path("9.87.0+cpu")
    text = str(caught.value)
    assert one_sentence(text)
    built_for = _native.torch_release(torch.__version__)
    assert all(word in text for word in ("9.87.0+cpu", f"torch {built_for} ", "pip install --no-build-isolation ."))


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_binding_that_does_not_load(tmp_path, monkeypatch, content):
    monkeypatch.setattr(_native, "LIBRARY_DIR", str(tmp_path))
    folder = tmp_path / f"torch-{_native.torch_release(torch.__version__)}"
    folder.mkdir()
    (folder / (_native.MODULE_NAME + _native.extension_suffix())).write_bytes(content)
    before = sys.modules.get(_native.MODULE_NAME)
    with pytest.raises(ImportError) as caught:
        _native.load.__wrapped__()
    text = str(caught.value)
    assert one_sentence(text.replace("not a library", ""))
    assert str(folder) in text and torch.__version__ in text and "pip install --no-build-isolation ." in text
    assert sys.modules.get(_native.MODULE_NAME) is before


def test_nothing_built(tmp_path, monkeypatch):
    monkeypatch.setattr(_native, "LIBRARY_DIR", str(tmp_path / "absent"))
    assert _native.available_bindings() == {}
    with pytest.raises(ImportError, match="no torch at all"):
        _native.load.__wrapped__()


# explain and the report


def test_explain():
    q, k, v = dense()
    explanation = flash_attn.explain(q, k, v, causal=True)
    assert explanation.backend == "cpu" and explanation.backward is None
    assert explanation.instruction_set in interface.flash_attn_gpu._cpu_isas()
    assert explanation.tile and explanation.kernel and explanation.reasons
    for word in (explanation.kernel, explanation.tile, explanation.instruction_set, *explanation.reasons):
        assert word in str(explanation)
    assert flash_attn.explain(q=q, k=k, v=v, causal=True) == explanation


@pytest.mark.parametrize("name", calls())
def test_explain_takes_every_call(name):
    function, arguments, *_ = calls()[name]
    explanation = flash_attn.explain(function, *arguments, dropout_p=0.1, window_size=(2, None))
    assert explanation.backward is None
    arguments[0].requires_grad_()
    explanation = flash_attn.explain(function, *arguments, dropout_p=0.1, window_size=(2, None))
    assert explanation.backward.kernel != explanation.kernel
    assert explanation.backward.kernel in str(explanation)
    with torch.no_grad():
        assert flash_attn.explain(function, *arguments).backward is None


@pytest.mark.parametrize("name, shape", [("attn_bias", (1, 1, 4, 4)), ("learnable_sink", (2,))])
def test_explain_of_a_gradient_of_the_scores_alone(name, shape):
    q = torch.zeros(1, 4, 2, 16)
    assert flash_attn.explain(q, q, q, **{name: torch.zeros(shape)}).backward is None
    assert flash_attn.explain(q, q, q, **{name: torch.zeros(shape, requires_grad=True)}).backward is not None


@pytest.mark.parametrize("leaf", range(3), ids=["q", "k", "v"])
def test_explain_knows_what_records_a_gradient(leaf):
    tensors = dense()
    tensors[leaf].requires_grad_()
    assert flash_attn.explain(*tensors).backward is not None
    packed = varlen()
    packed[leaf].requires_grad_()
    assert flash_attn.explain(*packed).backward is not None
    used = torch.tensor([1, 1], dtype=torch.int32)  # without a gradient
    for name in ("seqused_k", "leftpad_k"):
        assert flash_attn.explain(*packed, **{name: used}).backward is None


def test_explain_knows_what_else_is_returned():
    """S_dmask is written from packed keys, by the kernels that many rows get."""
    q, k = torch.zeros(1, 2, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16)
    few, written = (flash_attn.explain(q, k, k, dropout_p=0.1, return_attn_probs=asked) for asked in (False, True))
    many = flash_attn.explain(k, k, k, dropout_p=0.1)
    assert any("read where they are" in reason for reason in few.reasons)
    assert not any("read where they are" in reason for reason in written.reasons)
    assert any("S_dmask" in reason for reason in written.reasons)
    assert (written.kernel, written.instruction_set, written.tile) == (many.kernel, many.instruction_set, many.tile)
    assert flash_attn.explain(q, k, k, return_attn_probs=True) == flash_attn.explain(q, k, k)


def test_explain_tells_varlen_calls_from_dense_ones():
    expected = flash_attn.explain(interface.flash_attn_varlen_func, *varlen())
    assert flash_attn.explain(*varlen()) == expected
    parameters = inspect.signature(interface.flash_attn_varlen_func).parameters
    assert flash_attn.explain(**dict(zip(parameters, varlen()))) == expected
    assert flash_attn.explain(*dense(), torch.tensor(0.5)) == flash_attn.explain(*dense(), 0.5)  # a tensor, of 0 dims


SCORE = "softmax_scale causal left right softcap"
EXPLAINED = {
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    f"{SCORE} alibi_slopes attn_bias attn_mask learnable_sink key_begin key_end block_table seqused_k leftpad_k "
    "return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v cache_seqlens rotary_cos rotary_sin cache_batch_idx "
    f"cache_leftpad block_table alibi_slopes out {SCORE} rotary_interleaved num_splits",
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain_passes_every_argument_on(monkeypatch, name):
    """Most choose no kernel, but the call may refuse any."""
    function, received = getattr(interface, name), []
    facts = dict.fromkeys(("kernel", "backend", "instruction_set", "tile", "reasons"), "")
    monkeypatch.setattr(_explain, "_explainers", lambda: [lambda *args: received.extend(args) or facts] * 2)
    x, lengths = torch.zeros(2, 3, 2, 8), torch.ones(2, dtype=torch.int32)
    special = {**dict.fromkeys(("q", "k_cache", "v_cache", "k", "v"), x), "cache_seqlens": lengths, "dropout_p": 0.25}
    special.update(max_seqlen_q=3, max_seqlen_k=4, window_size=(1, 2), return_attn_probs=True)
    given = {n: special.get(n, n) for n in inspect.signature(function).parameters}
    flash_attn.explain(function, **given)
    wanted = {**given, "left": 1, "right": 2, "out": None}
    for argument, value in zip(EXPLAINED[name].split(), received):
        assert value is wanted[argument], argument


def test_explain_draws_no_random_number():
    before = torch.get_rng_state()
    flash_attn.explain(*dense(), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_refuses_what_the_call_refuses():
    q, k, v = dense()
    for arguments, options in [((q, k[..., :4], v), {}), ((q, k, v), {"dropout_p": 1.5})]:
        with pytest.raises(RuntimeError) as from_call:
            flash_attn.flash_attn_func(*arguments, **options)
        with pytest.raises(RuntimeError) as from_explain:
            flash_attn.explain(*arguments, **options)
        assert str(from_explain.value).splitlines()[0] == str(from_call.value).splitlines()[0]
    with pytest.raises(RuntimeError, match="alibi_slopes"):
        flash_attn.explain(q, k, v, alibi_slopes=torch.zeros(7))
    for name in ("seqused_k", "leftpad_k"):
        with pytest.raises(RuntimeError, match=name):
            flash_attn.explain(*varlen(), **{name: torch.zeros(2)})
    with pytest.raises(RuntimeError, match="kv has shape"):
        flash_attn.explain(interface.flash_attn_kvpacked_func, q, k)
    with pytest.raises(RuntimeError, match="qkv has shape"):
        flash_attn.explain(interface.flash_attn_qkvpacked_func, torch.zeros(3, 2, 8))
    with pytest.raises(TypeError, match="q is 1.0"):
        flash_attn.explain(1.0, k, v)
    with pytest.raises(TypeError, match="not one of flash_attn's functions"):
        flash_attn.explain(torch.nn.functional.softmax, q)
    with pytest.raises(TypeError, match="colour"):
        flash_attn.explain(q, k, v, colour=1)
    with pytest.raises(RuntimeError, match="cache_seqlens need 10 slots"):
        flash_attn.explain(interface.flash_attn_with_kvcache, q, k, v, cache_seqlens=10)
    with pytest.raises(RuntimeError, match="num_pages"):
        flash_attn.explain(*varlen(), block_table=torch.zeros(2, 1, dtype=torch.int32))


def test_report_as_json():
    result = python("-m", "flash_attn", "--json")
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["problem"] == ""
    assert facts["flash_attn"] == {"version": "2.8.3", "backend_version": flash_attn.__backend_version__}
    assert facts["torch"]["running"] == torch.__version__
    assert _native.torch_release(torch.__version__) in facts["torch"]["built_for"]
    assert _native.torch_release(facts["binding"]["built_for_torch"]) == _native.torch_release(torch.__version__)
    for file in ("core_library", "binding"):
        assert os.path.getsize(facts[file]["path"]) == facts[file]["bytes"] > 0
    cpu = facts["backends"]["cpu"]
    assert cpu["available"] == interface.flash_attn_gpu._cpu_isas() and cpu["threads"] >= 1
    assert set(cpu["chosen"].values()) <= set(cpu["available"])
    assert facts["backends"]["triton"]["selected"] is False
    assert "on GPUs" in facts["missing"] and facts["backends"]["gpu"]["code_objects"] is not None


@pytest.mark.parametrize("value, interpreted", [(None, False), ("0", False), ("1", True)])
def test_report_tells_whether_triton_is_interpreted(value, interpreted):
    facts = json.loads(python("-m", "flash_attn", "--json", TRITON_INTERPRET=value).stdout)
    assert facts["backends"]["triton"]["interpreter"] is interpreted


def test_report_names_the_core_that_the_binding_uses(monkeypatch):
    monkeypatch.setattr(_native, "core_library", lambda binding=None: binding or "the common one")
    assert flash_attn.__main__.report()["core_library"]["path"] == _native.load().__file__


def test_report_shows_a_forced_instruction_set():
    slowest = interface.flash_attn_gpu._cpu_isas()[-1]
    result = python("-m", "flash_attn", "--json", FLASH_ATTN_CPU_ISA=slowest)
    facts = json.loads(result.stdout)
    assert set(facts["backends"]["cpu"]["chosen"].values()) == {slowest}
    assert facts["environment"]["FLASH_ATTN_CPU_ISA"] == slowest


def test_report_as_text():
    result = python("-m", "flash_attn")
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("2.8.3", torch.__version__, "libflash_attn.so", "portable"))
    assert result.stdout.endswith("problem         none\n")
    assert "--json" in python("-m", "flash_attn", "--help").stdout


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.orig_argv is new in Python 3.10")
@pytest.mark.parametrize("name, value", [(TRITON, "maybe"), ("FLASH_ATTN_CPU_ISA", "mmx")])
def test_report_of_an_installation_that_cannot_be_used(name, value):
    result = python("-m", "flash_attn", "--json", **{name: value})
    assert result.returncode == 1, result.stderr
    facts = json.loads(result.stdout)
    assert name in facts["problem"] and facts["environment"][name] == value
    assert facts["problem"] in python("-m", "flash_attn", **{name: value}).stdout
