"""The operators below rotary embedding: what they check, strides, derivatives, the kernels of other devices."""

import pytest
import torch
from harness import TORCH_DTYPES
from rotation import assert_near, tables

import flash_attn.ops.triton.rotary as apply_rotary_module
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary

compiled = pytest.mark.requires_torch(2, 4, "torch.library.opcheck as used here came with torch 2.4")
everywhere = pytest.mark.second_torch
B, S, H, D = 3, 21, 2, 32


@pytest.fixture(autouse=True)
def seed(rng):
    pass


BAD_LENGTHS = [
    ("cu_seqlens must start at 0", [1, 3, 8]),
    ("cu_seqlens must not decrease", [0, 5, 3]),
    ("max_seqlen must be at least the longest sequence of cu_seqlens, got 5", [0, 6, 8]),
    ("cu_seqlens must end within the 9 rows of x", [0, 5, 10]),
]


@everywhere
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("words, lengths", BAD_LENGTHS)
def test_bad_lengths(words, lengths, inplace):
    x = torch.randn(9, H, D)
    before = x.clone()
    options = dict(cu_seqlens=torch.tensor(lengths), max_seqlen=5, inplace=inplace)
    for function in (apply_rotary, apply_rotary_emb):
        with pytest.raises(RuntimeError, match=words):
            function(x, *tables(S, 16), **options)
    assert torch.equal(x, before)


PACKED = torch.tensor([0, 4, 9], dtype=torch.int32)


@everywhere
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 24])])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_other_devices_kernels_agree(dtype, offsets, packed, interleaved):
    """Torch's arithmetic, which computes where the core has no backend, on CPU tensors."""
    x = torch.randn(*((11,) if packed else (2, 9)), H, D).to(TORCH_DTYPES[dtype])
    cos, sin = tables(30, 16)
    arguments = (cos, sin, 3, offsets, PACKED if packed else None, interleaved, True, 9)
    wanted = apply_rotary_module._rotate(x.double(), *arguments)
    assert_near(torch.ops.flash_attn.rotate(x, *arguments), wanted)
    apply_rotary_module._rotate_(x, *arguments)
    assert_near(x, wanted)


@everywhere
@pytest.mark.parametrize("inplace", [False, True])
def test_any_strides(inplace):
    cos, sin = (t.t().contiguous().t() for t in tables(S, 16))
    x = torch.randn(D, H, S, B).permute(3, 2, 1, 0)
    wanted = apply_rotary(x.contiguous(), cos, sin)
    got = apply_rotary(x, cos, sin, inplace=inplace)
    assert torch.equal(got, wanted) and (got is x) is inplace and torch.equal(x, wanted) is inplace


@everywhere
def test_in_place_needs_an_element_for_each_result():
    x = torch.randn(1, S, H, D).expand(B, S, H, D)
    with pytest.raises(RuntimeError, match="single memory location"):
        apply_rotary(x, *tables(S, 16), inplace=True)
    assert torch.equal(apply_rotary(x, *tables(S, 16))[0, :, :, 16:], x[0, :, :, 16:])


@everywhere
@pytest.mark.parametrize("inplace", [False, True])
def test_the_operators_are_differentiable(inplace):
    cos, sin = tables(8, 4, torch.float64)
    x = torch.randn(2, 4, 1, 6, dtype=torch.float64, requires_grad=True)
    options = dict(seqlen_offsets=torch.tensor([1, 3]), interleaved=True, inplace=inplace)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x * 1, cos, sin, **options), x)
    assert torch.autograd.gradgradcheck(lambda x: apply_rotary(x * 1, cos, sin, **options) ** 2, x)
    if inplace:
        with pytest.raises(RuntimeError, match="leaf"):
            apply_rotary(x, cos, sin, **options)


@compiled
@pytest.mark.parametrize("offsets", [None, torch.tensor([2, 5])])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_operators(offsets, packed, requires_grad):
    cos, sin = tables(30, 8)
    x = torch.randn(9, 2, 16) if packed else torch.randn(2, 9, 2, 16)
    x = x.transpose(-2, -3).contiguous().transpose(-2, -3).requires_grad_(requires_grad)
    args = (x, cos, sin, 0, offsets, PACKED if packed else None, True, False, 9 if packed else None)
    torch.library.opcheck(torch.ops.flash_attn.rotate.default, args)
    torch.library.opcheck(torch.ops.flash_attn.rotate_.default, (x.detach(), *args[1:]))


@compiled
def test_shapes_alone_and_transforms():
    x, cos, sin = torch.empty(2, 9, 2, 16, device="meta"), *(t.to("meta") for t in tables(30, 8))
    assert apply_rotary(x, cos, sin).shape == x.shape and apply_rotary(x, cos, sin, inplace=True) is x
    with pytest.raises(RuntimeError, match="one device"):
        apply_rotary(x, *tables(30, 8))
    cos, sin = tables(30, 8)
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.vmap(lambda x: apply_rotary(x, cos, sin))(torch.randn(3, 2, 9, 2, 16))


@pytest.mark.parametrize("inplace", [False, True])
def test_no_tangent_is_lost(inplace):
    from torch.autograd import forward_ad

    x, cos = torch.randn(1, 3, 2, 8), torch.randn(5, 4)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        apply_rotary_emb(forward_ad.make_dual(x, x), cos, cos, inplace=inplace)
