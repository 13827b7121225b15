"""flash_attn.FlashAttention and the module flash_attention_amd against their definition in double precision."""

import inspect
import math

import pytest
import torch
from harness import TORCH_DTYPES

import flash_attention_amd as guide
import flash_attn

pytestmark = pytest.mark.second_torch
B, H, D = 2, 4, 16
TOLERANCE = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 3e-2, "fp64": 1e-11}
MASKS = ["none", "keys", "rows", "one head", "heads"]
CORNER = {flash_attn.FlashAttention: "bottom right", guide.FlashAttention: "top left"}
CLASSES = pytest.mark.parametrize("cls", list(CORNER), ids=["flash_attn", "flash_attention_amd"])


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def visible_under(causal, corner, Sq, Sk):
    """(Sq,Sk): what a query sees."""
    shift = 0 if corner == "top left" else Sk - Sq
    return torch.ones(Sq, Sk, dtype=torch.bool).tril(shift) if causal else torch.ones(Sq, Sk, dtype=torch.bool)


def attend(q, k, v, visible):
    """(out, weights) in the dtype of the arguments; rows that see nothing are 0."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.masked_fill(~visible.any(-1, keepdim=True), 0.0).softmax(-1) * visible
    return torch.einsum("bhij,bjhd->bihd", weights, v), weights


def make_mask(kind, Sq, Sk):
    shape = {"keys": (B, Sk), "rows": (B, Sq, Sk), "one head": (B, 1, Sq, Sk), "heads": (B, H, Sq, Sk)}.get(kind)
    return None if shape is None else torch.rand(shape) < 0.7


def broadcast(mask, B, Sq, Sk):
    if mask is None:
        return torch.ones(B, 1, Sq, Sk, dtype=torch.bool)
    return mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask


def tensors(Sq, Sk, dtype="fp32", Hk=H):
    return [torch.randn(B, S, heads, D).to(TORCH_DTYPES[dtype]) for S, heads in ((Sq, H), (Sk, Hk), (Sk, Hk))]


def check(function, reference, inputs, tolerance):
    """All results and gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    got, wanted = function(*leaves), reference(*exact)
    got, wanted = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (got, wanted))
    directions = [torch.randn_like(r) for r in got]
    grads = torch.autograd.grad(got, leaves, directions)
    wanted_grads = torch.autograd.grad(wanted, exact, [d.double() for d in directions])
    for a, b in zip([*got, *grads], [*wanted, *wanted_grads]):
        assert a.dtype == inputs[0].dtype and a.shape == b.shape
        assert (a.double() - b).abs().max() <= tolerance * (1 + b.abs().max())


@CLASSES
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Sq, Sk", [(9, 9), (5, 12), (12, 5)])
def test_module(cls, dtype, mask, causal, Sq, Sk):
    module, given = cls(causal=causal), make_mask(mask, Sq, Sk)
    visible = broadcast(given, B, Sq, Sk) & visible_under(causal, CORNER[cls], Sq, Sk)
    inputs = tensors(Sq, Sk, dtype)
    check(lambda *x: module(*x, mask=given), lambda *x: attend(*x, visible)[0], inputs, TOLERANCE[dtype])


@CLASSES
def test_shared_keys_and_rows_without_keys(cls):
    mask = torch.rand(B, 7, 11) < 0.5
    mask[0, 3] = False
    inputs = tensors(7, 11, Hk=2)
    check(lambda *x: cls()(*x, mask), lambda *x: attend(*x, mask[:, None])[0], inputs, 1e-5)
    assert not cls()(*inputs, mask)[0, 3].any()


@CLASSES
def test_dropout_in_training_only(cls):
    inputs = tensors(8, 8)
    module = cls(dropout=0.5)
    assert not torch.equal(module(*inputs), module(*inputs))
    torch.testing.assert_close(module.eval()(*inputs), cls()(*inputs))


@CLASSES
def test_the_corner_of_causal(cls):
    """Values that name their key: the mean of those a row sees. They differ only when lengths do."""
    q, k = torch.zeros(1, 2, 1, D), torch.zeros(1, 4, 1, D)
    v = torch.arange(4.0)[None, :, None, None].expand(1, 4, 1, D)
    means = cls(causal=True)(q, k, v)[0, :, 0, 0].tolist()
    assert means == pytest.approx([0, 0.5] if CORNER[cls] == "top left" else [1, 1.5])


@CLASSES
def test_bad_masks(cls):
    inputs = tensors(5, 7)
    for causal in (False, True):
        for mask, words in [
            (torch.zeros(B, 7), "mask is torch.float32"),
            (torch.ones(B, 5, dtype=torch.bool), r"mask has shape \(2, 5\)"),
            (torch.ones(7, dtype=torch.bool), r"mask has shape \(7,\)"),
            (torch.ones(B, 2, 5, 7, dtype=torch.bool), r"\(2, 4, 5, 7\)"),
            (torch.ones(1, 1, 5, 7, dtype=torch.bool), r"mask has shape \(1, 1, 5, 7\)"),
        ]:
            with pytest.raises(AssertionError, match=words):
                cls(causal=causal)(*inputs, mask=mask)


def test_signatures():
    for cls in CORNER:
        assert str(inspect.signature(cls)) == "(dropout=0.0, causal=False)"
        assert str(inspect.signature(cls.forward)) == "(self, q, k, v, mask=None)"
        assert not cls().state_dict()
    function = "(q, k, v, dropout_p=0.0, causal=False, return_attn_probs=False)"
    assert str(inspect.signature(guide.flash_attn_func)) == function
    forward = "(ctx, q, k, v, dropout_p=0.0, causal=False)"
    assert str(inspect.signature(guide.FlashAttentionInterface.forward)) == forward
    assert guide.__version__ == flash_attn.__version__
    assert issubclass(guide.FlashAttention, torch.nn.Module) and "causal=True" in repr(guide.FlashAttention(0.1, True))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Sq, Sk, Hk", [(9, 9, 4), (5, 12, 2), (12, 5, 4)])
def test_function_with_probabilities(dtype, causal, Sq, Sk, Hk):
    visible = visible_under(causal, "top left", Sq, Sk)
    inputs = tensors(Sq, Sk, dtype, Hk)
    check(
        lambda *x: guide.flash_attn_func(*x, causal=causal, return_attn_probs=True),
        lambda *x: attend(*x, visible),
        inputs,
        TOLERANCE[dtype],
    )
    out = guide.flash_attn_func(*inputs, causal=causal)
    assert torch.equal(out, guide.flash_attn_func(*inputs, causal=causal, return_attn_probs=True)[0])
    assert torch.equal(out, guide.FlashAttentionInterface.forward(None, *inputs, causal=causal))


def test_function_drops_whenever_it_is_told_to():
    inputs = tensors(9, 9)
    first, second = (guide.flash_attn_func(*inputs, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    out, weights = guide.flash_attn_func(*inputs, dropout_p=0.5, return_attn_probs=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, 9))


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
@CLASSES
def test_compiled(cls):
    torch._dynamo.reset()
    mask = make_mask("keys", 5, 7)
    module = cls(causal=True)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in tensors(5, 7)]
    for a, b in zip(*(torch.autograd.grad(f(*leaves, mask=mask).square().sum(), leaves) for f in (fast, module))):
        torch.testing.assert_close(a, b)
