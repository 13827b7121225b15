"""Transformer blocks against their definition in double precision, gradients included."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_attn.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm

pytestmark = pytest.mark.second_torch
B, S, E = 2, 6, 16


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def double(module):
    """The module in fp64, with its own parameters."""
    return module.double()


def norm(module, x):
    centred = x if isinstance(module, RMSNorm) else x - x.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight
    return y if module.bias is None else y + module.bias


def check(block, inputs, reference):
    """Results and gradients of the inputs and parameters; everything in fp64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    got, wanted = block(*leaves), reference(*leaves)
    got, wanted = (list(r) if isinstance(r, tuple) else [r] for r in (got, wanted))
    assert len(got) == len(wanted)
    directions = [torch.randn_like(r) for r in got]
    everything = [*leaves, *block.parameters()]
    grads = (torch.autograd.grad(r, everything, directions, allow_unused=True) for r in (got, wanted))
    for a, b in zip([*got, *next(grads)], [*wanted, *next(grads)]):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


MIXER = partial(MHA, num_heads=2)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm_cls", [nn.LayerNorm, RMSNorm])
@pytest.mark.parametrize("mlp_cls", [None, partial(GatedMlp, activation=F.silu), nn.Identity])
@pytest.mark.parametrize("first", [False, True])
def test_prenorm(fused, norm_cls, mlp_cls, first):
    block = double(Block(E, MIXER, mlp_cls, norm_cls, fused_dropout_add_ln=fused))

    def reference(x, residual=None):
        residual = x if residual is None else x + residual
        hidden = block.mixer(norm(block.norm1, residual))
        if mlp_cls is nn.Identity:
            return hidden, residual
        residual = hidden + residual
        return block.mlp(norm(block.norm2, residual)), residual

    check(block, [torch.randn(B, S, E) for _ in range(1 if first else 2)], reference)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mlp_cls", [None, nn.Identity])
@pytest.mark.parametrize("return_residual", [False, True])
def test_postnorm(fused, mlp_cls, return_residual):
    mixer, mlp = MIXER, mlp_cls
    if return_residual:
        mixer, mlp = partial(mixer, return_residual=True), mlp or partial(Mlp, return_residual=True)
    options = dict(prenorm=False, return_residual=return_residual, fused_dropout_add_ln=fused)
    block = double(Block(E, mixer, mlp, **options))

    def branch(module, x):
        return module(x)[0] if return_residual else module(x)

    def reference(x):
        x = norm(block.norm1, branch(block.mixer, x) + x)
        return x if mlp_cls is nn.Identity else norm(block.norm2, branch(block.mlp, x) + x)

    check(block, [torch.randn(B, S, E)], reference)
    with pytest.raises(AssertionError, match="residual was given"):
        block(torch.randn(B, S, E).double(), torch.randn(B, S, E).double())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("given", [1, 3])
def test_parallel(fused, tied, given):
    block = double(ParallelBlock(E, MIXER, tied_norm=tied, fused_dropout_add_ln=fused))
    assert hasattr(block, "norm2") is not tied

    def reference(*tensors):
        total = sum(tensors)
        second = block.norm1 if tied else block.norm2
        return block.mixer(norm(block.norm1, total)), block.mlp(norm(second, total)), total

    check(block, [torch.randn(B, S, E) for _ in range(given)], reference)


@pytest.mark.parametrize("cls", [Block, ParallelBlock])
def test_norms_centred_at_zero(cls):
    fused, plain = (
        cls(E, MIXER, norm_cls=partial(RMSNorm, zero_centered_weight=True), fused_dropout_add_ln=fused)
        for fused in (True, False)
    )
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(B, S, E)
    for a, b in zip(fused(x), plain(x)):
        torch.testing.assert_close(a, b)


def test_mixer_subset_and_arguments():
    block = double(Block(E, partial(MIXER, cross_attn=True)))
    x = torch.randn(B, S, E).double()
    whole, part = block(x), block(x, mixer_subset=slice(0, 2))
    for a, b in zip(whole, part):
        torch.testing.assert_close(a[:, :2], b)
    for fused in (False, True):
        block = double(Block(E, partial(MIXER, cross_attn=True), prenorm=False, fused_dropout_add_ln=fused))
        torch.testing.assert_close(block(x)[:, 3:4], block(x, mixer_subset=torch.tensor([3])))
    block = double(Block(E, MIXER))
    mask = torch.arange(S)[None] < torch.tensor([[S], [3]])
    hidden, _ = block(x, mixer_kwargs={"key_padding_mask": mask})
    torch.testing.assert_close(hidden[1, :3], block(x[1:, :3])[0][0])
    block = double(ParallelBlock(E, MIXER))
    hidden, *_ = block(x, mixer_kwargs={"key_padding_mask": mask})
    torch.testing.assert_close(hidden[1, :3], block(x[1:, :3])[0][0])


def test_callers_arguments_for_the_mixer_are_not_written_to():
    block, given = Block(E, partial(MIXER, cross_attn=True)), {}
    block(torch.randn(B, S, E), mixer_subset=slice(0, 2), mixer_kwargs=given)
    assert given == {}


@pytest.mark.parametrize("cls", [Block, ParallelBlock])
def test_each_branch_has_its_own_probability(cls):
    block = cls(E, MIXER, resid_dropout1=0.1, resid_dropout2=0.2)
    assert (block.dropout1.p, block.dropout2.p) == (0.1, 0.2)


@pytest.mark.parametrize("cls", [Block, ParallelBlock])
@pytest.mark.parametrize("fused", [False, True])
def test_residual_in_fp32(cls, fused):
    block = cls(E, MIXER, residual_in_fp32=True, fused_dropout_add_ln=fused).bfloat16()
    results = block(torch.randn(B, S, E).bfloat16())
    assert results[-1].dtype == torch.float32 and all(r.dtype == torch.bfloat16 for r in results[:-1])
    again = block(*([results[0]] * (len(results) - 1)), results[-1])
    assert again[-1].dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_drop_path_takes_whole_sequences(fused):
    """A block whose mixer adds 1: the sum shows which sequences kept their branches."""

    class Ones(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    block = Block(E, lambda dim: Ones(), lambda dim: Ones(), drop_path1=0.0, drop_path2=0.4, fused_dropout_add_ln=fused)
    x = torch.zeros(500, 3, E)
    _, total = block(x)
    rows = total.flatten(1)
    assert (rows == rows[:, :1]).all()
    kept = rows[:, 0] != 0
    torch.testing.assert_close(rows[kept, 0], torch.full((int(kept.sum()),), 1 / 0.6))
    assert abs(kept.float().mean() - 0.6) < 0.1
    _, total = block.eval()(x)
    assert (total == 1).all()


def test_stochastic_depth():
    x = torch.ones(3, 2)
    assert StochasticDepth(0.0)(x) is x and StochasticDepth(0.7).eval()(x) is x
    assert not StochasticDepth(1.0)(x).any()
    with pytest.raises(AssertionError, match="1.5"):
        StochasticDepth(1.5)


@pytest.mark.parametrize("cls", [Block, ParallelBlock])
@pytest.mark.parametrize("fused", [False, True])
def test_dropout_in_training_only(cls, fused):
    block = cls(E, MIXER, resid_dropout1=0.5, resid_dropout2=0.5, fused_dropout_add_ln=fused)
    x = torch.randn(B, S, E)
    assert not torch.equal(block(x)[-1], block(x)[-1])
    block.eval()
    assert torch.equal(block(x)[-1], block(x)[-1])


def test_defaults():
    block = Block(128)
    assert isinstance(block.mixer, MHA) and block.mixer.num_heads == 2 and block.mlp.fc1.out_features == 512
    keys = [f"{part}.{kind}" for part in ("mixer.Wqkv", "mixer.out_proj", "norm1") for kind in ("weight", "bias")]
    after = [f"{part}.{kind}" for part in ("mlp.fc1", "mlp.fc2", "norm2") for kind in ("weight", "bias")]
    assert list(block.state_dict()) == keys + after
    assert list(Block(128, mlp_cls=nn.Identity).state_dict()) == keys
    assert list(ParallelBlock(128).state_dict()) == keys + after
    assert list(ParallelBlock(128, tied_norm=True).state_dict()) == keys + after[:-2]
    for made in (block, ParallelBlock(128)):
        cache, narrow = (made.allocate_inference_cache(3, 10, *dtype) for dtype in ((), (torch.bfloat16,)))
        assert cache.shape == narrow.shape == (3, 10, 2, 2, 64)
        assert (cache.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("cls", [Block, ParallelBlock])
def test_marks_for_parallel_training(cls):
    for name, mark in (("sequence_parallel", "_sequence_parallel"), ("mark_shared_params", "_shared_params")):
        block = cls(E, MIXER, **{name: True})
        marked = [n for n, p in block.named_parameters() if getattr(p, mark, False)]
        assert marked == ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
        assert not any(hasattr(p, mark) for p in cls(E, MIXER).parameters())


def test_bad_constructions():
    with pytest.raises(AssertionError, match="prenorm=True"):
        Block(E, MIXER, prenorm=False, residual_in_fp32=True)
    for cls in (Block, ParallelBlock):
        with pytest.raises(AssertionError, match="not Identity and"):
            cls(E, MIXER, norm_cls=nn.Identity, fused_dropout_add_ln=True)
    with pytest.raises(AssertionError, match="one probability|resid_dropout2"):
        ParallelBlock(E, MIXER, resid_dropout1=0.1, fused_dropout_add_ln=True)
