"""attn_bias, attn_mask, row bounds and sink: equivalences with what they generalise, degenerate rows, broadcasting,
determinism and refusals. The grids of cases.py compare them with the oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from small_calls import calls

from flash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.second_torch


def leaf(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def inputs(B=2, Sq=5, Sk=7, H=2, Hk=1, D=3):
    return leaf(B, Sq, H, D), leaf(B, Sk, Hk, D, seed=1), leaf(B, Sk, Hk, D, seed=2)


def with_grads(leaves, **kwargs):
    out, lse, _ = flash_attn_func(*leaves[:3], return_attn_probs=True, **kwargs)
    grads = torch.autograd.grad(out.square().sum() + lse.masked_fill(lse.isinf(), 0).sum(), leaves)
    return [out, lse, *grads]


def assert_same(a, b, **kwargs):
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, **kwargs)


def gradcheck(function, leaves):
    def call(*args):
        torch.manual_seed(2)  # one dropout mask for all evaluations
        return function(*args)

    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7, rtol=1e-5, nondet_tol=0.0)


BIAS_SHAPES = [tuple(n if kept else 1 for n, kept in zip((2, 2, 5), which)) + (7,)
               for which in itertools.product((True, False), repeat=3)]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"causal": True, "dropout_p": 0.3}, {"softcap": 0.9}], ids=str)
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_gradcheck_of_bias(shape, settings):
    gradcheck(lambda q, k, v, bias: flash_attn_func(q, k, v, attn_bias=bias, **settings), (*inputs(), leaf(*shape)))


@pytest.mark.parametrize("hidden", [False, True])
def test_gradcheck_of_sink_and_lse(hidden):
    """Every output with everything at once; rows that see no key have the sink."""
    bias, sink = leaf(1, 2, 5, 7, seed=5), leaf(2, seed=6)
    mask = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    tables = {"attn_mask": mask, "key_end": torch.tensor([[0, 3, 9, 2, 7]], dtype=torch.int32)} if hidden else {}

    def call(q, k, v, bias, sink):
        return flash_attn_func(
            q, k, v, causal=True, attn_bias=bias, learnable_sink=sink, return_attn_probs=True, **tables
        )[:2]

    gradcheck(call, (*inputs(), bias, sink))


def test_gradcheck_of_varlen():
    cu_q, cu_k = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 5, 6], dtype=torch.int32)
    begin = torch.tensor([0, 2, 1, 0, 0, 0, 1, 0], dtype=torch.int32)

    def call(q, k, v, bias, sink):
        return flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 5, 5, attn_bias=bias, learnable_sink=sink, key_begin=begin, return_attn_probs=True
        )[0]

    gradcheck(call, (leaf(8, 2, 3), leaf(6, 1, 3, seed=1), leaf(6, 1, 3, seed=2), leaf(2, 1, 5, 5), leaf(2)))


def test_gradient_through_the_lse_alone():
    """The loss need not use out at all."""
    gradcheck(lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1], inputs(Sq=4, Sk=4))


@pytest.mark.parametrize("name", ["prefix", "documents", "causal", "window"])
def test_row_bounds_spell_masks(name):
    """Bounds per row give what a mask of Sq x Sk gives, and what causal and window give."""
    S = 70
    leaves = inputs(Sq=S, Sk=S)
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    row = torch.arange(S, dtype=torch.int32)[None]
    mask, settings = {
        "prefix": ((j <= i) | (j < 20), {"key_end": (row + 1).clamp(min=20)}),
        "documents": ((j <= i) & (j // 16 == i // 16), {"key_begin": row // 16 * 16, "causal": True}),
        "causal": (j <= i, {"key_end": row + 1}),
        "window": ((i - 3 <= j) & (j <= i + 2), {"key_begin": row - 3, "key_end": row + 3}),
    }[name]
    expected = with_grads(leaves, attn_mask=mask[None])
    assert_same(with_grads(leaves, **settings), expected, rtol=1e-12, atol=1e-14)
    upstream = {"causal": {"causal": True}, "window": {"window_size": (3, 2)}}.get(name)
    if upstream:
        assert_same(with_grads(leaves, **upstream), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype,D", [(torch.float32, 32), (torch.bfloat16, 256)])
def test_row_bounds_come_in_any_order(dtype, D):
    """Rows see keys before those of the rows before them, also within the 192 queries that a block has on AVX2 and the
    512 of long rows in tiles."""
    S = 1024
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs(Sq=S, Sk=S, H=8, D=D)]
    row = torch.arange(S, dtype=torch.int32)[None]
    begin = (row // 256 % 2 == 0).int() * 600
    mask = torch.arange(S)[None, None] >= begin[..., None]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = flash_attn_func(*leaves, attn_mask=mask).detach()
    out = flash_attn_func(*leaves, key_begin=begin).detach()
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_mask_and_infinite_bias_agree():
    leaves = inputs(Sq=40, Sk=150)
    mask = torch.rand(2, 2, 40, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[0, 0, 3] = False
    expected = with_grads(leaves, attn_mask=mask)
    for low in (-math.inf, -1e31, torch.finfo(torch.float64).min):
        bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, low)
        assert_same(with_grads(leaves, attn_bias=bias), expected, rtol=1e-12, atol=1e-14)
    assert torch.isposinf(expected[1][0, 0, 3]) and (expected[0][0, 3, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("low", [-1e9, -65504.0, -math.inf])
def test_rows_whose_bias_is_very_low(dtype, low):
    """Padding by large negative numbers, whole rows of it included, gives finite results and gradients."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs(Sq=20, Sk=90, D=16)]
    bias = torch.zeros(2, 1, 20, 90)
    bias[:, :, :, 60:] = low
    bias[1, :, 5:] = low
    bias.requires_grad_()
    out = flash_attn_func(*leaves, attn_bias=bias)
    grads = torch.autograd.grad(out.float().square().sum(), [*leaves, bias])
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert all(x.abs().max() < 1e3 for x in grads)


@pytest.mark.parametrize("B, H, Sq, bias_rows", [(1, 32, 8192, 1), (4096, 2, 9, 9)], ids=["queries", "sequences"])
def test_a_bias_of_many_rows_has_an_exact_gradient(B, H, Sq, bias_rows):
    """Terms of one sign, up to 2^18 of them for each element: one sum of them all in fp32 errs by 1e-5 of itself."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(B, Sq, H, 8, generator=g), torch.randn(B, 20, 1, 8, generator=g)
    v = torch.zeros(B, 20, 1, 8)
    v[:, 0] = 1.0
    bias = torch.zeros(1, 1, bias_rows, 20, requires_grad=True)
    flash_attn_func(q, k, v, softmax_scale=0.1, attn_bias=bias).sum().backward()
    p = torch.softmax(0.1 * torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double()), -1)
    dp = 8.0 * (torch.arange(20) == 0)  # dout is 1
    expected = (p * (dp - 8.0 * p[..., :1])).sum((0, 1, 2) if bias_rows == 1 else (0, 1))
    torch.testing.assert_close(bias.grad[0, 0].double(), expected.expand(bias_rows, 20), rtol=1e-6, atol=0)


def test_sink():
    """It is a key of value zero; -inf is none; far above the scores it takes everything."""
    q, k, v = leaves = inputs(Hk=2)
    plain = with_grads(leaves)
    assert_same(with_grads(leaves, learnable_sink=torch.full((2,), -math.inf, dtype=torch.float64)), plain)
    out, lse = with_grads(leaves, learnable_sink=torch.full((2,), 80.0, dtype=torch.float64))[:2]
    assert out.abs().max() < 1e-20
    torch.testing.assert_close(lse, torch.full_like(lse, 80.0))
    sink = torch.tensor([0.3, -1.0], dtype=torch.float64)
    out, lse = with_grads(leaves, learnable_sink=sink)[:2]
    torch.testing.assert_close(lse, torch.logaddexp(plain[1], sink[None, :, None].expand_as(lse)))
    torch.testing.assert_close(out, plain[0] * torch.exp(plain[1] - lse).transpose(1, 2)[..., None])
    hidden = flash_attn_func(q, k, v, attn_mask=torch.zeros(2, 7).bool(), learnable_sink=sink, return_attn_probs=True)
    assert (hidden[0] == 0).all() and torch.equal(hidden[1], sink[None, :, None].expand_as(lse))


@pytest.mark.parametrize("name", calls())
def test_every_function_takes_them(name):
    """All six agree with flash_attn_func on the same mask, as a mask and as row bounds."""
    function, arguments, *_ = calls()[name]
    rows = arguments[0].shape[0] if "Varlen" in name else arguments[0].shape[1]
    end = torch.full((rows,) if "Varlen" in name else (1, rows), 2, dtype=torch.int32)
    batch, keys = (2, {"VarlenFunc": 7, "VarlenKVPackedFunc": 7}.get(name, 3) if "Varlen" in name else 9)
    keys = 5 if name == "QKVPackedFunc" else keys
    mask = (torch.arange(keys) < 2)[None].expand(batch, keys)
    sink = torch.tensor([0.1, 0.2, 0.3, 0.4])
    a = function(*arguments, key_end=end, learnable_sink=sink)
    b = function(*arguments, attn_mask=mask, learnable_sink=sink)
    c = function(*arguments, attn_bias=torch.zeros(1, 1, 1, keys).masked_fill(~mask[0], -math.inf), learnable_sink=sink)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, c)
    assert not torch.equal(a, function(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_threads(dtype):
    leaves = [leaf(*s, seed=n, dtype=dtype) for n, s in enumerate([(3, 130, 4, 32), (3, 600, 2, 32), (3, 600, 2, 32)])]
    bias, sink = leaf(1, 1, 130, 600, seed=4, dtype=dtype), leaf(4, seed=5, dtype=dtype)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            out = flash_attn_func(*leaves, attn_bias=bias, learnable_sink=sink, causal=True)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [*leaves, bias, sink])])
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_gradient_only_where_wanted():
    q, k, v = inputs()
    bias, sink = leaf(1, 1, 5, 7), leaf(2)
    both = torch.autograd.grad(flash_attn_func(q, k, v, attn_bias=bias, learnable_sink=sink).sum(), [q, bias, sink])
    for tables in ([bias], [sink], [bias, sink]):
        a, b = (x if any(x is t for t in tables) else x.detach() for x in (bias, sink))
        out = flash_attn_func(q.detach(), k.detach(), v.detach(), attn_bias=a, learnable_sink=b)
        expected = [g for g, x in zip(both[1:], (bias, sink)) if any(x is t for t in tables)]
        assert_same(torch.autograd.grad(out.sum(), tables), expected)


def test_strided_tables():
    """Expanded, transposed and sliced tables are read where they are; the last stride of a bias may be anything."""
    leaves = inputs()
    bias = torch.randn(7, 5, 2, 2, dtype=torch.float64).permute(3, 2, 1, 0)
    mask = (torch.rand(7, 5, 2) < 0.7).permute(2, 1, 0)
    end = torch.randint(0, 8, (5, 2), dtype=torch.int32).t()
    expected = with_grads(leaves, attn_bias=bias.contiguous(), attn_mask=mask.contiguous(), key_end=end.contiguous())
    assert_same(with_grads(leaves, attn_bias=bias, attn_mask=mask, key_end=end), expected)
    wide = bias[:1].expand(2, 2, 5, 7)
    assert_same(with_grads(leaves, attn_bias=wide), with_grads(leaves, attn_bias=bias[:1]))


BAD = {
    "bias rank": ({"attn_bias": torch.zeros(5, 7)}, r"attn_bias .*\(B\|1, H\|1, Sq\|1, Sk\).*\(5, 7\)"),
    "bias keys": ({"attn_bias": torch.zeros(1, 1, 5, 1)}, r"attn_bias .*\(1, 1, 5, 1\)"),
    "bias heads": ({"attn_bias": torch.zeros(1, 3, 5, 7)}, r"attn_bias .*\(1, 3, 5, 7\)"),
    "bias dtype": ({"attn_bias": torch.zeros(1, 1, 5, 7).half()}, r"attn_bias .*float32.*float16"),
    "bias is a mask": ({"attn_bias": torch.zeros(1, 1, 5, 7).bool()}, r"attn_bias .*float32.*bool"),
    "mask dtype": ({"attn_mask": torch.zeros(2, 7)}, r"attn_mask .*bool.*float32.*attn_bias"),
    "mask rank": ({"attn_mask": torch.ones(7).bool()}, r"attn_mask .*\(B, Sk\).*\(7\)"),
    "mask keys": ({"attn_mask": torch.ones(2, 6).bool()}, r"attn_mask .*Sk = 7.*\(2, 6\)"),
    "mask rows": ({"attn_mask": torch.ones(2, 4, 7).bool()}, r"attn_mask .*Sq = 5.*\(2, 4, 7\)"),
    "begin dtype": ({"key_begin": torch.zeros(2, 5).long()}, r"key_begin .*int32.*int64"),
    "begin shape": ({"key_begin": torch.zeros(2, 7).int()}, r"key_begin .*\(B\|1, Sq\).*\(2, 7\)"),
    "end shape": ({"key_end": torch.zeros(5).int()}, r"key_end .*\(B\|1, Sq\).*\(5\)"),
    "sink shape": ({"learnable_sink": torch.zeros(3)}, r"learnable_sink .*\(H,\).*\(3\)"),
    "sink dtype": ({"learnable_sink": torch.zeros(2).half()}, r"learnable_sink .*float32.*float16"),
    "device": ({"attn_bias": torch.zeros(1, 1, 5, 7, device="meta")}, r"attn_bias.*meta|one device"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tables(name):
    kwargs, says = BAD[name]
    q, k, v = (x.detach().float() for x in inputs())
    with pytest.raises(RuntimeError, match=says):
        flash_attn_func(q, k, v, **kwargs)
