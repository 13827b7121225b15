"""The Triton backend against the oracle, at the contract's tolerances; upstream's name for its suite.

    FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE pytest tests/test_flash_attn_triton_amd.py

On a machine without a GPU Triton's interpreter runs the kernels, on one with a GPU the GPU does, with longer sequences.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

VARIABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
AUTOTUNE = "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE"
if os.environ.get(VARIABLE, "").lower() not in ("true", "1", "on", "yes"):
    pytest.skip(f"the Triton backend is not selected: set {VARIABLE}=TRUE", allow_module_level=True)
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="Triton is not installed: pip install -r requirements/triton.txt")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "python"), str(HERE.parent / "tools")]

import harness  # noqa: E402
import kvcache_model as model  # noqa: E402
import not_finite  # noqa: E402
import oracle  # noqa: E402
import philox  # noqa: E402
import tensors  # noqa: E402
import tolerances  # noqa: E402
import triton_cases  # noqa: E402
import triton_refused  # noqa: E402
from cases import Case  # noqa: E402
from devices import Device  # noqa: E402

import flash_attn  # noqa: E402
from flash_attn import _native, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402
from flash_attn import flash_attn_interface as interface  # noqa: E402
from flash_attn.flash_attn_triton_amd import attention, interface_fa, interface_v2, stored, tuning  # noqa: E402
from flash_attn.flash_attn_triton_amd.launch import recording  # noqa: E402

DEVICE = Device("cuda" if ON_GPU else "cpu")
DTYPES, proves = triton_cases.DTYPES, triton_cases.proves


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def there(*tensors):
    """The tensors on the device that the suite tests."""
    moved = [x.to(DEVICE.torch_name) if isinstance(x, torch.Tensor) else x for x in tensors]
    return moved if len(moved) > 1 else moved[0]


def randn(*shape, dtype=torch.float32, seed=0):
    return there(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


# Forward and backward.


@pytest.mark.parametrize("case", list(triton_cases.grid_params()))
def test_flash_attn_output(case):
    harness.check(case, device=DEVICE)


@pytest.mark.parametrize("case", triton_cases.head_dim_params())
def test_head_dims_and_packing(case):
    harness.check(case, device=DEVICE)


@pytest.mark.skipif(not ON_GPU, reason="long sequences need a GPU: the interpreter would take hours")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", (64, 80, 96, 128, 192, 256))
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window": (200, 100)}, {"dropout_p": 0.2}], ids=str)
def test_long_sequences(dtype, D, more):
    harness.check(Case(dtype, ((1023, 2049),), H=4, Hk=2, D=D, **more), device=DEVICE)


@pytest.mark.parametrize("lengths", [((0, 5),), ((5, 0),), ((70, 20),)], ids=str)
def test_rows_without_keys(lengths):
    """out 0, lse +inf, gradients 0: no keys, no queries, or more queries than a causal mask gives keys to."""
    harness.check(Case(lengths=lengths * 2, H=2, Hk=1, D=16, causal=True), device=DEVICE)


@pytest.mark.parametrize("infinity", (math.inf, -math.inf))
def test_backward_takes_either_infinity(infinity):
    q, k, v, dout = (randn(1, n, 2, 16, seed=n) for n in (40, 20, 20, 40))
    score = (0.0, 0.25, True, -1, -1, 0.0)
    out, lse, _, _ = interface_fa.fwd(q, k, v, None, None, *score, False)
    assert torch.isposinf(lse[..., :20]).all() and torch.isfinite(lse[..., 20:]).all()
    expected = interface_fa.bwd(dout, q, k, v, out, lse, None, None, None, None, *score, False)
    lse[..., :20] = infinity
    got = interface_fa.bwd(dout, q, k, v, out, lse, None, None, None, None, *score, False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected)) and (got[0][:, :20] == 0).all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_what_depends_on_it(dtype, where):
    for name, mask in not_finite.MASKS.items():
        call = not_finite.Call((5, 70, 2, 1), 24, harness.TORCH_DTYPES[dtype], mask, where)
        (call.check_on_a_gpu if name == "window" else call.check)(DEVICE)


# Dropout.


@pytest.mark.parametrize("p", (0.1, 0.5, 0.99))
def test_dropout_mask_is_the_projects(p):
    """S_dmask's signs are the mask that Philox gives, over a batch, heads, and more than one block of keys."""
    q, k = randn(2, 5, 3, 16), randn(2, 150, 3, 16, seed=1)
    torch.manual_seed(3)
    _, _, s_dmask, rng_state = interface_fa.fwd(q, k, k, None, None, p, 0.25, False, -1, -1, 0.0, True)
    keep = philox.keep_mask(rng_state.tolist(), p, 2, 3, 5, 150)
    assert torch.equal(~torch.signbit(s_dmask.cpu()), keep)


@pytest.mark.parametrize("keys", (16, 32, 128))
def test_dropout_mask_of_every_tile_size(keys, monkeypatch):
    """Forward and backward pass begin at any multiple of the tile; own tiles are loaded again, as on RDNA 3."""
    monkeypatch.setattr(tuning, "static_settings", lambda kind, target: tuning.Settings(16, keys, 4, 1))
    monkeypatch.setattr(attention, "loads_again", lambda kind, target: True)
    harness.check(Case("fp32", ((20, 150),), H=1, Hk=1, D=16, dropout_p=0.4), device=DEVICE)


def test_dropout_draws_what_the_native_backend_draws():
    q, k, v = (torch.randn(2, 70, 2, 32) for _ in range(3))
    score = (0.2, 0.25, True, -1, -1, 0.0)
    torch.manual_seed(11)
    native = _native.load().fwd(q, k, v, None, None, *score, True, None)
    torch.manual_seed(11)
    out, lse, s_dmask, rng_state = interface_fa.fwd(*there(q, k, v), None, None, *score, True)
    if not ON_GPU:
        assert torch.equal(rng_state, native[3])
        seen = native[2] != 0
        assert torch.equal(torch.signbit(s_dmask)[seen], torch.signbit(native[2])[seen])
        torch.testing.assert_close(out, native[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(s_dmask, native[2], rtol=1e-5, atol=1e-5)
    # The same state gives the native backward pass the same mask.
    dout = torch.randn(q.shape)
    state = rng_state.cpu()
    expected = _native.load().bwd(
        dout, q, k, v, out.cpu(), lse.cpu(), None, None, None, None, *score, False, None, state
    )
    got = interface_fa.bwd(*there(dout, q, k, v), out, lse, None, None, None, None, *score, False, None, rng_state)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


def test_seeds_repeat():
    q = randn(1, 20, 1, 16)
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs.append(flash_attn_func(q, q, q, dropout_p=0.5))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


# Raw functions.


@pytest.mark.parametrize("module", (interface_fa, interface_v2), ids=("fa", "v2"))
@pytest.mark.parametrize(
    "name, count", [("fwd", 13), ("varlen_fwd", 22), ("bwd", 19), ("varlen_bwd", 24), ("fwd_kvcache", 20)]
)
def test_arities_are_upstreams(module, name, count):
    names = list(inspect.signature(getattr(module, name)).parameters)
    assert [n for n in names if not n.startswith("descale_")] == names[:count]
    assert all(n.startswith("descale_") for n in names[count:]) and (module is interface_fa or len(names) == count)


@pytest.mark.parametrize("arguments", (21, 22))
def test_raw_varlen_functions(arguments):
    case = Case("fp16", ((30, 70), (9, 9)), True, H=4, Hk=2, D=40, softcap=15.0)
    inputs = tensors.placed(harness.make_inputs(case), DEVICE)
    q, k, v = (x.detach() for x in inputs.leaves)
    cu, longest = (inputs.cu_seqlens_q, inputs.cu_seqlens_k), inputs.max_seqlens
    score = (0.0, 40**-0.5, True, False, -1, -1, 15.0)
    options = (*cu, None, None, None, None, *longest, *score, False, None, *(0,) * (arguments - 21))
    out, lse, s_dmask, rng_state = interface_v2.varlen_fwd(q, k, v, None, *options)
    assert s_dmask.shape == (0,) and rng_state.tolist() == [0, 0]
    wide = [torch.full((len(x), 2, *x.shape[1:]), math.nan, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    buffers = [x[:, 1] for x in wide]
    options = (*cu, None, *longest, *score, True, None, None)
    *grads, softmax_d = interface_v2.varlen_bwd(inputs.dout, q, k, v, out, lse, *buffers, *options)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(grads, buffers)) and softmax_d.shape == lse.shape
    assert all(torch.isnan(x[:, 0]).all() for x in wide)
    reference = harness.make_inputs(case)
    ref, pt = (harness.reference(reference, None, a) for a in harness.arithmetics(case))
    harness.compare(reference, out.cpu(), lse.cpu(), [x.cpu() for x in grads], ref, pt)


def test_softmax_d_and_a_given_buffer():
    q, k, dout = (randn(1, n, 2, 16, seed=n) for n in (40, 20, 41))
    dout = dout[:, :40]
    buffer = torch.full((1, 2, 40, 16), math.nan, device=q.device).transpose(1, 2)
    score = (0.0, 0.25, False, -1, -1, 0.0)
    out, lse, _, _ = interface_fa.fwd(q, k, k, buffer, None, *score, False)
    assert out is buffer and torch.isfinite(buffer).all()
    softmax_d = interface_fa.bwd(dout, q, k, k, out, lse, None, None, None, None, *score, True)[3]
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=proves("deterministic", dtype=d)) for d in DTYPES])
def test_gradients_are_deterministic(dtype):
    dtype = harness.TORCH_DTYPES[dtype]
    q, k = randn(1, 70, 4, 32, dtype=dtype), randn(1, 90, 2, 32, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, k.clone())]
    grads = [torch.autograd.grad(flash_attn_func(*leaves, causal=True).float().sum(), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


# Stored keys.


@pytest.mark.parametrize("row", list(triton_cases.cache_params()))
def test_flash_attn_kvcache(row):
    call = triton_cases.cache_call(row)
    expected = model.appended(call)
    ref, pt = (model.attend(call, expected, a) for a in (oracle.EXACT, oracle.same_precision(call.q.dtype)))
    arguments = {name: there(x) for name, x in call.arguments().items()}
    out, lse = (x.cpu() for x in flash_attn_with_kvcache(**arguments, return_softmax_lse=True))
    k_cache, v_cache = arguments["k_cache"].cpu(), arguments["v_cache"].cpu()
    assert torch.equal(v_cache, expected[1])
    if call.rotary_cos is None:
        assert torch.equal(k_cache, expected[0])
    torch.testing.assert_close(k_cache, expected[0], rtol=1e-3, atol=1e-3)
    tolerances.assert_within("out", out, ref[0], pt[0], 3, 1e-5, "kv cache")
    finite = torch.isfinite(ref[1])
    assert torch.equal(torch.isposinf(lse), ~finite)
    tolerance = 2e-2 if call.rotary_cos is not None and row["dtype"] != "fp32" else 1e-4
    torch.testing.assert_close(lse[finite].double(), ref[1][finite], rtol=tolerance, atol=tolerance)


def test_cache_seqlens_as_int_and_none():
    call = triton_cases.cache_call({**triton_cases.PLAIN_CACHE, "new": 0})
    q, k, v = there(call.q, call.k_cache, call.v_cache)
    whole = flash_attn_with_kvcache(q, k, v)
    torch.testing.assert_close(whole, flash_attn_func(q, k, v), rtol=1e-5, atol=1e-5)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=90), whole)


@proves("paged varlen forward")
@pytest.mark.parametrize("seqused", (False, True))
def test_paged_varlen(seqused):
    """What packed keys give, with the keys in pages."""
    lengths, page = [60, 0, 21], 16
    q, k, v = randn(20, 4, 24), randn(81, 2, 24, seed=1), randn(81, 2, 24, seed=2)
    cu_q, cu_k = there(torch.tensor([0, 3, 5, 20], dtype=torch.int32), tensors.cumulative(lengths))
    *pages, table = triton_cases.in_pages(k, v, lengths, page)
    settings = dict(causal=True, window_size=(30, 0), return_attn_probs=True)
    expected = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 15, 60, **settings)
    more = {"seqused_k": there(torch.tensor(lengths, dtype=torch.int32))} if seqused else {}
    pages_k, pages_v, table = there(*pages, table)
    got = flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 15, 60, block_table=table, **settings, **more)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", ("pages", "cache_batch_idx"))
def test_rows_that_are_not_there(storage, monkeypatch):
    """Where contents cannot be read first, as on a GPU: nothing out of bounds is touched, and what sees it is NaN."""
    monkeypatch.setattr(stored.StoredKeys, "check_contents", lambda self, added: None)
    arguments, broken, appended = triton_cases.broken_cache_call(storage)
    arguments = {name: there(x) for name, x in arguments.items()}
    caches = [arguments[name] for name in ("k_cache", "v_cache")]
    before = [x.clone() for x in caches]
    out, lse = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert out.isnan().any(-1).any(-1).all(-1).tolist() == broken == lse.isnan().any(1).all(-1).tolist()
    assert all(torch.isfinite(out[b]).all() for b in range(3) if not broken[b])
    # Nothing else changed.
    assert [(a != b).any(-1).any(-1).sum().item() for a, b in zip(caches, before)] == [appended] * 2


@proves("seqused_k, leftpad_k in varlen")
def test_used_and_padded_keys_in_varlen():
    q, k, v = randn(9, 4, 24), randn(130, 2, 24, seed=1), randn(130, 2, 24, seed=2)
    cu_q, cu_k = there(torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([0, 100, 130], dtype=torch.int32))
    pad, used = there(torch.tensor([7, 0], dtype=torch.int32), torch.tensor([90, 20], dtype=torch.int32))
    got = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 100, causal=True, leftpad_k=pad, seqused_k=used)
    rows = torch.cat((torch.arange(7, 90), torch.arange(100, 120))).to(q.device)
    cu = there(torch.tensor([0, 83, 103], dtype=torch.int32))
    expected = flash_attn_varlen_func(q, k[rows], v[rows], cu_q, cu, 6, 83, causal=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# What is refused, by name.


@pytest.fixture(scope="module")
def messages():
    return triton_refused.messages(there)


def test_refused(messages):
    assert [(words, said) for words, said in messages.items() if words not in said[1]] == []


@pytest.mark.parametrize("what", list(triton_cases.lacking_params()))
def test_lacking(messages, what):
    assert any(words.startswith(f"has no {what}") for words in messages)


def test_every_error_text_is_raised(messages):
    """And none by other words than docs/errors.md has."""
    unknown, silent = triton_refused.compared_with_sources(messages.values())
    # Contents are not read on a GPU.
    silent = [s for s in silent if not (ON_GPU and s.startswith(triton_refused.OF_CONTENTS))]
    assert unknown == [] and silent == []


# How the backend is selected, described, and tuned.


def test_selected():
    assert interface.USE_TRITON_ROCM is True and interface.flash_attn_gpu is interface_fa


def test_tiles_of_two_widths_are_not_made_for_nvidia():
    """ptxas 12.8 addresses them wrongly; AMD's compiler does not know it."""
    q, k, v = (torch.empty(1, 8, 2, D, dtype=torch.bfloat16, device="meta") for D in (40, 40, 24))
    for target, expected in (("sm_90", (64, 64)), ("gfx942", (64, 32)), ("gfx1201", (64, 32))):
        with tuning.compiling_for(target), recording() as launches:
            interface_fa.fwd(q, k, v, None, None, 0.0, 0.2, True, -1, -1, 0.0, False)
        assert tuple(launches[0].arguments[name] for name in ("BLOCK_D", "BLOCK_DV")) == expected


def test_explain():
    q = there(torch.zeros(1, 4, 2, 16)).requires_grad_()
    explanation = flash_attn.explain(q, q, q, causal=True)
    assert explanation.backend == explanation.backward.backend == "triton"
    assert explanation.kernel.startswith("triton.forward.fp32") and "TRITON" in str(explanation)
    assert "triton.stored" in str(flash_attn.explain(flash_attn_with_kvcache, q, q, q, cache_seqlens=3))
    with pytest.raises(NotImplementedError, match="attn_mask"):
        flash_attn.explain(q, q, q, attn_mask=there(torch.ones(1, 4, dtype=torch.bool)))


@proves("torch.compile")
def test_inference_mode_and_compile():
    q = randn(1, 20, 2, 16)
    expected = flash_attn_func(q, q, q, causal=True)
    with torch.inference_mode():
        assert torch.equal(flash_attn_func(q, q, q, causal=True), expected)
        packed = torch.stack((q, q, q), 2)
        assert torch.equal(flash_attn.flash_attn_qkvpacked_func(packed, causal=True), expected)
    compiled = torch.compile(lambda x: flash_attn_func(x, x, x, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), expected)


def child(code, **environment):
    merged = {**os.environ, "PYTHONPATH": str(HERE.parent), **environment}
    merged = {name: value for name, value in merged.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, text=True)


def test_cpu_tensors_keep_the_cpu_backend():
    """Without the interpreter, whatever is selected for GPUs."""
    code = """
import torch, flash_attn
from flash_attn import flash_attn_interface as interface
q = torch.randn(1, 4, 2, 16)
e = flash_attn.explain(q, q, q)
assert e.backend == "cpu" and "TRITON_INTERPRET=1" in str(e), e
flash_attn.flash_attn_func(q, q, q, attn_mask=torch.ones(1, 4, dtype=torch.bool))  # which Triton would refuse
out = flash_attn.flash_attn_func(q, q, q)
raw = interface.flash_attn_gpu.fwd(q, q, q, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)
assert interface.USE_TRITON_ROCM and torch.equal(raw[0], out)
"""
    result = child(code, TRITON_INTERPRET=None)
    assert result.returncode == 0, result.stderr


def test_tuning_is_shown_and_kept(tmp_path):
    """The first call measures with a progress display; a second process finds the result."""
    code = """
import torch, flash_attn
q = torch.randn(1, 4, 2, 16, device="cuda" if torch.cuda.is_available() else "cpu")
print(flash_attn.flash_attn_func(q, q, q).isfinite().all().item())
"""
    environment = {AUTOTUNE: "TRUE", "XDG_CACHE_HOME": str(tmp_path)}
    first = child(code, **environment)
    assert first.stdout == "True\n" and "tuning forward/float32/d16x16" in first.stderr, first.stderr
    (file,) = (tmp_path / "flash_attn" / "triton").glob("*.json")
    assert file.name == tuning.device_name(torch.device(DEVICE.torch_name)) + ".json"
    kept = json.loads(file.read_text())
    assert list(kept) == ["forward/float32/d16x16"] and len(kept["forward/float32/d16x16"]) == 4
    second = child(code, **environment)
    assert second.stdout == "True\n" and "tuning" not in second.stderr, second.stderr
