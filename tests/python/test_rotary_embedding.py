"""The module RotaryEmbedding: its tables, xPos, and what it does with queries, keys and values."""

import pytest
import torch
from rotation import expected
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn.layers.rotary import RotaryEmbedding

pytestmark = pytest.mark.second_torch
B, S, H, D = 3, 21, 2, 32


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def exact_tables(positions, dim, base=10000.0, scale_base=None):
    """(cos, sin) of queries and of keys, from the definition, in fp64."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    p = torch.arange(positions, dtype=torch.float64)[:, None]
    angles = p * base ** (-2 * pair / dim)
    scale = torch.ones(())
    if scale_base is not None:
        scale = ((2 * pair + 0.4 * dim) / (1.4 * dim)) ** ((p - positions // 2) / scale_base)
    return (angles.cos() * scale, angles.sin() * scale), (angles.cos() / scale, angles.sin() / scale)


@pytest.mark.parametrize("scale_base", [None, 64.0])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("call", ["qkv", "grouped", "q and kv", "tensor offset"])
def test_module(scale_base, interleaved, call):
    module = RotaryEmbedding(16, base=500.0, interleaved=interleaved, scale_base=scale_base)
    qkv = torch.randn(B, S, 3, H, D)
    q, k, v = qkv.unbind(2)
    offset, length = torch.full((B,), 5) if call == "tensor offset" else 5, S + 5
    of_queries, of_keys = exact_tables(length, 16, 500.0, scale_base)
    positions = torch.arange(S)[None] + 5
    wanted = [
        expected(q, *of_queries, positions, interleaved),
        expected(k, *of_keys, positions, interleaved),
        v.double(),
    ]
    if call == "q and kv":
        q, kv = q.clone(), qkv[:, :, 1:].clone()
        got_q, got_kv = module(q, kv, seqlen_offset=offset)
        assert got_q.data_ptr() == q.data_ptr() and got_kv.data_ptr() == kv.data_ptr()
        got = torch.cat((got_q.unsqueeze(2), got_kv), dim=2)
    elif call == "grouped":
        got = module(qkv.flatten(2, 3), seqlen_offset=offset, num_heads_q=H).unflatten(2, (3, H))
    else:
        got = module(qkv, seqlen_offset=offset, max_seqlen=length if call == "tensor offset" else None)
        assert got.data_ptr() == qkv.data_ptr()
    torch.testing.assert_close(got.double(), torch.stack(wanted, dim=2), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("lengths", [(4, 9), (9, 4)], ids=str)
def test_tables_cover_the_longer_of_queries_and_keys(lengths):
    q, kv = torch.randn(B, lengths[0], H, D), torch.randn(B, lengths[1], 2, H, D)
    tables, _ = exact_tables(9, D)
    wanted = [expected(x, *tables, torch.arange(x.shape[1])[None], False) for x in (q, kv[:, :, 0])]
    got_q, got_kv = RotaryEmbedding(D)(q.clone(), kv.clone())
    for got, exact in zip((got_q, got_kv[:, :, 0]), wanted):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=2e-5)


def test_module_state():
    plain, xpos = RotaryEmbedding(8), RotaryEmbedding(8, scale_base=512.0)
    assert not plain.state_dict() and not xpos.state_dict()
    assert [name for name, _ in plain.named_buffers()] == ["inv_freq"]
    assert sorted(name for name, _ in xpos.named_buffers()) == ["inv_freq", "scale"]
    torch.testing.assert_close(plain.inv_freq, 10000.0 ** -(torch.arange(4) / 4))
    assert plain.scale is None and plain.scale_base is None and (plain.dim, plain.base) == (8, 10000.0)
    assert plain._cos_cached is None and plain._seq_len_cached == 0


def test_tables_grow_and_follow_dtype_and_mode():
    module = RotaryEmbedding(8)
    module._update_cos_sin_cache(10, dtype=torch.float32)
    first = module._cos_cached
    module._update_cos_sin_cache(6, dtype=torch.float32)
    assert module._cos_cached is first and first.shape == (10, 4)
    module._update_cos_sin_cache(12, dtype=torch.float32)
    assert module._cos_cached.shape == (12, 4) and module._seq_len_cached == 12
    module._update_cos_sin_cache(12, dtype=torch.bfloat16)
    assert module._cos_cached.dtype == module._sin_cached.dtype == torch.bfloat16
    xpos = RotaryEmbedding(8, scale_base=512.0)
    xpos._update_cos_sin_cache(12, dtype=torch.bfloat16)
    tables = (xpos._cos_cached, xpos._sin_cached, xpos._cos_k_cached, xpos._sin_k_cached)
    assert all(table.dtype == torch.bfloat16 and table.shape == (12, 4) for table in tables)
    with torch.inference_mode():
        module(torch.randn(1, 14, 3, 1, 8))
    qkv = torch.randn(1, 14, 3, 1, 8, requires_grad=True)
    module(qkv * 1).sum().backward()
    assert torch.equal(qkv.grad[:, :, 2], torch.ones(1, 14, 1, 8))


@pytest.mark.parametrize("scale_base", [None, 2048.0])
def test_half_precision_module_keeps_exact_frequencies(scale_base):
    module = RotaryEmbedding(64, scale_base=scale_base).bfloat16()
    module._update_cos_sin_cache(3000, dtype=torch.float32)
    (cos, _), (cos_k, _) = exact_tables(3000, 64, scale_base=scale_base)
    torch.testing.assert_close(module._cos_cached.double(), cos, rtol=1e-3, atol=1e-3)
    if scale_base:
        torch.testing.assert_close(module._cos_k_cached.double(), cos_k, rtol=1e-3, atol=1e-3)


def test_tensor_offset_without_tables_raises():
    with pytest.raises(ValueError, match="max_seqlen"):
        RotaryEmbedding(8)(torch.zeros(2, 3, 3, 1, 8), seqlen_offset=torch.tensor([0, 1]))


@pytest.mark.requires_torch(2, 1, "torch.export came with torch 2.1")
def test_tables_without_numbers_are_made_anew():
    """torch.export of torch 2.8 leaves its trace's, of a mode that takes them beside real tensors."""
    module, qkv = RotaryEmbedding(D), torch.randn(B, S, 3, H, D)
    wanted = module(qkv.clone())
    traced = RotaryEmbedding(D)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(qkv.shape)
        for _ in range(2):
            traced(fake)
        traced(fake, seqlen_offset=torch.zeros(B, dtype=torch.int32))  # The trace's own serve it.
    assert torch.equal(traced(qkv.clone()), wanted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = RotaryEmbedding(D)
        traced(fake)
    with pytest.raises(ValueError, match="no tables yet"):
        traced(qkv, seqlen_offset=torch.zeros(B, dtype=torch.int32))
