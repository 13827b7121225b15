"""The older family of norms, dropout_add_..., one function for each norm, against the definition in fp64."""

import inspect

import pytest
import torch
from norm_definition import DTYPES, EPS, TOLERANCE, B, N, S, check, norm, randn, weight_dtype

from flash_attn.ops import layer_norm as layer_norm_module
from flash_attn.ops import rms_norm as rms_norm_module
from flash_attn.ops.layer_norm import DropoutAddLayerNorm, layer_norm
from flash_attn.ops.rms_norm import DropoutAddRMSNorm, rms_norm

pytestmark = pytest.mark.second_torch
FAMILIES = pytest.mark.parametrize("rms", [False, True])


@pytest.fixture(autouse=True)
def seed(rng):
    pass


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
    kept = torch.tensor([[1, 0, 2], [0, 3, 0]], dtype=torch.int32)
    y = function(randn(2, 3, N), None, weight, None, 0.0, EPS, out_subset=kept, out_numrows=3)
    assert y.shape == (1, 3, N)


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
    *_, mask0, ones = function(x0, None, None, w, None, w, None, 0.5, EPS, return_dropout_mask=True)
    assert ones.all() and ones.shape == mask0.shape and ones.dtype == mask0.dtype == torch.uint8


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


def test_shapes_of_the_older_family_that_do_not_fit():
    x, w = randn(2, B, N), randn(N)
    functions = layer_norm_module.dropout_add_layer_norm, layer_norm_module.dropout_add_layer_norm_subset
    parallel = layer_norm_module.dropout_add_layer_norm_parallel_residual
    for function in functions:
        assert function(x, x.view(-1, N), w, w, 0.0, EPS, prenorm=True)[1].shape == x.shape
        for words, given in (("residual", dict(residual=x[:1])), ("layerscale", dict(layerscale=randn(1, N)))):
            with pytest.raises(AssertionError, match=f"{words} has shape"):
                function(x, **{"residual": None, **given}, weight=w, bias=w, dropout_p=0.0, epsilon=EPS)
    with pytest.raises(AssertionError, match="rowscale has shape"):
        functions[0](x, None, w, w, 0.0, EPS, rowscale=torch.ones(2))
    with pytest.raises(AssertionError, match="bias1 was given without weight1"):
        parallel(x, x, None, w, w, None, w, 0.0, EPS)
    for x1, residual, words in ((w, None, "x1"), (None, x[:1], "residual")):
        with pytest.raises(AssertionError, match=f"{words} has shape"):
            parallel(x, x1, residual, w, w, None, None, 0.0, EPS)


def test_rms_functions_take_the_arguments_of_layer_functions():
    for name in ("dropout_add_{}_norm", "dropout_add_{}_norm_subset", "dropout_add_{}_norm_parallel_residual"):
        assert inspect.signature(family(name, True)) == inspect.signature(family(name, False))
