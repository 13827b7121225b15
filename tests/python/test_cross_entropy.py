"""Cross entropy against its definition in double precision, gradients included."""

import inspect
import math

import pytest
import torch
from harness import TORCH_DTYPES

from flash_attn.losses import cross_entropy as losses
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

pytestmark = pytest.mark.second_torch
T, V = 13, 37
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2, "fp64": 1e-11}


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def make(dtype="fp32", ignore_index=-100):
    logits = (3 * torch.randn(T, V)).to(TORCH_DTYPES[dtype])
    labels = torch.randint(V, (T,))
    labels[[2, 7]] = ignore_index
    return logits, labels


def expected(logits, labels, smoothing=0.0, scale=1.0, square=0.0, ignore_index=-100):
    """Losses and z losses, row by row, in fp64."""
    losses, z_losses = [], []
    for row, label in zip(logits.double() * scale, labels.tolist()):
        if label == ignore_index:
            losses.append(0 * row.sum())
            z_losses.append(0 * row.sum())
            continue
        lse = row.exp().sum().log()
        z_losses.append(square * lse**2)
        losses.append(lse - (1 - smoothing) * row[label] - smoothing * row.mean() + z_losses[-1])
    return torch.stack(losses), torch.stack(z_losses)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("square", [0.0, 0.01])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("known_lse", [False, True])
def test_loss_and_gradient(dtype, smoothing, scale, square, inplace, known_lse):
    logits, labels = make(dtype)
    lse = torch.logsumexp(logits.double(), dim=-1) if known_lse else None
    exact = logits.double().requires_grad_()
    wanted, wanted_z = expected(exact, labels, smoothing, scale, square)
    leaf = logits.clone().requires_grad_()
    # Not a leaf, so that its memory may be reused.
    used = leaf * 1
    losses, z_losses = cross_entropy_loss(used, labels, lse, smoothing, scale, square, inplace_backward=inplace)
    assert losses.dtype == z_losses.dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    assert losses.requires_grad and not z_losses.requires_grad
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(z_losses.double(), wanted_z, rtol=1e-5, atol=1e-5)
    weights = torch.randn(T).to(losses.dtype)
    before = used.detach().clone()
    (grad,) = torch.autograd.grad(losses, leaf, weights)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, weights.double())
    assert grad.dtype == logits.dtype
    assert (grad.double() - wanted_grad).abs().max() <= TOLERANCE[dtype] * (1 + wanted_grad.abs().max())
    assert not grad[[2, 7]].any()
    assert torch.equal(used.detach(), grad if inplace else before)


@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64])
def test_label_dtypes_and_ignored_labels(int_dtype):
    logits, labels = make(ignore_index=5)
    wanted, _ = expected(logits, labels, ignore_index=5)
    losses, _ = cross_entropy_loss(logits, labels.to(int_dtype), ignore_index=5)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not losses[[2, 7]].any()


def test_large_logits():
    """Sums of exponentials that fp32 does not hold."""
    logits = torch.tensor([[1e4, 1e4, -1e4], [-1e4, -1e4, -1e4]])
    losses, _ = cross_entropy_loss(logits, torch.tensor([1, 2]))
    torch.testing.assert_close(losses, torch.tensor([math.log(2), math.log(3)]), rtol=1e-3, atol=1e-3)


def test_agrees_with_torch():
    logits, labels = make("fp64")
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    ours = CrossEntropyLoss(label_smoothing=0.1)(leaves[0], labels)
    theirs = torch.nn.functional.cross_entropy(leaves[1], labels, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("return_z_loss", [False, True])
def test_module(reduction, return_z_loss):
    logits, labels = make()
    module = CrossEntropyLoss(reduction=reduction, lse_square_scale=0.02, return_z_loss=return_z_loss)
    assert not module.state_dict()
    wanted = expected(logits, labels, square=0.02)
    reduce = {"mean": lambda x: x.sum() / (T - 2), "sum": torch.sum, "none": lambda x: x}[reduction]
    got = module(logits.requires_grad_(), labels)
    got = got if return_z_loss else (got,)
    assert got[0].requires_grad and not any(z.requires_grad for z in got[1:])
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a.detach().double(), reduce(b), rtol=1e-5, atol=1e-5)
    lse = torch.logsumexp(logits.detach(), dim=-1)
    again = module(logits, labels, precomputed_lse=lse)
    torch.testing.assert_close(again[0] if return_z_loss else again, got[0])


def test_module_refuses_other_reductions():
    with pytest.raises(NotImplementedError, match="'median'"):
        CrossEntropyLoss(reduction="median")


@pytest.mark.parametrize(
    "words, changes",
    [
        ("logits has shape", dict(logits=torch.zeros(2, 3, 4))),
        ("logits has dtype torch.int64", dict(logits=torch.zeros(T, V, dtype=torch.int64))),
        ("labels has dtype torch.float32", dict(labels=torch.zeros(T))),
        ("labels has shape", dict(labels=torch.zeros(T + 1, dtype=torch.int64))),
        ("logit_scale is 0", dict(logit_scale=0)),
        ("precomputed_lse has shape", dict(precomputed_lse=torch.zeros(T, 1))),
    ],
)
def test_bad_arguments(words, changes):
    logits, labels = make()
    with pytest.raises(AssertionError, match=words):
        cross_entropy_loss(**{"logits": logits, "labels": labels, **changes})


def test_labels_beyond_the_classes_raise():
    logits, _ = make()
    with pytest.raises(RuntimeError, match="out of bounds"):
        cross_entropy_loss(logits, torch.full((T,), V))


def test_second_derivative_raises():
    logits, labels = make()
    losses, _ = cross_entropy_loss(logits.requires_grad_(), labels)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(losses.sum(), logits, create_graph=True)


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
def test_compiled():
    torch._dynamo.reset()
    logits, labels = make()
    fast = torch.compile(
        lambda x: CrossEntropyLoss(label_smoothing=0.1)(x, labels), fullgraph=True, backend="aot_eager"
    )
    results = []
    for function in (fast, CrossEntropyLoss(label_smoothing=0.1)):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf) if function is fast else function(leaf, labels)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_module_passes_every_argument_on(monkeypatch):
    """What it was made with, and the caller's precomputed_lse, in the order of cross_entropy_loss."""
    given = {"label_smoothing": 0.1, "logit_scale": 0.7, "lse_square_scale": 0.01, "ignore_index": 5}
    given.update(inplace_backward=True, process_group="group")
    logits, labels = make(ignore_index=5)
    calls = []

    def noted(*args):
        calls.append(args)
        return torch.ones(T), torch.full((T,), 2.0)

    monkeypatch.setattr(losses, "cross_entropy_loss", noted)
    assert losses.CrossEntropyLoss(**given)(logits, labels, "lse") == T / (T - 2)
    names = list(inspect.signature(cross_entropy_loss).parameters)
    assert dict(zip(names, calls[0])) == {"logits": logits, "labels": labels, "precomputed_lse": "lse", **given}
