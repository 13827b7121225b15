"""Norms of sums, as Triton's names have them, against their definition in double precision, gradients included."""

import pytest
import torch
from harness import TORCH_DTYPES
from norm_definition import DTYPES, EPS, TOLERANCE, B, N, S, check, norm, randn, weight_dtype

from flash_attn.ops.rms_norm import RMSNorm
from flash_attn.ops.triton.layer_norm import RMSNorm as PrenormRMSNorm
from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_linear_fn, rms_norm_fn

pytestmark = pytest.mark.second_torch


@pytest.fixture(autouse=True)
def seed(rng):
    pass


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("two_norms", [False, True])
@pytest.mark.parametrize("centred_at_zero", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_layer_norm_fn(dtype, rms, branches, two_norms, centred_at_zero, with_residual):
    x, x1, residual = (randn(B, S, N, dtype=dtype) for _ in range(3))
    weights = [randn(N, dtype=weight_dtype(dtype)) for _ in range(4)]
    shift = 1.0 if centred_at_zero else 0.0

    def ours(x, x1, residual, weight, bias, weight1, bias1):
        function = rms_norm_fn if rms else layer_norm_fn
        results = function(
            x,
            weight,
            bias,
            residual if with_residual else None,
            x1 if branches == 2 else None,
            weight1 if two_norms else None,
            bias1 if two_norms else None,
            eps=EPS,
            prenorm=True,
            zero_centered_weight=centred_at_zero,
        )
        return [*results, sum(0 * t.sum() for t in (x1, residual, weight1, bias1))]

    def reference(x, x1, residual, weight, bias, weight1, bias1):
        total = x + (x1 if branches == 2 else 0) + (residual if with_residual else 0)
        results = [norm(total, weight + shift, bias, rms)]
        results += [norm(total, weight1 + shift, bias1, rms)] if two_norms else []
        return [*results, total, sum(0 * t.sum() for t in (x1, residual, weight1, bias1))]

    got = check(ours, reference, [x, x1, residual, *weights], TOLERANCE[dtype])
    assert all(t.dtype == x.dtype for t in got[:-1])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_near_one_keep_their_digits(dtype):
    """zero_centered_weight is for weights that are too close to 1 for 16 bits."""
    x, weight, weight1 = randn(B, N), (1e-4 * randn(N)).to(TORCH_DTYPES[dtype]), randn(N, dtype=dtype)
    options = dict(x1=x, weight1=weight1, eps=EPS, zero_centered_weight=True)
    for got, own in zip(rms_norm_fn(x, weight, None, **options), (weight, weight1)):
        torch.testing.assert_close(got.double(), norm(2 * x, own.double() + 1, None, True), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("shape", [(B, S), (B * S,), (B, S, 1)])
def test_rowscale_and_no_bias(rms, shape):
    rowscale = torch.rand(shape)
    function = rms_norm_fn if rms else layer_norm_fn
    check(
        lambda x, weight: function(x, weight, None, rowscale=rowscale, eps=EPS),
        lambda x, weight: norm(x * rowscale.view(B, S, 1).double(), weight, None, rms),
        [randn(B, S, N), randn(N)],
        1e-5,
    )


def test_dtypes_of_sum_and_result():
    x, weight, bias = randn(B, N, dtype="bf16"), randn(N), randn(N)
    y, total = layer_norm_fn(x, weight, bias, prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.bfloat16)
    y, total = layer_norm_fn(x, weight, bias, prenorm=True, residual_in_fp32=True, out_dtype=torch.float16)
    assert (y.dtype, total.dtype) == (torch.float16, torch.float32)
    y, total = layer_norm_fn(x, weight, bias, residual=randn(B, N), prenorm=True)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    y, total = layer_norm_fn(x, weight, bias, residual=randn(B, N, dtype="bf16"), prenorm=True, residual_in_fp32=True)
    assert total.dtype == torch.bfloat16


def test_given_outputs_are_written():
    x, weight, bias, residual = randn(B, N), randn(N), randn(N), randn(B, N)
    out, residual_out = torch.full((B, N), torch.nan), torch.full((B, N), torch.nan)
    y, total = layer_norm_fn(x, weight, bias, residual, prenorm=True, out=out, residual_out=residual_out)
    assert y is out and total is residual_out
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, layer_norm_fn(x, weight, bias, residual))
    flat = torch.full((N,), torch.nan)
    assert torch.equal(layer_norm_fn(x[:1, None], weight, bias, out=flat)[0, 0], flat)
    half = torch.empty(B, N, dtype=torch.bfloat16)
    pair = layer_norm_fn(x, weight, bias, weight1=weight, bias1=bias, out=half)
    assert pair[0] is half and pair[1].dtype == half.dtype and torch.equal(*pair)
    residual_out.fill_(torch.nan)
    assert torch.equal(layer_norm_fn(x, weight, bias, residual, residual_out=residual_out), out)
    torch.testing.assert_close(residual_out, x + residual)


def test_number_of_results():
    x, x1, w = randn(B, N), randn(B, N), randn(N)
    for second in (False, True):
        for prenorm in (False, True):
            for masks in (False, True):
                options = dict(weight1=w if second else None, prenorm=prenorm, return_dropout_mask=masks)
                results = layer_norm_fn(x, w, None, x1=x1, dropout_p=0.3, **options)
                count = 1 + second + prenorm + 2 * masks
                assert len(results) == count if count > 1 else isinstance(results, torch.Tensor)
    assert layer_norm_fn(x, w, None, return_dropout_mask=True)[1:] == (None, None)
    _, mask, other = layer_norm_fn(x, w, None, dropout_p=0.5, return_dropout_mask=True)
    assert mask.dtype == torch.bool and other is None


@pytest.mark.parametrize("rms", [False, True])
def test_dropout_is_the_mask_it_returns(rms):
    p = 0.4
    x, x1, residual, weight = randn(200, N), randn(200, N), randn(200, N), randn(N)
    x, x1 = x.requires_grad_(), x1.requires_grad_()
    function = rms_norm_fn if rms else layer_norm_fn
    options = dict(residual=residual, x1=x1, eps=EPS, dropout_p=p, prenorm=True, return_dropout_mask=True)
    y, total, mask, mask1 = function(x, weight, None, **options)
    wanted_total = (x * mask / (1 - p) + x1 * mask1 / (1 - p) + residual).double()
    torch.testing.assert_close(total.double(), wanted_total)
    torch.testing.assert_close(y.double(), norm(wanted_total, weight, None, rms), rtol=1e-5, atol=1e-5)
    for m in (mask, mask1):
        assert abs(m.float().mean() - (1 - p)) < 0.05
    assert not torch.equal(mask, mask1)
    direction = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, x1), direction)
    wanted = torch.autograd.grad(norm(wanted_total, weight, None, rms), (x, x1), direction.double())
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_follows_the_seed():
    x, weight = randn(B, S, N), randn(N)
    runs = []
    for number in (3, 3, 4):
        torch.manual_seed(number)
        runs.append(layer_norm_fn(x, weight, None, dropout_p=0.5))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_dropout_out_of_range(p):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        layer_norm_fn(randn(B, N), randn(N), None, dropout_p=p)


def test_shapes_that_do_not_fit():
    x, w = randn(B, N), randn(N)
    with pytest.raises(AssertionError, match="residual has shape"):
        layer_norm_fn(x, w, None, residual=randn(B + 1, N))
    with pytest.raises(AssertionError, match="x1 has shape"):
        layer_norm_fn(x, w, None, x1=randn(1, N))
    with pytest.raises(AssertionError, match="rowscale and x1"):
        layer_norm_fn(x, w, None, x1=x, rowscale=torch.ones(B))
    # None of these may broadcast.
    for name, given in (
        ("rowscale", torch.ones(2 * B)),
        ("weight1", w[:1]),
        ("bias", randn(1, N)),
        ("out", randn(2, B, N)),
        ("residual_out", randn(1, N)),
    ):
        with pytest.raises(AssertionError, match=f"{name} has shape"):
            layer_norm_fn(x, w, **{"bias": None, name: given})
    with pytest.raises(AssertionError, match="bias1 was given without weight1"):
        layer_norm_fn(x, w, None, bias1=w)
    with pytest.raises(AssertionError, match="weight has shape"):
        rms_norm_fn(x, w.view(1, 1, N), None)
    with pytest.raises(AssertionError, match="out_dtype is torch.float16"):
        layer_norm_fn(x, w, None, out=x, out_dtype=torch.float16)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("linear_bias", [False, True])
def test_layer_norm_linear_fn(rms, prenorm, linear_bias):
    def ours(x, residual, weight, bias, matrix, offset):
        offset = offset if linear_bias else None
        return layer_norm_linear_fn(x, weight, bias, matrix, offset, residual, EPS, prenorm, is_rms_norm=rms)

    def reference(x, residual, weight, bias, matrix, offset):
        y = norm(x + residual, weight, bias, rms) @ matrix.T + (offset if linear_bias else 0)
        return (y, x + residual) if prenorm else y

    leaves = [randn(B, S, N), randn(B, S, N), randn(N), randn(N), randn(6, N)]
    if linear_bias:
        check(ours, reference, [*leaves, randn(6)], 1e-5)
    else:
        check(lambda *a: ours(*a, None), lambda *a: reference(*a, None), leaves, 1e-5)


def test_layer_norm_linear_fn_runs_in_autocast_dtype():
    x, w, matrix = randn(B, N), randn(N), randn(6, N)
    assert layer_norm_linear_fn(x.bfloat16(), w, w, matrix, None).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer_norm_linear_fn(x, w, w, matrix, None).dtype == torch.bfloat16


def test_rms_norm_modules():
    x, residual = randn(B, S, N), randn(B, S, N)
    module = RMSNorm(N, eps=EPS)
    torch.testing.assert_close(module(x).double(), norm(x, torch.ones(N), None, True), rtol=1e-5, atol=1e-5)
    module = PrenormRMSNorm(N, eps=EPS, dropout_p=0.5, zero_centered_weight=True)
    assert list(module.state_dict()) == ["weight"] and not module.weight.any() and module.bias is None
    assert not torch.equal(module(x), module(x))
    y, total = module.eval()(x, residual=residual, prenorm=True)
    torch.testing.assert_close(y.double(), norm(x + residual, torch.ones(N), None, True), rtol=1e-5, atol=1e-5)
    assert torch.equal(total, x + residual)
    assert RMSNorm(N, dtype=torch.float16).weight.dtype == torch.float16
