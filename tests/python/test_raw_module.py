"""flash_attn_2_cuda: upstream's raw functions in their positional order, and the underscore functions over them."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import cases
import harness
import pytest
import tensors
import torch
from cases import Case
from functions import FUNCTIONS, good_arguments
from functions import raw_module as module

from flash_attn import flash_attn_interface as interface

pytestmark = pytest.mark.second_torch
STRICT = [f for f in FUNCTIONS if f.strict]
CASE = Case(lengths=((70, 1100),) * 2, H=4, Hk=2, D=40, Dv=24, causal=True, window=(500, 0), alibi="BH", dropout_p=0.2)
VARLEN = Case(lengths=((70, 1100), (0, 5), (33, 33)), varlen=True, H=4, Hk=2, D=40, softcap=15.0)


def test_module_is_importable_by_upstreams_name():
    assert importlib.import_module("flash_attn_2_cuda") is module is interface.flash_attn_gpu
    assert {"fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"} <= set(dir(module))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dense_functions(dtype):
    """fwd into a given buffer and into a new one, then bwd, against the oracle."""
    case = replace(CASE, dtype=dtype)
    inputs = harness.make_inputs(case)
    q, k, v = (x.detach() for x in inputs.leaves)
    score = (case.dropout_p, case.D**-0.5, True, 500, -1, 0.0)
    buffer = tensors.strided(torch.full(inputs.dout.shape, 5.0, dtype=q.dtype), "heads first")
    torch.manual_seed(8)
    results = module.fwd(q, k, v, buffer, inputs.alibi_slopes, *score, True, None)
    assert type(results) is list and len(results) == 4
    out, lse, s_dmask, rng_state = results
    assert out.data_ptr() == buffer.data_ptr() and out.stride() == buffer.stride()
    torch.manual_seed(8)
    again = module.fwd(q, k, v, None, inputs.alibi_slopes, *score, False, None)
    assert torch.equal(again[0], out) and again[2].shape == (0,) and torch.equal(again[3], rng_state)
    assert s_dmask.shape == (2, 4, 70, 1100)
    results = module.bwd(
        inputs.dout, q, k, v, out, lse, None, None, None, inputs.alibi_slopes, *score, False, None, rng_state
    )
    assert type(results) is list and len(results) == 4
    *grads, softmax_d = results
    keep = harness.rebuilt_mask(case, rng_state.tolist())
    ref, pt = (harness.reference(inputs, keep, a) for a in harness.arithmetics(case))
    harness.compare(inputs, out, lse, grads, ref, pt)
    delta = (inputs.dout.double() * out.double()).sum(-1).transpose(1, 2)
    assert softmax_d.shape == lse.shape and softmax_d.dtype == lse.dtype
    torch.testing.assert_close(softmax_d.double(), delta, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arguments", (21, 22))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_varlen_functions(dtype, arguments):
    """With and without the last argument of newer releases, num_splits."""
    case = replace(VARLEN, dtype=dtype)
    inputs = harness.make_inputs(case)
    q, k, v = (x.detach() for x in inputs.leaves)
    cu, longest = (inputs.cu_seqlens_q, inputs.cu_seqlens_k), inputs.max_seqlens
    splits = (0,) if arguments == 22 else ()
    out, lse, s_dmask, rng_state = module.varlen_fwd(
        q,
        k,
        v,
        None,
        *cu,
        None,
        None,
        None,
        None,
        *longest,
        0.0,
        case.D**-0.5,
        False,
        False,
        -1,
        -1,
        15.0,
        False,
        None,
        *splits,
    )
    assert s_dmask.shape == (0,) and torch.equal(rng_state, torch.zeros(2, dtype=torch.int64))
    buffers = [torch.full_like(x, math.nan) for x in (q, k, v)]
    *grads, softmax_d = module.varlen_bwd(
        inputs.dout,
        q,
        k,
        v,
        out,
        lse,
        *buffers,
        *cu,
        None,
        *longest,
        0.0,
        case.D**-0.5,
        True,
        False,
        -1,
        -1,
        15.0,
        True,
        None,
        None,
    )
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(grads, buffers)) and softmax_d.shape == lse.shape
    ref, pt = (harness.reference(inputs, None, a) for a in harness.arithmetics(case))
    harness.compare(inputs, out, lse, grads, ref, pt)


@pytest.mark.parametrize("function", STRICT, ids=lambda f: f.name)
@pytest.mark.parametrize("generator", [torch.Generator(), torch.zeros(1), 0, False], ids=lambda g: type(g).__name__)
def test_generator_slot_must_be_none(function, generator):
    values = {**good_arguments(function), "generator": generator}
    with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
        function.call(values)


@pytest.mark.parametrize("function", STRICT, ids=lambda f: f.name)
@pytest.mark.parametrize("by", (-2, 1))
def test_argument_counts(function, by):
    """One too many, and two too few (varlen_fwd may be called with one less)."""
    arguments = list(good_arguments(function).values())
    arguments = arguments[:by] if by < 0 else arguments + [None] * by
    with pytest.raises(TypeError):
        getattr(module, function.name.split(".")[1])(*arguments)


@pytest.mark.parametrize("function, count", [("fwd", 13), ("varlen_fwd", 22), ("bwd", 19), ("varlen_bwd", 24)])
def test_arities_are_upstreams(function, count):
    (described,) = [f for f in STRICT if f.name.endswith("." + function)]
    assert len(described.takes) == count


def test_raw_functions_record_no_graph():
    """No autograd formula, as upstream: results carry no gradient, or differentiating them raises."""
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    assert not module.fwd(q, q, q, None, None, 0.0, 0.25, False, -1, -1, 0.0, False, None)[0].requires_grad
    out = interface._flash_attn_forward(q, q, q, 0.0, 0.25, False, -1, -1, 0.0, None, False)[0]
    if out.requires_grad:
        with pytest.raises(RuntimeError):
            out.sum().backward()


def test_underscore_functions_equal_the_public_ones():
    inputs = harness.make_inputs(replace(VARLEN, softcap=0.0, dropout_p=0.3))
    q, k, v = (x.detach() for x in inputs.leaves)
    cu = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, *inputs.max_seqlens)
    torch.manual_seed(6)
    expected, expected_lse, expected_mask = harness.public_call(inputs)
    expected_grads = torch.autograd.grad(expected, inputs.leaves, inputs.dout)
    torch.manual_seed(6)
    out, lse, s_dmask, rng_state = interface._flash_attn_varlen_forward(
        q, k, v, *cu, dropout_p=0.3, softmax_scale=q.shape[-1] ** -0.5, causal=False, return_softmax=True
    )
    assert all(torch.equal(a, b) for a, b in zip((expected, expected_lse, expected_mask), (out, lse, s_dmask)))
    grads = [torch.empty_like(x) for x in (q, k, v)]
    softmax_d = interface._flash_attn_varlen_backward(
        inputs.dout,
        q,
        k,
        v,
        out,
        lse,
        *grads,
        *cu,
        dropout_p=0.3,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        rng_state=rng_state,
    )
    assert all(torch.equal(a, b) for a, b in zip(expected_grads, grads)) and softmax_d.shape == lse.shape


@pytest.mark.parametrize("missing", ["dq", "dk", "dv", "all"])
def test_gradient_buffers_may_be_none(missing):
    """The underscore backward returns softmax_d whichever buffers are given, and fills those."""
    (function,) = [f for f in FUNCTIONS if f.name == "_flash_attn_backward"]
    values = good_arguments(function)
    function.call(values)
    expected = {n: values[n].clone() for n in ("dq", "dk", "dv")}
    values.update({n: None if missing in (n, "all") else torch.zeros_like(x) for n, x in expected.items()})
    assert function.call(values).shape == values["softmax_lse"].shape
    assert all(values[n] is None or torch.equal(values[n], x) for n, x in expected.items())


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_compiled_backward_into_one_tensor(varlen):
    """Inductor keeps what is written to slices of one dqkv, also where sizes are symbolic."""
    rest = (0.0, 0.25, True, -1, -1, 0.0, None, False)

    def step(q, k, v, dout):
        dqkv = q.new_zeros(*q.shape[:-2], 3, *q.shape[-2:])
        gradients = dqkv.unbind(-3)
        if not varlen:
            out, lse, _, state = interface._flash_attn_forward(q, k, v, *rest)
            delta = interface._flash_attn_backward(dout, q, k, v, out, lse, *gradients, *rest, state)
            return dqkv, delta
        T = q.shape[0]
        lengths = (torch.tensor([0, T], dtype=torch.int32),) * 2 + (T, T)
        out, lse, _, state = interface._flash_attn_varlen_forward(q, k, v, *lengths, *rest)
        delta = interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, *gradients, *lengths, *rest, state)
        return dqkv, delta

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, dynamic=True)
    for S in (9, 14):
        given = [torch.randn(*(() if varlen else (2,)), S, 2, 16) for _ in range(4)]
        for actual, expected in zip(fast(*given), step(*given)):
            assert torch.equal(actual, expected) and expected.abs().sum() > 0


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
def test_compiled_gradient_buffers_may_be_none():
    rest = (0.0, 0.25, True, -1, -1, 0.0, None, False)

    def step(q, k, v, dout, dk):
        out, lse, _, state = interface._flash_attn_forward(q, k, v, *rest)
        return interface._flash_attn_backward(dout, q, k, v, out, lse, None, dk, None, *rest, state)

    torch._dynamo.reset()
    given = [torch.randn(2, 9, 2, 16) for _ in range(4)]
    written, expected = torch.zeros(2, 9, 2, 16), torch.zeros(2, 9, 2, 16)
    softmax_d = torch.compile(step, fullgraph=True, backend="aot_eager")(*given, written)
    assert torch.equal(softmax_d, step(*given, expected))
    assert torch.equal(written, expected) and expected.abs().sum() > 0


@pytest.mark.parametrize("num_splits", (0, 1, 2))
def test_num_splits_of_paged_varlen(num_splits):
    """Upstream's rule: the default equals 0 to the bit, more than one split is refused with pages."""
    q, pages = torch.randn(3, 4, 64), torch.randn(4, 256, 2, 64)
    cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    used = torch.tensor([100, 256, 7], dtype=torch.int32)
    table = torch.tensor([[2], [0], [3]], dtype=torch.int32)
    arguments = (q, pages, pages, None, cu, cu, used, None, table, None, 1, 256, 0.0, 0.125, False, False, -1, 0, 0.0,
                 False, None)  # fmt: skip
    expected = module.varlen_fwd(*arguments)
    if num_splits > 1:
        with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
            module.varlen_fwd(*arguments, num_splits)
    else:
        assert torch.equal(module.varlen_fwd(*arguments, num_splits)[0], expected[0])
        assert torch.isfinite(expected[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_may_take_the_place_of_q(dtype):
    """S_dmask is written after the output, from scores that are computed again."""
    q, k, v = (torch.randn(1, 64, 2, 64, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3))

    def forward(out):
        torch.manual_seed(0)
        return module.fwd(q, k, v, out, None, 0.2, 0.125, False, -1, -1, 0.0, True, None)

    expected = forward(None)
    for result, wanted in zip(forward(q)[:3], expected):
        assert torch.equal(result, wanted)
