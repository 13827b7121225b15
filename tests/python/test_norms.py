"""Norms of sums, under all of upstream's names, against their definition in double precision, gradients included."""

import inspect

import pytest
import torch
from harness import TORCH_DTYPES

from flash_attn.ops import layer_norm as layer_norm_module
from flash_attn.ops import rms_norm as rms_norm_module
from flash_attn.ops.layer_norm import DropoutAddLayerNorm, layer_norm
from flash_attn.ops.rms_norm import DropoutAddRMSNorm, RMSNorm, rms_norm
from flash_attn.ops.triton.layer_norm import RMSNorm as PrenormRMSNorm
from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_linear_fn, rms_norm_fn

pytestmark = pytest.mark.second_torch
EPS = 1e-5
B, S, N = 3, 4, 10
TOLERANCE = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2, "fp64": 1e-11}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def randn(*shape, dtype="fp32"):
    return torch.randn(shape).to(TORCH_DTYPES[dtype])


def weight_dtype(dtype):
    """As in training: weights stay fp32 where x is narrower."""
    return "fp64" if dtype == "fp64" else "fp32"


def norm(x, weight, bias, rms):
    """The definition, in fp64."""
    x = x.double()
    centred = x if rms else x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return y if bias is None else y + bias.double()


def check(function, reference, leaves, tolerance):
    """Results and gradients of all leaves, for one random direction per result."""
    ours = [x.detach().clone().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    got, wanted = function(*ours), reference(*exact)
    got, wanted = (list(r) if isinstance(r, (tuple, list)) else [r] for r in (got, wanted))
    assert len(got) == len(wanted)
    directions = [torch.randn_like(r) for r in got]
    grads = torch.autograd.grad(got, ours, directions)
    wanted_grads = torch.autograd.grad(wanted, exact, [d.double() for d in directions])
    for a, b in zip([*got, *grads], [*wanted, *wanted_grads]):
        error = (a.double() - b).abs().max()
        assert a.shape == b.shape and error <= tolerance * (1 + b.abs().max()), error
    return got


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


@pytest.mark.parametrize("rms", [False, True])
def test_rowscale_and_no_bias(rms):
    rowscale = torch.rand(B, S)
    function = rms_norm_fn if rms else layer_norm_fn
    check(
        lambda x, weight: function(x, weight, None, rowscale=rowscale, eps=EPS),
        lambda x, weight: norm(x * rowscale[..., None].double(), weight, None, rms),
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


# The older family, one for each norm

FAMILIES = pytest.mark.parametrize("rms", [False, True])


def family(name, rms):
    module = rms_norm_module if rms else layer_norm_module
    return getattr(module, name.format("rms" if rms else "layer"))


@FAMILIES
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_norms(rms, dtype):
    x, weight, bias = randn(B, S, N, dtype=dtype), *(randn(N, dtype=weight_dtype(dtype)) for _ in range(2))
    if rms:
        got = check(
            lambda x, w: rms_norm(x, w, EPS), lambda x, w: norm(x, w, None, True), [x, weight], TOLERANCE[dtype]
        )
    else:
        got = check(
            lambda x, w, b: layer_norm(x, w, b, EPS),
            lambda x, w, b: norm(x, w, b, False),
            [x, weight, bias],
            TOLERANCE[dtype],
        )
    assert got[0].dtype == x.dtype


@FAMILIES
@pytest.mark.parametrize("prenorm", [False, True])
def test_dropout_add_norm(rms, prenorm):
    function = family("dropout_add_{}_norm", rms)
    rowscale = torch.rand(B, S)

    def ours(x0, residual, weight, bias, layerscale):
        return function(x0, residual, weight, bias, 0.0, EPS, rowscale, layerscale, prenorm)

    def reference(x0, residual, weight, bias, layerscale):
        total = x0 * rowscale[..., None].double() * layerscale + residual
        y = norm(total, weight, bias, rms)
        return (y, total) if prenorm else y

    check(ours, reference, [randn(B, S, N), randn(B, S, N), randn(N), randn(N), randn(N)], 1e-5)


@FAMILIES
def test_dropout_add_norm_masks_and_dtypes(rms):
    function = family("dropout_add_{}_norm", rms)
    x0, weight = randn(100, N, dtype="bf16"), randn(N)
    y, total, mask = function(
        x0, None, weight, None, 0.25, EPS, prenorm=True, residual_in_fp32=True, return_dropout_mask=True
    )
    assert (y.dtype, total.dtype, mask.dtype) == (torch.bfloat16, torch.float32, torch.uint8)
    torch.testing.assert_close(total, x0.float() * mask / 0.75)
    y, mask = function(x0, None, weight, None, 0.0, EPS, return_dropout_mask=True)
    assert mask.shape == x0.shape and mask.all()


@FAMILIES
@pytest.mark.parametrize("with_residual", [False, True])
def test_subset(rms, with_residual):
    """Rows of the sum without x0, and rows that make no result; both numbered from 1, in any order."""
    function = family("dropout_add_{}_norm_subset", rms)
    x0_subset = torch.tensor([[2, 0, 1], [0, 3, 0]], dtype=torch.int32)
    out_subset = torch.tensor([[1, 2, 0], [0, 0, 3]], dtype=torch.int32)

    def ours(x0, residual, weight, bias, layerscale):
        return function(
            x0,
            residual if with_residual else None,
            weight,
            bias,
            0.0,
            EPS,
            layerscale,
            x0_subset,
            out_subset,
            rowscale_const=1.25,
            out_numrows=3,
            prenorm=True,
        ) + (0 * residual.sum(),)

    def reference(x0, residual, weight, bias, layerscale):
        total = [residual[r // 3, r % 3] * with_residual for r in range(6)]
        for r, source in ((0, 1), (2, 0), (4, 2)):
            total[r] = total[r] + x0[source] * 1.25 * layerscale
        total = torch.stack(total)
        return norm(total[[0, 1, 5]], weight, bias, rms), total.view(2, 3, N), 0 * residual.sum()

    check(ours, reference, [randn(3, N), randn(2, 3, N), randn(N), randn(N), randn(N)], 1e-5)


@FAMILIES
def test_subset_masks(rms):
    function = family("dropout_add_{}_norm_subset", rms)
    x0, weight = randn(3, N), randn(N)
    subset = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    _, total, mask = function(x0, None, weight, None, 0.5, EPS, None, subset, prenorm=True, return_dropout_mask=True)
    assert mask.shape == x0.shape and mask.dtype == torch.uint8
    torch.testing.assert_close(total[[2, 3, 0]], x0 * mask * 2)
    assert not total[1].any()
    y, whole = function(x0, None, weight, None, 0.0, EPS, prenorm=True)
    assert torch.equal(whole, x0) and y.shape == x0.shape


@FAMILIES
@pytest.mark.parametrize("with_x1, with_weight1", [(True, True), (False, True), (True, False)])
def test_parallel_residual(rms, with_x1, with_weight1):
    function = family("dropout_add_{}_norm_parallel_residual", rms)

    def ours(x0, x1, residual, w0, b0, w1, b1):
        rest = [x1, w1, b1]
        if not with_weight1:
            w1 = b1 = None
        y0, y1, total = function(x0, x1 if with_x1 else None, residual, w0, b0, w1, b1, 0.0, EPS, prenorm=True)
        assert (y1 is None) == (not with_weight1)
        return [y for y in (y0, y1, total) if y is not None] + [sum(0 * t.sum() for t in rest)]

    def reference(x0, x1, residual, w0, b0, w1, b1):
        total = x0 + residual + (x1 if with_x1 else 0)
        second = [norm(total, w1, b1, rms)] if with_weight1 else []
        return [norm(total, w0, b0, rms), *second, total, sum(0 * t.sum() for t in (x1, w1, b1))]

    check(ours, reference, [*(randn(B, S, N) for _ in range(3)), *(randn(N) for _ in range(4))], 1e-5)


@FAMILIES
def test_parallel_residual_masks(rms):
    function = family("dropout_add_{}_norm_parallel_residual", rms)
    x0, x1, w = randn(50, N), randn(50, N), randn(N)
    y0, y1, total, mask0, mask1 = function(
        x0, x1, None, w, None, w, None, 0.5, EPS, prenorm=True, return_dropout_mask=True
    )
    torch.testing.assert_close(total, 2 * (x0 * mask0 + x1 * mask1))
    assert torch.equal(y0, y1)
    *_, mask0, none = function(x0, None, None, w, None, w, None, 0.5, EPS, return_dropout_mask=True)
    assert none is None and mask0.dtype == torch.uint8


@pytest.mark.parametrize("cls, rms", [(DropoutAddLayerNorm, False), (DropoutAddRMSNorm, True)])
def test_modules_of_the_older_family(cls, rms):
    module = cls(N, prenorm=True, p=0.5, eps=EPS, residual_in_fp32=True)
    assert list(module.state_dict()) == (["weight"] if rms else ["weight", "bias"])
    x0, residual = randn(B, N), randn(B, N)
    first, second = (module(x0, residual)[0] for _ in range(2))
    assert not torch.equal(first, second)
    y, total = module.eval()(x0, residual)
    torch.testing.assert_close(total, x0 + residual)
    torch.testing.assert_close(y.double(), norm(total, torch.ones(N), None, rms), rtol=1e-5, atol=1e-5)
    assert isinstance(cls(N)(x0), torch.Tensor)
    assert cls(N, prenorm=True, residual_in_fp32=True)(x0.half())[1].dtype == torch.float32


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


def test_rms_functions_take_the_arguments_of_layer_functions():
    for name in ("dropout_add_{}_norm", "dropout_add_{}_norm_subset", "dropout_add_{}_norm_parallel_residual"):
        assert inspect.signature(family(name, True)) == inspect.signature(family(name, False))
