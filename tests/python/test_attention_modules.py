"""Attention modules without projections against their definition in double precision, gradients included."""

import pytest
import torch
from plain_attention import attend, band, check

from flash_attn.modules import attention
from flash_attn.modules.mha import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)

pytestmark = pytest.mark.second_torch
B, S, Sk, H, D = 2, 7, 10, 4, 8


@pytest.fixture(autouse=True)
def seed(rng):
    pass


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("alibi", [False, True])
def test_flash_self_attention(causal, window, alibi):
    slopes = torch.tensor(get_alibi_slopes(H)) if alibi else None
    module = FlashSelfAttention(causal=causal, softmax_scale=0.3, window_size=window, alibi_slopes=slopes)
    visible = band(S, S, window[0] if window[0] >= 0 else None, 0 if causal or window[1] == 0 else S)
    bias = 0
    if alibi:
        bias = -slopes.double()[:, None, None] * (torch.arange(S) - torch.arange(S)[:, None]).abs()
    qkv = torch.randn(B, S, 3, H, D)
    check(module, [qkv], lambda p, qkv: attend(*qkv.unbind(2), visible, 0.3, bias))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Hk", [1, 4])
def test_flash_cross_attention(causal, Hk):
    module = FlashCrossAttention(causal=causal)
    visible = band(S, Sk) if causal else None
    inputs = [torch.randn(B, S, H, D), torch.randn(B, Sk, 2, Hk, D)]
    check(module, inputs, lambda p, q, kv: attend(q, *kv.unbind(2), visible))


def test_flash_modules_on_packed_sequences():
    lengths, lengths_k = (3, 0, 4), (5, 2, 3)
    cu, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (lengths, lengths_k))
    qkv, kv = torch.randn(7, 3, H, D), torch.randn(10, 2, 2, D)

    def each(*sides):
        parts = zip(*(x[None].split(n, dim=1) for x, n in sides))
        return torch.cat([attend(q, k, v)[0] for q, k, v in parts])

    def own(p, qkv):
        return each(*((x, lengths) for x in qkv.unbind(1)))

    def cross(p, q, kv):
        return each((q, lengths), *((x, lengths_k) for x in kv.unbind(1)))

    check(FlashSelfAttention(), [qkv], own, cu_seqlens=cu, max_seqlen=4)
    lengths_of_both = dict(cu_seqlens=cu, max_seqlen=4, cu_seqlens_k=cu_k, max_seqlen_k=5)
    check(FlashCrossAttention(), [qkv[:, 0], kv], cross, **lengths_of_both)


def test_causal_of_a_call_replaces_the_modules():
    qkv = torch.randn(B, S, 3, H, D)
    for cls in (FlashSelfAttention, SelfAttention):
        assert torch.equal(cls(causal=True)(qkv, causal=False), cls()(qkv))
        assert torch.equal(cls()(qkv, causal=True), cls(causal=True)(qkv))
    for cls in (FlashCrossAttention, CrossAttention):
        q, kv = qkv[:, :, 0], qkv[:, :, 1:]
        assert torch.equal(cls(causal=True)(q, kv, causal=False), cls()(q, kv))
        assert torch.equal(cls()(q, kv, causal=True), cls(causal=True)(q, kv))


def test_slopes_are_a_buffer_that_checkpoints_do_not_have():
    for cls in (FlashSelfAttention, FlashCrossAttention):
        module = cls(alibi_slopes=torch.tensor(get_alibi_slopes(H)))
        assert not module.state_dict() and [name for name, _ in module.named_buffers()] == ["alibi_slopes"]
        q, kv = torch.randn(B, S, H, D).half(), torch.randn(B, S, 2, H, D).half()
        call = (torch.cat((q.unsqueeze(2), kv), 2),) if cls is FlashSelfAttention else (q, kv)
        # A cast of the module casts the buffer; slopes of four heads are exact in fp16.
        assert torch.equal(module.half()(*call), cls(alibi_slopes=torch.tensor(get_alibi_slopes(H)))(*call))


@pytest.mark.parametrize("cls", [FlashSelfAttention, FlashCrossAttention])
def test_bad_lengths(cls):
    inputs = (
        (torch.randn(S, 3, H, D),) if cls is FlashSelfAttention else (torch.randn(S, H, D), torch.randn(S, 2, H, D))
    )
    cu = torch.tensor([0, S], dtype=torch.int32)
    with pytest.raises(AssertionError, match="cu_seqlens is torch.int64"):
        cls()(*inputs, cu_seqlens=cu.long(), max_seqlen=S)
    with pytest.raises(AssertionError, match="without max_seqlen"):
        cls()(*inputs, cu_seqlens=cu)
    if cls is FlashCrossAttention:
        with pytest.raises(AssertionError, match="cu_seqlens_k is None"):
            cls()(*inputs, cu_seqlens=cu, max_seqlen=S)


@pytest.mark.parametrize("cls", [FlashSelfAttention, SelfAttention, FlashCrossAttention, CrossAttention])
def test_dropout_in_training_only(cls):
    qkv = torch.randn(B, S, 3, H, D)
    inputs = (qkv,) if cls in (FlashSelfAttention, SelfAttention) else (qkv[:, :, 0], qkv[:, :, 1:])
    module = cls(attention_dropout=0.5)
    assert not torch.equal(module(*inputs), module(*inputs))
    torch.testing.assert_close(module.eval()(*inputs), attend(*qkv.unbind(2)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_is_passed_on(deterministic, monkeypatch):
    qkv, cu, given = torch.randn(S, 3, H, D), torch.tensor([0, S], dtype=torch.int32), []
    for packed in ("qkvpacked", "kvpacked"):
        for name in (f"flash_attn_{packed}_func", f"flash_attn_varlen_{packed}_func"):
            monkeypatch.setattr(attention, name, lambda *args, **options: given.append(options["deterministic"]))
    module, cross = (cls(deterministic=deterministic) for cls in (FlashSelfAttention, FlashCrossAttention))
    module(qkv[None])
    module(qkv, cu_seqlens=cu, max_seqlen=S)
    cross(qkv[None, :, 0], qkv[None, :, 1:])
    cross(qkv[:, 0], qkv[:, 1:], cu_seqlens=cu, max_seqlen=S, cu_seqlens_k=cu, max_seqlen_k=S)
    assert given == [deterministic] * 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_plain_self_attention(causal, padding):
    mask = torch.arange(S)[None] < torch.tensor([[S], [4]]) if padding else None
    visible = band(S, S, right=0 if causal else S) & (mask[:, None, None] if padding else torch.tensor(True))
    qkv = torch.randn(B, S, 3, H, D)
    check(
        SelfAttention(causal=causal, softmax_scale=0.4),
        [qkv],
        lambda p, qkv: attend(*qkv.unbind(2), visible, 0.4),
        key_padding_mask=mask,
    )


def test_plain_attention_of_a_mask_for_all_and_of_no_batch():
    qkv, mask = torch.randn(B, H, 3, H, D), torch.arange(H) < 3  # as many keys as heads
    module = SelfAttention(causal=True)
    torch.testing.assert_close(
        module(qkv, key_padding_mask=mask), module(qkv, key_padding_mask=mask.expand(B, H)), rtol=0, atol=0
    )
    with pytest.raises(RuntimeError):
        module(qkv[:1], key_padding_mask=mask.expand(B, H))
    assert module(qkv[:0]).shape == (0, H, H, D)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("Hk", [2, 4])
def test_plain_cross_attention(causal, padding, Hk):
    lengths = torch.tensor([Sk, 8]) if padding else torch.tensor([Sk, Sk])
    mask = torch.arange(Sk)[None] < lengths[:, None]
    # The corner is that of the keys which are kept.
    rows, columns = torch.arange(S)[:, None], torch.arange(Sk)
    future = columns > rows + lengths[:, None, None] - S
    visible = mask[:, None, None] & ~(future[:, None] & causal)
    inputs = [torch.randn(B, S, H, D), torch.randn(B, Sk, 2, Hk, D)]
    call = dict(key_padding_mask=mask if padding else None)
    check(CrossAttention(causal=causal), inputs, lambda p, q, kv: attend(q, *kv.unbind(2), visible), **call)


def test_plain_attention_of_rows_without_keys_is_finite():
    qkv = torch.randn(B, S, 3, H, D)
    mask = torch.zeros(B, S, dtype=torch.bool)
    out = SelfAttention(causal=True)(qkv, key_padding_mask=mask)
    assert out.isfinite().all()


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 40])
def test_alibi_slopes(heads):
    slopes = get_alibi_slopes(heads)
    power = 1 << (heads.bit_length() - 1)
    assert len(slopes) == heads
    assert slopes[:power] == pytest.approx([2 ** (-8 * (i + 1) / power) for i in range(power)])
    # The rest are the odd ones of twice as many.
    assert slopes[power:] == pytest.approx([2 ** (-8 * (2 * i + 1) / (2 * power)) for i in range(heads - power)])
