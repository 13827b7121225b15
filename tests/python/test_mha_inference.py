"""Generation with MHA's cache, against attention over the whole sequence."""

import pytest
import torch

from flash_attn.modules.mha import MHA
from flash_attn.utils.generation import InferenceParams

pytestmark = pytest.mark.second_torch
B, S, H, D = 2, 12, 4, 16
E = H * D


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def generate(module, x, steps, params):
    """The module on x (B,S,E) in pieces of those lengths."""
    pieces = []
    for piece in x.split(steps, dim=1):
        pieces.append(module(piece, inference_params=params))
        params.seqlen_offset += piece.shape[1]
    return torch.cat(pieces, dim=1)


OPTIONS = [
    dict(),
    dict(num_heads_kv=2),
    dict(rotary_emb_dim=16),
    dict(rotary_emb_dim=8, rotary_emb_interleaved=True, num_heads_kv=1),
    dict(rotary_emb_dim=4, num_heads_kv=2),
    dict(softmax_scale=0.4),
]
FLASH_ONLY = [dict(use_alibi=True), dict(window_size=(3, 0), rotary_emb_dim=16)]
CASES = [(False, o) for o in OPTIONS] + [(True, o) for o in OPTIONS + FLASH_ONLY]


@torch.no_grad()
@pytest.mark.parametrize("flash, options", CASES, ids=[f"{'flash' if f else 'plain'} {o}" for f, o in CASES])
@pytest.mark.parametrize("steps", [[5] + [1] * 7, [1] * 12, [4, 4, 4]], ids=["prompt", "one by one", "chunks"])
def test_pieces_equal_the_whole(flash, options, steps):
    module = MHA(E, H, causal=True, layer_idx=0, use_flash_attn=flash, **options).eval()
    x = torch.randn(B, S, E)
    params = InferenceParams(max_seqlen=S, max_batch_size=B)
    torch.testing.assert_close(generate(module, x, steps, params), module(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True])
def test_without_causal_a_piece_sees_all_of_itself(flash):
    module = MHA(E, H, layer_idx=0, use_flash_attn=flash).eval()
    x = torch.randn(B, S, E)
    got = generate(module, x, [8, 4], InferenceParams(max_seqlen=S, max_batch_size=B))
    torch.testing.assert_close(got, torch.cat((module(x[:, :8]), module(x)[:, 8:]), dim=1), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_xpos():
    """The scale's centre follows the length of the tables, so the cache and the whole use the same."""
    module = MHA(
        E, H, causal=True, layer_idx=0, use_flash_attn=True, rotary_emb_dim=16, rotary_emb_scale_base=16
    ).eval()
    x = torch.randn(B, S, E)
    params = InferenceParams(max_seqlen=S, max_batch_size=B)
    torch.testing.assert_close(generate(module, x, [5, 1, 6], params), module(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS + FLASH_ONLY, ids=str)
@pytest.mark.parametrize("first", [0, 1])
def test_sequences_of_different_lengths(options, first):
    """lengths_per_sample: each sequence goes on at its own length; `first` is the batch's first row of the caches."""
    module = MHA(E, H, causal=True, layer_idx=0, use_flash_attn=True, **options).eval()
    x, lengths = torch.randn(B, S, E), torch.tensor([0] * first + [7, 4], dtype=torch.int32)
    params = InferenceParams(max_seqlen=S, max_batch_size=first + B, batch_size_offset=first)
    module(x[:, :7], inference_params=params)
    params.seqlen_offset, params.lengths_per_sample = 7, lengths
    for _ in range(3):
        token = torch.stack([x[b, lengths[first + b]] for b in range(B)])[:, None]
        out = module(token, inference_params=params)
        lengths += 1
        for b in range(B):
            whole = module(x[b : b + 1, : lengths[first + b]])
            torch.testing.assert_close(out[b, 0], whole[0, -1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True])
def test_batches_at_an_offset_in_one_cache(flash):
    module = MHA(E, H, causal=True, layer_idx=3, use_flash_attn=flash, rotary_emb_dim=16).eval()
    x = torch.randn(3, S, E)
    params = InferenceParams(max_seqlen=S, max_batch_size=3)
    got = []
    for first, size in ((0, 1), (1, 2)):
        params.seqlen_offset, params.batch_size_offset = 0, first
        got.append(generate(module, x[first : first + size], [6, 1, 5], params))
    assert list(params.key_value_memory_dict) == [3]
    torch.testing.assert_close(torch.cat(got), module(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float16, marks=pytest.mark.requires_torch(2, 4, "nn.Linear in fp16 on the CPU came later")),
        torch.bfloat16,
    ],
)
@pytest.mark.parametrize("options", [dict(rotary_emb_dim=16), dict(use_alibi=True)], ids=str)
def test_half_precision_and_a_given_cache(dtype, options):
    """Slopes that a cast of the module has cast are used in fp32."""
    module = MHA(E, H, causal=True, layer_idx=0, use_flash_attn=True, **options).to(dtype).eval()
    x = torch.randn(B, S, E).to(dtype)
    params = InferenceParams(max_seqlen=S, max_batch_size=B)
    cache = module.allocate_inference_cache(B, S)
    params.key_value_memory_dict[0] = cache
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    torch.testing.assert_close(generate(module, x, [5, 1, 6], params), module(x), rtol=tolerance, atol=tolerance)
    assert params.key_value_memory_dict[0] is cache


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True])
def test_bad_calls(flash):
    x = torch.randn(B, S, E)
    module = MHA(E, H, causal=True, layer_idx=0, use_flash_attn=flash)
    with pytest.raises(AssertionError, match="larger extents"):
        module(x, inference_params=InferenceParams(max_seqlen=S - 1, max_batch_size=B))
    with pytest.raises(AssertionError, match="larger extents"):
        module(x, inference_params=InferenceParams(max_seqlen=S, max_batch_size=B - 1))
    with pytest.raises(AssertionError, match="layer_idx"):
        MHA(E, H, use_flash_attn=flash)(x, inference_params=InferenceParams(S, B))
    later = InferenceParams(S + 3, B, seqlen_offset=3)
    with pytest.raises(AssertionError, match="layer_idx"):
        MHA(E, H, causal=True, use_flash_attn=flash)(x, inference_params=later)
    with pytest.raises(AssertionError, match="layer 0 has no cache yet"):
        module(x, inference_params=later)
        with pytest.raises(AssertionError, match="does not go with"):
            cu_seqlens = torch.tensor([0, S], dtype=torch.int32)
            module(x[0], cu_seqlens=cu_seqlens, max_seqlen=S, inference_params=InferenceParams(S, B))
    for name, value in (("key_padding_mask", torch.ones(B, S, dtype=torch.bool)), ("dwconv", True)):
        if name == "dwconv":
            module, call = MHA(E, H, layer_idx=0, use_flash_attn=flash, dwconv=True), {}
        elif flash:
            continue
        else:
            call = {name: value}
        with pytest.raises(AssertionError, match="does not go with"):
            module(x, inference_params=InferenceParams(S, B), **call)


def test_inference_params():
    params = InferenceParams(10, 2, lengths_per_sample=torch.tensor([3, 4], dtype=torch.int32))
    assert (params.seqlen_offset, params.batch_size_offset, params.key_value_memory_dict) == (0, 0, {})
    params.seqlen_offset, params.key_value_memory_dict[0] = 5, "cache"
    params.reset(20, 3)
    assert (params.max_seqlen, params.max_batch_size, params.seqlen_offset) == (20, 3, 0)
    assert params.lengths_per_sample.tolist() == [0, 0] and params.key_value_memory_dict == {0: "cache"}
    params.lengths_per_sample = None
    params.reset(30, 4)
    assert params.max_seqlen == 30 and params.lengths_per_sample is None
