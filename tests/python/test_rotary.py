"""Rotary embedding against multiplication of complex numbers in double precision, gradients included."""

import pytest
import torch
from harness import TORCH_DTYPES
from rotation import assert_near, expected, tables

import flash_attn.layers.rotary as rotary
from flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flash_attn.ops.triton.rotary import apply_rotary

compiled = pytest.mark.requires_torch(2, 4, "torch.compile and torch.library.opcheck as used here came with torch 2.4")
B, S, H, D = 3, 21, 2, 32


@pytest.fixture(autouse=True)
def seed(rng):
    pass


OFFSETS = ["none", "int", "int32", "int64", "past the table"]
everywhere = pytest.mark.second_torch


def make_offsets(kind, batch=B):
    """(argument, tensor of one offset per sequence); tables have S + 10 rows."""
    if kind in ("none", "int"):
        value = 0 if kind == "none" else 7
        return value, torch.full((batch,), value)
    values = torch.arange(batch) * (6 if kind == "past the table" else 3)
    return values.to(torch.int32 if kind == "int32" else torch.int64), values


def both(x, function, reference):
    """(result, its gradient, expected result, its gradient) of one random direction."""
    leaf, exact = x.detach().clone().requires_grad_(), x.detach().double().requires_grad_()
    out, wanted = function(leaf), reference(exact)
    g = torch.randn_like(out)
    kept = g.clone()
    (grad,) = torch.autograd.grad(out, leaf, g)
    assert torch.equal(g, kept), "the incoming gradient was written to"
    (wanted_grad,) = torch.autograd.grad(wanted, exact, g.double())
    return leaf, out, grad, wanted, wanted_grad


@pytest.mark.parametrize("shape", [(0, 3, 2, 16), (2, 0, 2, 16), (2, 3, 0, 16)])
def test_nothing_to_rotate(shape):
    """All empty tensors are at one address, whatever their strides."""
    x = torch.zeros(shape, requires_grad=True)
    cos, sin = torch.ones(5, 4), torch.zeros(5, 4)
    out = apply_rotary_emb(x.transpose(0, 1).contiguous().transpose(0, 1), cos, sin)
    out.sum().backward()  # an expanded gradient
    assert out.shape == x.grad.shape == shape


@everywhere
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, D])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_apply_rotary_emb(dtype, inplace, interleaved, rotary_dim, offsets):
    dtype = TORCH_DTYPES[dtype]
    x = torch.randn(B, S, H, D).to(dtype)
    cos, sin = tables(S + 10, rotary_dim, dtype)
    argument, each = make_offsets(offsets)
    positions = torch.arange(S) + each[:, None]
    leaf, out, grad, wanted, wanted_grad = both(
        x,
        lambda x: apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets=argument),
        lambda x: expected(x, cos, sin, positions, interleaved),
    )
    assert_near(out.detach(), wanted.detach())
    assert_near(grad, wanted_grad)
    assert (out.data_ptr() == leaf.data_ptr()) is inplace
    assert torch.equal(leaf, out if inplace else x)


@everywhere
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("lengths", [(S, 4, 11), (0, S, 0, 5, 0)])
def test_packed(dtype, inplace, interleaved, offsets, lengths):
    """Packed sequences, empty ones among them, with two rows behind the last."""
    cos, sin = tables(S + 10, 16, TORCH_DTYPES[dtype])
    argument, each = make_offsets(offsets, len(lengths))
    positions = torch.cat([torch.arange(n) + first for n, first in zip(lengths, each)] + [torch.tensor([-1, -1])])
    x = torch.randn(len(positions), H, D).to(cos.dtype)
    cu_seqlens = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], dtype=torch.int32)
    leaf, out, grad, wanted, wanted_grad = both(
        x,
        lambda x: apply_rotary_emb(x, cos, sin, interleaved, inplace, argument, cu_seqlens, S),
        lambda x: expected(x, cos, sin, positions, interleaved),
    )
    assert_near(out.detach(), wanted.detach())
    assert_near(grad, wanted_grad)
    assert torch.equal(leaf, out if inplace else x)


def expected_qkv(parts, own_tables, positions, interleaved):
    return [expected(x, *t, positions, interleaved) if t is not None else x.double() for x, t in zip(parts, own_tables)]


@everywhere
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("offsets", ["none", "int", "int64"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["five dims", "grouped", "heads first"])
@pytest.mark.parametrize("tables_of_keys", [False, True])
def test_qkv(dtype, offsets, interleaved, layout, tables_of_keys):
    dtype = TORCH_DTYPES[dtype]
    heads = (4, 2, 2) if layout == "grouped" else (H, H, H)
    packed = torch.randn(B, S, sum(heads), D).to(dtype)
    num_heads_q = 4 if layout == "grouped" else None
    if layout != "grouped":
        packed = packed.unflatten(2, (3, H))
    cos, sin = tables(S + 10, 16, dtype)
    of_keys = tables(S + 10, 16, dtype) if tables_of_keys else (None, None)
    argument, each = make_offsets(offsets)
    positions = torch.arange(S) + each[:, None]

    def call(x):
        x = x.transpose(1, 3).contiguous().transpose(1, 3) if layout == "heads first" else x
        before, address = x.detach().clone(), x.data_ptr()
        out = apply_rotary_emb_qkv_(x, cos, sin, *of_keys, interleaved, argument, num_heads_q)
        assert out.data_ptr() == address and not torch.equal(x, before) and out.stride() == x.stride()
        return out

    def reference(x):
        own = ((cos, sin), of_keys if tables_of_keys else (cos, sin), None)
        parts = x.split(heads, dim=2) if layout == "grouped" else x.unbind(2)
        done = expected_qkv(parts, own, positions, interleaved)
        return torch.cat(done, dim=2) if layout == "grouped" else torch.stack(done, dim=2)

    _, out, grad, wanted, wanted_grad = both(packed, call, reference)
    assert_near(out.detach(), wanted.detach())
    assert_near(grad, wanted_grad)


@everywhere
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("offsets", ["none", "int", "int32"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kv(dtype, offsets, interleaved):
    kv = torch.randn(B, S, 2, H, D).to(TORCH_DTYPES[dtype])
    cos, sin = tables(S + 10, D, kv.dtype)
    argument, each = make_offsets(offsets)
    positions = torch.arange(S) + each[:, None]
    leaf, out, grad, wanted, wanted_grad = both(
        kv,
        lambda kv: apply_rotary_emb_kv_(kv, cos, sin, interleaved, argument),
        lambda kv: torch.stack(expected_qkv(kv.unbind(2), ((cos, sin), None), positions, interleaved), dim=2),
    )
    assert out.data_ptr() == leaf.data_ptr() and torch.equal(leaf, out)
    assert_near(out.detach(), wanted.detach())
    assert_near(grad, wanted_grad)


@everywhere
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_low_level_function(interleaved):
    """conjugate undoes the rotation; a strided x is rotated where it lies and its neighbours stay."""
    cos, sin = tables(S + 4, 16, torch.float64)
    whole = torch.randn(B, S, H + 2, D + 8, dtype=torch.float64)
    before = whole.clone()
    x = whole[:, :, 1:-1, 4:-4]
    turned = apply_rotary(x, cos, sin, 4, interleaved=interleaved)
    assert torch.equal(whole, before)
    assert apply_rotary(x, cos, sin, 4, interleaved=interleaved, inplace=True) is x
    assert torch.equal(x, turned)
    positions = torch.arange(S)[None] + 4
    torch.testing.assert_close(turned, expected(before[:, :, 1:-1, 4:-4], cos, sin, positions, interleaved))
    apply_rotary(x, cos, sin, 4, interleaved=interleaved, inplace=True, conjugate=True)
    torch.testing.assert_close(whole, before)
    assert torch.equal(whole[:, :, [0, -1]], before[:, :, [0, -1]])


@everywhere
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_reference_function(interleaved, per_sequence):
    x = torch.randn(B, S, H, D, dtype=torch.float64)
    cos, sin = tables(S * B, 16, torch.float64)
    positions = torch.arange(S * B).view(B, S) if per_sequence else torch.arange(S)[None]
    cos_rows, sin_rows = (t[positions] if per_sequence else t[:S] for t in (cos, sin))
    got = apply_rotary_emb_torch(x, cos_rows, sin_rows, interleaved)
    torch.testing.assert_close(got, expected(x, cos, sin, positions, interleaved))


@everywhere
def test_gradients_to_second_order():
    x = torch.randn(2, 4, 1, 6, dtype=torch.float64, requires_grad=True)
    qkv = torch.randn(1, 3, 3, 1, 4, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(8, 4, torch.float64)
    offsets = torch.tensor([1, 3])
    for function, leaf in [
        (lambda x: apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets) ** 2, x),
        (lambda x: apply_rotary_emb_qkv_(x * 1, cos, sin) ** 2, qkv),
        (lambda x: apply_rotary_emb_kv_(x[:, :, :2] * 1, cos, sin) ** 2, qkv),
    ]:
        assert torch.autograd.gradcheck(function, leaf)
        assert torch.autograd.gradgradcheck(function, leaf)


def rotated_parts(qkv, cos, sin, how):
    """Queries and keys rotated in place as views of one tensor: siblings from split or unbind stay usable."""
    qkv = qkv * 1.5
    if how == "unbind":
        q, k, v = qkv.unbind(2)
        q, k = (apply_rotary_emb(x, cos, sin, inplace=True) for x in (q, k))
        return torch.stack((q, k, v), dim=2)
    q, kv = qkv.flatten(2).split([H * D, 2 * H * D], dim=-1)
    q = apply_rotary_emb(q.unflatten(-1, (H, D)), cos, sin, inplace=True)
    kv = apply_rotary_emb_kv_(kv.unflatten(-1, (2, H, D)), cos, sin)
    return torch.cat((q.unsqueeze(2), kv), dim=2)


@everywhere
@pytest.mark.parametrize("how", ["unbind", "split"])
def test_views_of_one_tensor_in_place(how):
    cos, sin = tables(S, D)
    parts = torch.randn(B, S, 3, H, D)
    _, out, grad, wanted, wanted_grad = both(
        parts,
        lambda x: rotated_parts(x, cos, sin, how),
        lambda x: torch.stack(
            expected_qkv((x * 1.5).unbind(2), ((cos, sin), (cos, sin), None), torch.arange(S)[None], False), dim=2
        ),
    )
    assert_near(out.detach(), wanted.detach())
    assert_near(grad, wanted_grad)


@everywhere
def test_rotating_a_saved_tensor_in_place_is_noticed():
    saved = torch.randn(B, S, H, D, requires_grad=True).exp()
    rotated = apply_rotary_emb(saved, *tables(S, D), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotated.sum().backward()


@everywhere
def test_tables_get_no_gradient():
    cos, sin = (t.requires_grad_() for t in tables(S, D))
    out = apply_rotary_emb(torch.randn(B, S, H, D, requires_grad=True), cos, sin)
    out.sum().backward()
    assert cos.grad is None and sin.grad is None


BAD = [
    ("x has shape", dict(x=(B, S, D))),
    ("x has shape", dict(cu_seqlens=torch.tensor([0, 3], dtype=torch.int32), max_seqlen=3)),
    ("without max_seqlen", dict(x=(5, H, D), cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))),
    ("cu_seqlens is torch.float32", dict(x=(5, H, D), cu_seqlens=torch.tensor([0.0, 5.0]), max_seqlen=5)),
    ("cos has shape", dict(cos=(S, 8), sin=(S, 7))),
    ("head dim", dict(cos=(S, D), sin=(S, D))),
    ("cos has 20 rows", dict(cos=(S - 1, 8), sin=(S - 1, 8))),
    ("seqlen_offsets is 1,", dict(seqlen_offsets=1)),
    ("seqlen_offsets is -1,", dict(seqlen_offsets=-1)),
    ("seqlen_offsets has shape", dict(seqlen_offsets=torch.zeros(B + 1, dtype=torch.int32))),
    ("seqlen_offsets is torch.float32", dict(seqlen_offsets=torch.zeros(B))),
    ("x is torch.int64", dict(x=torch.zeros(B, S, H, D, dtype=torch.int64))),
]


@everywhere
@pytest.mark.parametrize("words, changes", BAD, ids=[words for words, _ in BAD])
def test_bad_arguments(words, changes):
    arguments = {"x": (B, S, H, D), "cos": (S, 8), "sin": (S, 8), **changes}
    arguments = {n: torch.zeros(a) if isinstance(a, tuple) else a for n, a in arguments.items()}
    for function in (apply_rotary, apply_rotary_emb):
        with pytest.raises(AssertionError, match=words):
            function(**arguments)


@everywhere
def test_bad_packed_tensors():
    cos, sin = tables(S, 16)
    for qkv, heads, words in [
        (torch.zeros(B, S, 2, H, D), None, "five dims"),
        (torch.zeros(B, S, D), None, "it must be"),
        (torch.zeros(B, S, 8, D), None, "pass num_heads_q"),
        (torch.zeros(B, S, 8, D), 3, "num_heads_q is 3"),
        (torch.zeros(B, S, 8, D), 10, "num_heads_q is 10"),
    ]:
        with pytest.raises(AssertionError, match=words):
            apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=heads)
    with pytest.raises(AssertionError, match="kv has shape"):
        apply_rotary_emb_kv_(torch.zeros(B, S, 3, H, D), cos, sin)


@everywhere
def test_aliases():
    assert rotary.apply_rotary_emb_func is rotary.apply_rotary_emb
    x = torch.arange(4.0)
    assert rotary.rotate_half(x).tolist() == [-2, -3, 0, 1]
    assert rotary.rotate_half(x, interleaved=True).tolist() == [-1, 0, -3, 2]


of_views = pytest.mark.requires_torch(2, 12, "its compiler refuses writes to one view while others are used")


@compiled
@pytest.mark.parametrize(
    "call, backend",
    [(c, "aot_eager") for c in ("emb", "in place", "packed", "qkv", "kv", "module")]
    + [pytest.param(c, "aot_eager", marks=of_views) for c in ("unbind", "split")]
    # Inductor decides anew which writes to make in place.
    + [("qkv", "inductor"), pytest.param("unbind", "inductor", marks=of_views)],
)
def test_compiled(call, backend):
    """One graph, forward and backward, for every length."""
    torch._dynamo.reset()
    cos, sin = tables(64, 16)
    module = RotaryEmbedding(16, scale_base=32.0)
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)

    def function(qkv):
        qkv = qkv * 1.5
        if call in ("unbind", "split"):
            return rotated_parts(qkv, cos, sin, call)
        if call == "emb":
            return apply_rotary_emb(qkv[:, :, 0], cos, sin, seqlen_offsets=3)
        if call == "in place":
            return apply_rotary_emb(qkv[:, :, 0], cos, sin, inplace=True, seqlen_offsets=torch.tensor([3, 1]))
        if call == "packed":
            return apply_rotary_emb(qkv[0, :, 0], cos, sin, cu_seqlens=cu_seqlens, max_seqlen=9)
        if call == "qkv":
            return apply_rotary_emb_qkv_(qkv, cos, sin, interleaved=True)
        if call == "kv":
            return apply_rotary_emb_kv_(qkv[:, :, 1:], cos, sin)
        return module(qkv, max_seqlen=64)

    fast = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for length in (9, 17, 30):
        leaf = torch.randn(2, length, 3, 2, 32, requires_grad=True)
        out, wanted = fast(leaf), function(leaf)
        g = torch.randn_like(wanted)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(o, leaf, g)[0] for o in (out, wanted)))
