"""What users of FlashAttention on AMD's cards have asked for (docs/asks.md): the essential case of each, by number.

Here what calls compute; test_user_asks_package.py has installation, build and the simulated GPUs.
"""

from __future__ import annotations

import math

import harness
import philox
import pytest
import torch
from cases import Case
from plain_attention import attend, band

import flash_attn
import flash_attn_interface as fa3
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_interface as interface

second_torch = pytest.mark.second_torch
compiled = pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")


def qkv(Sq=6, Sk=6, H=2, Hk=2, D=16, Dv=None, dtype=torch.float32, grad=True):
    g = torch.Generator().manual_seed(Sq + Sk)
    shapes = ((2, Sq, H, D), (2, Sk, Hk, D), (2, Sk, Hk, Dv or D))
    return [torch.randn(s, generator=g).to(dtype).requires_grad_(grad) for s in shapes]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_agrees(call, reference, leaves, tolerance=1e-5):
    """Results and gradients of call(*leaves) are those of reference(*leaves in fp64)."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, wanted = call(*leaves), reference(*exact)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    for got, want in zip((out, *grads), (wanted, *torch.autograd.grad(wanted, exact, dout.double()))):
        assert torch.isfinite(got).all() and (got.double() - want).abs().max() <= tolerance * (1 + want.abs().max())


@second_torch
def test_ask_04_mask_and_bias_with_gradient():
    """A bias broadcast over batch and rows, a boolean mask, and prefix-LM as bounds."""
    leaves = [*qkv(), torch.randn(1, 2, 1, 6).requires_grad_()]
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]]).bool()
    assert_agrees(
        lambda q, k, v, bias: flash_attn_func(q, k, v, attn_bias=bias, attn_mask=mask),
        lambda q, k, v, bias: attend(q, k, v, mask[:, None, None], bias=bias),
        leaves,
    )
    wide = leaves[3].detach().expand(2, 2, 6, 6)
    assert wide.stride(0) == wide.stride(2) == 0
    narrow = flash_attn_func(*leaves[:3], attn_bias=leaves[3])
    assert torch.allclose(flash_attn_func(*leaves[:3], attn_bias=wide), narrow, atol=1e-6)
    end = torch.arange(1, 7).clamp(min=4).int()[None]
    prefix = torch.arange(6) < end[0, :, None]
    assert_agrees(lambda *x: flash_attn_func(*x, key_end=end), lambda *x: attend(*x, prefix), leaves[:3])


@second_torch
def test_ask_05_degenerate_rows_are_zero():
    """Empty sequences on either side, rows past the last one, rows that a mask hides everything from."""
    q, k, v = (torch.randn(12, 2, 16).requires_grad_() for _ in range(3))
    cu_q, cu_k = int32(0, 0, 4, 8), int32(0, 5, 5, 9)  # no queries; no keys; both; four rows of nobody
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    empty = [*range(0, 4), *range(8, 12)]
    assert out[empty].eq(0).all() and lse[:, empty].eq(math.inf).all() and dq[empty].eq(0).all()
    assert all(g[:5].eq(0).all() and g[9:].eq(0).all() and g[5:9].ne(0).any() for g in (dk, dv))
    leaves = qkv()
    out = flash_attn_func(*leaves, attn_mask=torch.zeros(2, 6).bool())
    assert all(x.eq(0).all() for x in (out, *torch.autograd.grad(out.sum(), leaves)))


@second_torch
def test_ask_10_sinks_forward_and_backward():
    def reference(q, k, v, sink):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
        scores = torch.cat((scores, sink[None, :, None, None].expand(2, 2, 6, 1)), -1)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v)

    leaves = [*qkv(), torch.randn(2).requires_grad_()]
    assert_agrees(lambda q, k, v, sink: flash_attn_func(q, k, v, learnable_sink=sink), reference, leaves)

    def packed(q, k, v, sink):
        cu = int32(0, 6, 12)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn_varlen_func(*rows, cu, cu, 6, 6, learnable_sink=sink).unflatten(0, (2, 6))

    assert_agrees(packed, reference, leaves)


@second_torch
def test_ask_11_fp32_and_mixed_dtypes():
    assert_agrees(flash_attn_func, attend, qkv(), tolerance=1e-6)
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match=r"k must have dtype float32 \(that of q\), got bfloat16"):
        flash_attn_func(q, k.bfloat16(), v.bfloat16())


@second_torch
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
def test_ask_12_everything_on_the_cpu(dtype):
    """Every function forward, and backward where there is one."""
    q, k, v = qkv(dtype=harness.TORCH_DTYPES[dtype])
    cu, lengths = int32(0, 6, 12), (int32(0, 6, 12), int32(0, 6, 12), 6, 6)
    stacked, stacked_kv = torch.stack((q, k, v), 2), torch.stack((k, v), 2)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    expected = flash_attn_func(q, k, v, causal=True)
    results = [
        expected,
        flash_attn.flash_attn_kvpacked_func(q, stacked_kv, causal=True),
        flash_attn.flash_attn_qkvpacked_func(stacked, causal=True),
        flash_attn_varlen_func(*rows, *lengths, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(rows[0], stacked_kv.flatten(0, 1), *lengths, causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(stacked.flatten(0, 1), cu, 6, causal=True),
    ]
    gradients = [torch.autograd.grad(out.float().square().sum(), (q, k, v), retain_graph=True) for out in results]
    assert all(torch.equal(out.reshape(expected.shape), expected) for out in results)
    assert all(torch.equal(a, b) for grads in gradients for a, b in zip(grads, gradients[0]))
    cached = flash_attn_with_kvcache(*(x.detach() for x in (q, k, v)), causal=True)
    assert torch.equal(cached, expected.detach())


@compiled
def test_ask_14_compile_without_graph_breaks():
    def packed(q, k, v, cu, longest):
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

    rows = [x.detach().flatten(0, 1) for x in qkv()]
    torch._dynamo.reset()
    fast = torch.compile(packed, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths, longest in ((int32(0, 6, 12), 6), (int32(0, 3, 12), 9), (int32(0, 12), torch.tensor(12))):
        assert torch.equal(fast(*rows, lengths, longest), packed(*rows, lengths, longest))
    call = (*rows, int32(0, 6, 12), int32(0, 6, 12), 6, 6, 0.0, 0.25, True, -1, -1, 0.0, None, False, False)
    torch.library.opcheck(torch.ops.flash_attn.attention.default, call)


@second_torch
@pytest.mark.parametrize("page", [1, 3, 16, 32, 256])
def test_ask_15_any_page_size_and_checked_tables(page):
    q, k, v = qkv(Sq=1, Sk=37, grad=False)
    pages = -(-37 // page)
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(page)).int().view(2, pages)
    caches = [torch.full((2 * pages, page, 2, 16), math.nan) for _ in range(2)]
    for cache, x in zip(caches, (k, v)):
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page - 37))
        cache[table.flatten().long()] = padded.view(2 * pages, page, 2, 16)
    out = flash_attn_with_kvcache(q, *caches, cache_seqlens=37, block_table=table)
    assert torch.allclose(out, flash_attn_func(q, k, v), atol=1e-6)
    table[1, 0] = 2 * pages
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn_with_kvcache(q, *caches, cache_seqlens=37, block_table=table)


@second_torch
def test_ask_16_offsets_past_32_bits():
    """The rest is in test_far_strides.py."""
    far_memory = pytest.importorskip("far_memory", reason="needs mmap as Linux has it")
    leaves, dout = qkv(), torch.randn(2, 6, 2, 16)
    out = flash_attn_func(*leaves)
    expected = [out, *torch.autograd.grad(out, leaves, dout)]
    far = [far_memory.spread(x.detach(), 1).requires_grad_() for x in leaves]
    out = flash_attn_func(*far)
    assert all(
        torch.equal(a, b) for a, b in zip([out, *torch.autograd.grad(out, far, far_memory.spread(dout, 2))], expected)
    )


@second_torch
def test_ask_17_deterministic_backward():
    """Thirty runs with four threads, the same bits; the flag has nothing left to do."""
    leaves, before = qkv(130, 300, H=4), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        runs = []
        for n in range(30):
            out = flash_attn_func(*leaves, causal=True, deterministic=n % 2 == 0)
            runs.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


@second_torch
@pytest.mark.parametrize(
    "argument",
    [
        {"dropout_p": 0.5},
        {"softmax_scale": 1.0},
        {"causal": True},
        {"window_size": (2, 1)},
        {"softcap": 0.5},
        {"alibi_slopes": torch.tensor([0.5, 1.0])},
    ],
    ids=lambda a: next(iter(a)),
)
def test_ask_18_every_argument_counts(argument):
    """Upstream's arguments change result and gradients, dense and varlen; test_attention_*.py say how."""
    leaves = qkv()
    rows, cu = [x.detach().flatten(0, 1).requires_grad_() for x in leaves], int32(0, 6, 12)
    for call in (
        lambda **a: (flash_attn_func(*leaves, **a), leaves),
        lambda **a: (flash_attn_varlen_func(*rows, cu, cu, 6, 6, **a), rows),
    ):
        (plain, inputs), (changed, _) = call(), call(**argument)
        assert not torch.equal(plain, changed)
        for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (plain, changed))):
            assert not torch.equal(a, b)


@second_torch
@pytest.mark.parametrize("Sq, Sk", [(1, 7), (7, 1), (5, 9), (9, 5), (3, 3), (1, 1), (113, 203), (203, 113)])
def test_ask_19_causal_with_unequal_lengths(Sq, Sk):
    """Aligned to the bottom right corner; rows that see nothing are zero."""
    leaves, seen = qkv(Sq, Sk), band(Sq, Sk)

    def reference(q, k, v):
        any_key = seen.any(-1)[:, None, None]
        return torch.where(any_key, attend(q, k, v, seen | ~seen.any(-1, keepdim=True)), 0.0)

    assert_agrees(lambda *x: flash_attn_func(*x, causal=True), reference, leaves)


@second_torch
@pytest.mark.parametrize("D, Dv", [(1, 1), (40, 40), (72, 72), (80, 80), (192, 128), (512, 512), (576, 512), (8, 33)])
def test_ask_20_head_dims(D, Dv):
    assert_agrees(flash_attn_func, attend, qkv(D=D, Dv=Dv))


@pytest.mark.requires_torch(2, 4, "float8 dtypes")
def test_ask_21_fp8_is_refused_clearly():
    q, k, v = qkv(grad=False)
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    with pytest.raises(RuntimeError, match="q has dtype Float8_e4m3fn; accepted: float16, bfloat16"):
        flash_attn_func(q8, k8, v8)
    with pytest.raises(RuntimeError, match="k has dtype Float8_e4m3fn; accepted"):
        flash_attn_with_kvcache(q, k8, v8, cache_seqlens=3)
    with pytest.raises(NotImplementedError, match="fp8 attention"):
        fa3.flash_attn_func(q, k, v, q_descale=torch.ones(2, 2))


@second_torch
def test_ask_24_lse_has_a_gradient_and_merges():
    """Two halves of the keys, merged in fp32 by their LSEs as ring attention does, are the whole, backward too."""

    def merged(q, k, v):
        parts = [flash_attn_func(q, k[:, half], v[:, half], return_attn_probs=True)[:2] for half in halves]
        lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
        return sum(out * (part - lse).exp().transpose(1, 2)[..., None] for out, part in parts)

    halves = (slice(0, 4), slice(4, 9))
    assert flash_attn_func(*qkv(), return_attn_probs=True)[1].dtype == torch.float32
    assert_agrees(merged, attend, qkv(5, 9))


@second_torch
def test_ask_25_dropout_masks_come_from_seed_and_position():
    """Seed and offset travel by value; the mask can be rebuilt, whatever the lengths or the batch around an element."""
    q, k, v = qkv(9, 70, grad=False)
    score = (0.3, 0.25, False, -1, -1, 0.0, None, True)
    torch.manual_seed(3)
    _, _, s_dmask, state = interface._flash_attn_forward(q, k, v, *score)
    keep = philox.keep_mask(state.tolist(), 0.3, 2, 2, 9, 70)
    assert torch.equal(s_dmask > 0, keep) and 0.5 < keep.float().mean() < 0.9
    torch.manual_seed(3)
    small = interface._flash_attn_forward(q[:1, :4], k[:1, :33], v[:1, :33], *score)[2]
    assert torch.equal(small > 0, keep[:1, :, :4, :33])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(3)
    out = flash_attn_func(*leaves, dropout_p=0.3)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).div(4).softmax(-1) * keep / 0.7
    assert torch.allclose(dv, weights.sum(2).transpose(1, 2)[..., None].expand_as(dv), atol=1e-5)


@second_torch
def test_ask_26_tensors_on_different_devices_are_refused():
    q, k, v = qkv(grad=False)
    with pytest.raises(RuntimeError, match="one device, got q on cpu, k on meta"):
        flash_attn_func(q, k.to("meta"), v)


@pytest.mark.gpu
@pytest.mark.skipif("config.getoption('device') != 'cuda'", reason="needs two real GPUs; the simulator has one")
def test_ask_26_a_second_gpu_computes_on_itself():
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    leaves = [x.bfloat16().detach() for x in qkv()]
    assert torch.cuda.current_device() == 0
    out = [flash_attn_func(*(x.to(f"cuda:{n}") for x in leaves)) for n in (0, 1)]
    assert out[1].device.index == 1 and torch.equal(out[0].cpu(), out[1].cpu()) and out[1].ne(0).any()


@second_torch
def test_ask_30_gradients_of_any_strides():
    """dout laid out unlike out, and with a last stride other than 1, in place of a copy of it."""
    leaves, dout = qkv(), torch.randn(2, 6, 2, 16)
    out = flash_attn_func(*leaves)
    expected = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for order in ((0, 2, 1, 3), (3, 1, 2, 0), (1, 0, 2, 3)):
        back = [order.index(n) for n in range(4)]
        strided = dout.permute(order).contiguous().permute(back)
        assert strided.stride() != out.stride()
        got = torch.autograd.grad(out, leaves, strided, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


@second_torch
def test_ask_31_varlen_of_length_one():
    """max_seqlen_q == 1 with grouped heads and an empty sequence: shapes and values of rows, not of a batch."""
    q, k, v = (torch.randn(n, heads, 16) for n, heads in ((2, 4), (9, 2), (9, 2)))
    cu_q, cu_k = int32(0, 1, 1, 2), int32(0, 4, 6, 9)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1, 4, return_attn_probs=True)
    assert out.shape == (2, 4, 16) and lse.shape == (4, 2)
    for row, keys in ((0, slice(0, 4)), (1, slice(6, 9))):
        alone = attend(*(x[None].double() for x in (q[row : row + 1], k[keys], v[keys])))
        assert torch.allclose(out[row].double(), alone[0, 0], atol=1e-6)
    harness.check(Case(lengths=((1, 4), (0, 2), (1, 3)), varlen=True, H=4, Hk=2, D=16, causal=True))
