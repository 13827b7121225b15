"""Multi-head attention with its projections against its definition in double precision, gradients included."""

import pytest
import torch
from plain_attention import attend, band, check
from torch import nn

from flash_attn.modules.mha import MHA, get_alibi_slopes

pytestmark = pytest.mark.second_torch
B, S, Sk, H, D = 2, 7, 10, 4, 8
E = H * D


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)


def rotated(x, dim, interleaved=False, base=10000.0):
    """x (B,S,H,D) with its first `dim` channels turned, position by position."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * base ** (-2 * pair / dim)
    first = list(range(0, dim, 2)) if interleaved else list(range(dim // 2))
    second = list(range(1, dim, 2)) if interleaved else list(range(dim // 2, dim))
    turned = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    out = x.clone()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def convolved(p, name, x):
    """Each channel's last three tokens, weighted."""
    weight, bias = p[f"{name}.weight"][:, 0], p[f"{name}.bias"]
    padded = torch.cat((torch.zeros_like(x[:, :2]), x), dim=1)
    return sum(padded[:, n : n + x.shape[1]] * weight[:, n] for n in range(3)) + bias


SELF = [
    dict(),
    dict(causal=True),
    dict(num_heads_kv=2, causal=True),
    dict(num_heads_kv=1, qkv_proj_bias=False, out_proj_bias=False),
    dict(rotary_emb_dim=4, causal=True),
    dict(rotary_emb_dim=8, num_heads_kv=2, rotary_emb_interleaved=True),
    dict(rotary_emb_dim=8, rotary_emb_base=50.0),
    dict(dwconv=True, causal=True),
    dict(dwconv=True, num_heads_kv=2),
    dict(softmax_scale=0.2, fused_bias_fc=True),
    dict(checkpointing=True, causal=True),
    dict(checkpointing=True, num_heads_kv=2),
]
FLASH_ONLY = [dict(window_size=(2, 1)), dict(use_alibi=True, causal=True), dict(use_alibi=True, num_heads_kv=2)]
CASES = [(False, o) for o in SELF] + [(True, o) for o in SELF + FLASH_ONLY]


@pytest.mark.parametrize("flash, options", CASES, ids=[f"{'flash' if f else 'plain'} {o}" for f, o in CASES])
def test_self_attention_with_projections(flash, options):
    module = MHA(E, H, use_flash_attn=flash, **options)
    Hk = options.get("num_heads_kv", H)
    visible = band(S, S) if options.get("causal") else None
    if "window_size" in options:
        visible = band(S, S, *options["window_size"])
    bias = 0
    if options.get("use_alibi"):
        distance = (torch.arange(S) - torch.arange(S)[:, None]).abs()
        bias = -torch.tensor(get_alibi_slopes(H), dtype=torch.float64)[:, None, None] * distance

    def reference(p, x):
        qkv = linear(p, "Wqkv", x)
        widths = [E, Hk * D, Hk * D]
        if options.get("dwconv") and Hk == H:
            qkv = convolved(p, "dwconv_qkv", qkv)
        elif options.get("dwconv"):
            parts = qkv[..., :E], qkv[..., E:]
            qkv = torch.cat([convolved(p, f"dwconv_{n}", x) for n, x in zip(("q", "kv"), parts)], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, D)) for t in qkv.split(widths, dim=-1))
        if "rotary_emb_dim" in options:
            turn = options["rotary_emb_dim"], options.get("rotary_emb_interleaved", False)
            q, k = (rotated(t, *turn, options.get("rotary_emb_base", 10000.0)) for t in (q, k))
        return linear(p, "out_proj", attend(q, k, v, visible, options.get("softmax_scale"), bias).flatten(2))

    check(module, [torch.randn(B, S, E)], reference, tolerance=2e-5)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(num_heads_kv=2), dict(dwconv=True)])
def test_cross_attention_with_projections(flash, options):
    module = MHA(E, H, cross_attn=True, use_flash_attn=flash, **options)
    assert not hasattr(module, "Wqkv")

    def reference(p, x, x_kv):
        q, kv = linear(p, "Wq", x), linear(p, "Wkv", x_kv)
        if options.get("dwconv"):
            q, kv = convolved(p, "dwconv_q", q), convolved(p, "dwconv_kv", kv)
        k, v = (t.unflatten(-1, (-1, D)) for t in kv.chunk(2, dim=-1))
        visible = band(S, Sk) if options.get("causal") else None
        return linear(p, "out_proj", attend(q.unflatten(-1, (H, D)), k, v, visible).flatten(2))

    check(module, [torch.randn(B, S, E), torch.randn(B, Sk, E)], reference, tolerance=2e-5)


@pytest.mark.parametrize("flash", [False, True])
def test_cross_attention_of_x_alone_and_of_some_of_its_tokens(flash):
    module, x = MHA(E, H, cross_attn=True, use_flash_attn=flash), torch.randn(B, S, E)
    whole = module(x)
    torch.testing.assert_close(whole, module(x, x))
    torch.testing.assert_close(module(x, mixer_subset=slice(0, 2)), whole[:, :2])


def test_padding_mask():
    module, x = MHA(E, H), torch.randn(B, S, E)
    mask = torch.arange(S)[None] < torch.tensor([[S], [4]])
    out = module(x, key_padding_mask=mask)
    torch.testing.assert_close(out[0], module(x[:1])[0])
    torch.testing.assert_close(out[1, :4], module(x[1:, :4])[0])


@pytest.mark.parametrize("options", [dict(), dict(num_heads_kv=2), dict(cross_attn=True)])
def test_packed_batch(options):
    module, lengths = MHA(E, H, causal=True, use_flash_attn=True, **options), (3, 1, 5)
    x, cu = torch.randn(9, E), torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    keys = dict(cu_seqlens_k=cu, max_seqlen_k=5) if options.get("cross_attn") else {}
    packed = module(x, cu_seqlens=cu, max_seqlen=5, **keys)
    apart = torch.cat([module(part[None])[0] for part in x.split(lengths)])
    torch.testing.assert_close(packed, apart)


@pytest.mark.parametrize("options", [dict(), dict(cross_attn=True)])
def test_return_residual(options):
    x = torch.randn(B, S, E)
    module = MHA(E, H, return_residual=True, **options)
    out, same = module(x)
    assert same is x
    module.return_residual = False
    assert torch.equal(module(x), out)


@pytest.mark.parametrize("options", [dict(), dict(num_heads_kv=2), dict(cross_attn=True)])
def test_dropout(options):
    x = torch.randn(B, S, E)
    for flash in (False, True):
        module = MHA(E, H, dropout=0.5, use_flash_attn=flash, **options)
        assert not torch.equal(module(x), module(x))
        assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(num_heads_kv=2)])
def test_checkpointing_attends_again_in_backward(options, checkpointing):
    for flash in (False, True):
        module, calls = MHA(E, H, use_flash_attn=flash, checkpointing=checkpointing, **options), []
        for inner in (module.inner_attn, module.inner_cross_attn):
            inner.register_forward_pre_hook(lambda *_, calls=calls: calls.append("attention"))
        module(torch.randn(B, S, E)).sum().backward()
        assert len(calls) == 1 + checkpointing


@pytest.mark.parametrize(
    "words, make",
    [
        ("num_heads_kv, 3", lambda: MHA(E, H, num_heads_kv=3)),
        ("num_heads, 5", lambda: MHA(E, 5)),
        ("use_alibi", lambda: MHA(E, H, use_alibi=True)),
        ("window_size", lambda: MHA(E, H, window_size=(2, 0))),
        ("rotary_emb_dim", lambda: MHA(E, H, cross_attn=True, rotary_emb_dim=4)),
    ],
)
def test_bad_constructions(words, make):
    with pytest.raises(AssertionError, match=words):
        make()


def test_bad_calls():
    x, cu = torch.randn(B, S, E), torch.tensor([0, S], dtype=torch.int32)
    flash = MHA(E, H, use_flash_attn=True)
    for module, options, words in [
        (MHA(E, H), dict(cu_seqlens=cu, max_seqlen=S), "use_flash_attn=True"),
        (flash, dict(cu_seqlens=cu), "without max_seqlen"),
        (MHA(E, H, use_flash_attn=True, rotary_emb_dim=4), dict(cu_seqlens=cu, max_seqlen=S), "rotary_emb_dim"),
        (flash, dict(key_padding_mask=torch.ones(B, S, dtype=torch.bool)), "use_flash_attn=False"),
        (flash, dict(x_kv=x), "cross_attn=True"),
        (flash, dict(mixer_subset=slice(0, 1)), "cross_attn=True"),
    ]:
        with pytest.raises(AssertionError, match=words):
            module(x, **options)


BIASED = {"out_proj.weight": (E, E), "out_proj.bias": (E,)}
CHECKPOINTS = [
    (dict(), {"Wqkv.weight": (3 * E, E), "Wqkv.bias": (3 * E,), **BIASED}),
    (dict(num_heads_kv=2), {"Wqkv.weight": (2 * E, E), "Wqkv.bias": (2 * E,), **BIASED}),
    (
        dict(cross_attn=True, num_heads_kv=2),
        {"Wq.weight": (E, E), "Wq.bias": (E,), "Wkv.weight": (E, E), "Wkv.bias": (E,), **BIASED},
    ),
    (
        dict(qkv_proj_bias=False, out_proj_bias=False, use_flash_attn=True, use_alibi=True, rotary_emb_dim=4),
        {"Wqkv.weight": (3 * E, E), "out_proj.weight": (E, E)},
    ),
    (
        dict(dwconv=True, qkv_proj_bias=False),
        {
            "Wqkv.weight": (3 * E, E),
            "dwconv_qkv.weight": (3 * E, 1, 3),
            "dwconv_qkv.bias": (3 * E,),
            **BIASED,
        },
    ),
    (
        dict(dwconv=True, num_heads_kv=2, qkv_proj_bias=False),
        {
            "Wqkv.weight": (2 * E, E),
            "dwconv_q.weight": (E, 1, 3),
            "dwconv_q.bias": (E,),
            "dwconv_kv.weight": (E, 1, 3),
            "dwconv_kv.bias": (E,),
            **BIASED,
        },
    ),
]


@pytest.mark.parametrize("options, keys", CHECKPOINTS, ids=[str(o) for o, _ in CHECKPOINTS])
def test_checkpoints_have_upstreams_keys_in_upstreams_order(options, keys):
    """Read from upstream 2.8.3; optimizers' checkpoints number parameters, so that their order counts too."""
    state = MHA(E, H, **options).state_dict()
    assert [(name, tuple(t.shape)) for name, t in state.items()] == list(keys.items())


def test_device_and_dtype():
    module = MHA(E, H, num_heads_kv=2, dwconv=True, dtype=torch.bfloat16, device="meta", rotary_emb_dim=4)
    assert all(p.dtype == torch.bfloat16 and p.is_meta for p in module.parameters())
    assert MHA(E, H, use_flash_attn=True, use_alibi=True, device="meta").inner_attn.alibi_slopes.is_meta
    cache = MHA(E, H, num_heads_kv=2, dtype=torch.bfloat16).allocate_inference_cache(3, 20)
    assert (cache.shape, cache.dtype) == ((3, 20, 2, 2, D), torch.bfloat16)
    assert MHA(E, H).allocate_inference_cache(3, 20, torch.float16).dtype == torch.float16


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
@pytest.mark.parametrize(
    "options",
    [
        dict(rotary_emb_dim=4),
        pytest.param(
            dict(rotary_emb_dim=4, num_heads_kv=2),
            marks=pytest.mark.requires_torch(2, 7, "its compiler refuses writes to one view while others are used"),
        ),
    ],
)
def test_compiled(options):
    torch._dynamo.reset()
    module = MHA(E, H, causal=True, use_flash_attn=True, **options)
    fast = torch.compile(nn.Sequential(module), fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (S, Sk):
        x = torch.randn(B, length, E, requires_grad=True)
        out, wanted = fast(x), module(x)
        torch.testing.assert_close(out, wanted)
        g = torch.randn_like(wanted)
        leaves = [x, *module.parameters()]
        for a, b in zip(torch.autograd.grad(out, leaves, g), torch.autograd.grad(wanted, leaves, g)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
