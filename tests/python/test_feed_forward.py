"""Activations, linear layers, feed-forward blocks and the patch embedding against double precision."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_attn.layers.patch_embed import PatchEmbed
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.ops import activations, fused_dense
from flash_attn.ops.fused_dense import FusedDense, FusedMLP, fused_dense_func, fused_mlp_func

pytestmark = pytest.mark.second_torch


@pytest.fixture(autouse=True)
def seed(rng):
    pass


def gelu(x):
    """The tanh approximation, from its formula."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def squared_relu(x):
    return torch.clamp(x, min=0) ** 2


def swiglu(x, y):
    return x / (1 + torch.exp(-x)) * y


DIFFERENTIABLE = [
    (activations.fast_gelu_impl, gelu, [(4, 6)]),
    (activations.bias_gelu_impl, lambda y, b: gelu(y + b), [(2, 4, 6), (6,)]),
    (activations.swiglu, swiglu, [(2, 4, 6), (2, 4, 6)]),
]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("function, reference, shapes", DIFFERENTIABLE, ids=["gelu", "bias gelu", "swiglu"])
def test_differentiable_activations(function, reference, shapes, dtype, tolerance):
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, wanted = function(*leaves), reference(*exact)
    g = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, g), torch.autograd.grad(wanted, exact, g.double())
    for a, b in zip((out, *grads[0]), (wanted, *grads[1])):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= tolerance * (1 + b.abs().max())


@pytest.mark.parametrize(
    "forward, backward, reference",
    [
        (activations.gelu_fwd, activations.gelu_bwd, gelu),
        (activations.sqrelu_fwd, activations.sqrelu_bwd, squared_relu),
        (None, activations.relu_bwd, lambda x: torch.clamp(x, min=0)),
    ],
    ids=["gelu", "squared relu", "relu"],
)
def test_one_direction_each(forward, backward, reference):
    x, g = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.randn(5, 7, dtype=torch.float64)
    wanted = reference(x)
    if forward is not None:
        torch.testing.assert_close(forward(x), wanted)
        assert forward(x.half()).dtype == torch.float16
    torch.testing.assert_close(backward(g, x), torch.autograd.grad(wanted, x, g)[0])


def test_gradients_have_the_dtypes_of_what_they_belong_to():
    x, narrow, bias = torch.randn(2, 3, 6), torch.randn(2, 3, 6).bfloat16(), torch.randn(6)
    for backward in (activations.gelu_bwd, activations.sqrelu_bwd, activations.relu_bwd):
        assert backward(x, narrow).dtype == torch.bfloat16 and backward(narrow, x).dtype == torch.float32
    grads = activations.bias_gelu_back(x, narrow, bias)
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32] and grads[1].shape == (6,)
    assert [grad.dtype for grad in activations.swiglu_bwd(narrow, x, narrow)] == [torch.bfloat16, torch.float32]


def test_relu_passes_the_gradient_at_zero():
    assert activations.relu_bwd(torch.ones(3), torch.tensor([-1.0, 0.0, 1.0])).tolist() == [0, 1, 1]


def doubled(module):
    """The module's parameters by name, in fp64, as leaves."""
    return {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}


def linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)


def check(module, x, reference, tolerance=1e-5, **call):
    """Result and gradients of x and of every parameter."""
    leaf, p = x.clone().requires_grad_(), doubled(module)
    exact = x.double().requires_grad_()
    out, wanted = module(leaf, **call), reference(p, exact)
    g = torch.randn_like(out)
    got = torch.autograd.grad(out, [leaf, *module.parameters()], g)
    expected = torch.autograd.grad(wanted, [exact, *p.values()], g.double())
    assert out.shape == wanted.shape
    for a, b in zip((out, *got), (wanted, *expected)):
        assert (a.double() - b).abs().max() <= tolerance * (1 + b.abs().max())


EXACT = {
    F.relu: lambda x: torch.clamp(x, min=0),
    F.silu: lambda x: swiglu(x, 1),
    F.sigmoid: torch.sigmoid,
    F.gelu: F.gelu,
}


BIASES = pytest.mark.parametrize("biases", [(False, False), (True, True), (True, False), (False, True)])


def has_biases(module):
    return tuple(f"fc{n}.bias" in module.state_dict() for n in (1, 2))


@pytest.mark.parametrize("activation", [F.gelu, F.relu])
@BIASES
def test_mlp(activation, biases):
    module = Mlp(12, 20, 7, activation=activation, bias1=biases[0], bias2=biases[1])
    assert has_biases(module) == biases
    check(module, torch.randn(2, 3, 12), lambda p, x: linear(p, "fc2", EXACT[activation](linear(p, "fc1", x))))


@pytest.mark.parametrize("activation", [F.sigmoid, F.silu, F.gelu])
@BIASES
def test_gated_mlp(activation, biases):
    module = GatedMlp(12, 20, 7, activation=activation, bias1=biases[0], bias2=biases[1], multiple_of=16)
    assert has_biases(module) == biases

    def reference(p, x):
        values, gates = linear(p, "fc1", x)[..., :32], linear(p, "fc1", x)[..., 32:]
        return linear(p, "fc2", values * EXACT[activation](gates))

    check(module, torch.randn(2, 3, 12), reference)


def test_default_widths():
    assert {n: tuple(t.shape) for n, t in Mlp(12).state_dict().items()} == {
        "fc1.weight": (48, 12),
        "fc1.bias": (48,),
        "fc2.weight": (12, 48),
        "fc2.bias": (12,),
    }
    # 8/3 of 96 is 256, of 100 is 266, rounded up to 384.
    assert [GatedMlp(n).fc2.in_features for n in (96, 100)] == [256, 384]
    assert GatedMlp(100, multiple_of=1).fc1.out_features == 2 * 266


@pytest.mark.parametrize("cls", [Mlp, GatedMlp, FusedMLP])
def test_return_residual(cls):
    x = torch.randn(3, 8)
    module = cls(8, return_residual=True)
    y, same = module(x)
    assert same is x
    module.return_residual = False
    assert torch.equal(module(x), y)


ACTIVATIONS = {"gelu_approx": gelu, "relu": EXACT[F.relu], "sqrelu": squared_relu}


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("checkpoint_lvl", [0, 1, 2])
@BIASES
def test_fused_mlp(activation, checkpoint_lvl, biases):
    module = FusedMLP(12, 20, 7, *biases, activation=activation, checkpoint_lvl=checkpoint_lvl, heuristic=-1)
    assert has_biases(module) == biases
    check(module, torch.randn(2, 3, 12), lambda p, x: linear(p, "fc2", ACTIVATIONS[activation](linear(p, "fc1", x))))


@pytest.mark.parametrize(
    "checkpoint_lvl, saved, first_products, activated",
    [(0, True, 1, 1), (1, True, 1, 2), (2, True, 2, 2), (0, False, 2, 2)],
)
def test_checkpoint_levels(monkeypatch, checkpoint_lvl, saved, first_products, activated):
    """How often forward and backward together compute the first product and the activation."""
    module = FusedMLP(4, 6, 2, activation="relu", checkpoint_lvl=checkpoint_lvl)
    leaves = [torch.randn(3, 4, requires_grad=True), module.fc1.weight, module.fc2.weight]
    calls = []
    plain = F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, w, b: calls.append("first" if w is leaves[1] else "second") or plain(x, w, b)
    )
    monkeypatch.setitem(fused_dense.ACTIVATIONS, "relu", lambda x: calls.append("activation") or F.relu(x))
    options = dict(activation="relu", checkpoint_lvl=checkpoint_lvl, save_pre_act=saved)
    for function in [lambda x: fused_mlp_func(x, *leaves[1:], **options)] + [module] * saved:
        calls.clear()
        function(leaves[0]).sum().backward()
        assert (calls.count("first"), calls.count("activation")) == (first_products, activated)


def test_without_saved_products_gradients_are_the_same():
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4), (6, 4), (2, 6))]
    results = [torch.autograd.grad(fused_mlp_func(*leaves, save_pre_act=save).sum(), leaves) for save in (True, False)]
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def test_bad_arguments_of_fused_mlp():
    for changes, words in [
        (dict(activation="tanh"), "activation is 'tanh'"),
        (dict(checkpoint_lvl=3), "checkpoint_lvl is 3"),
        (dict(heuristic=7), "heuristic is 7"),
    ]:
        with pytest.raises(AssertionError, match=words):
            FusedMLP(8, **changes)


@pytest.mark.parametrize("cls", [Mlp, GatedMlp, FusedMLP, partial(FusedDense, out_features=5)])
def test_device_and_dtype(cls):
    parameters = list(cls(8, device="meta", dtype=torch.bfloat16).parameters())
    assert parameters and all(p.is_meta and p.dtype == torch.bfloat16 for p in parameters)


def test_fused_dense():
    module = FusedDense(6, 4)
    check(module, torch.randn(3, 6), lambda p, x: x @ p["weight"].T + p["bias"])
    x = torch.randn(3, 6)
    y, same = FusedDense(6, 4, return_residual=True)(x)
    assert same is x and y.shape == (3, 4)
    assert torch.equal(fused_dense_func(x, module.weight), x @ module.weight.T)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("options", [{}, dict(norm_layer=nn.LayerNorm), dict(fused_bias_fc=True), dict(bias=False)])
def test_patch_embed(flatten, options):
    """A convolution whose stride is its size, with the same weights."""
    module = PatchEmbed((24, 12), (8, 4), 3, 10, flatten=flatten, **options)
    assert (module.grid_size, module.num_patches) == ((3, 3), 9)
    images = torch.randn(2, 3, 24, 12)
    wanted = F.conv2d(images, module.proj.weight.view(10, 3, 8, 4), module.proj.bias, stride=(8, 4))
    wanted = wanted.permute(0, 2, 3, 1)
    wanted = module.norm(wanted.flatten(1, 2) if flatten else wanted)
    torch.testing.assert_close(module(images), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="24 x 12"):
        module(torch.randn(2, 3, 24, 16))


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
@pytest.mark.parametrize("make", [partial(GatedMlp, 8, activation=F.silu), partial(FusedMLP, 8)])
def test_compiled(make):
    torch._dynamo.reset()
    module, x = make(), torch.randn(3, 8, requires_grad=True)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(x).square().sum(), [x, *module.parameters()]) for f in (fast, module))):
        torch.testing.assert_close(a, b)


@pytest.mark.requires_torch(2, 4, "torch.compile as used here came with torch 2.4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function, reference, shapes", DIFFERENTIABLE, ids=["gelu", "bias gelu", "swiglu"])
def test_activations_compiled(function, reference, shapes, dtype):
    """Eager mode's gradients, which torch 2.11 makes zero where a forward ends in a `to` of the same dtype."""
    torch._dynamo.reset()
    leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    fast = torch.compile(lambda *x: function(*x), fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (fast, function))):
        torch.testing.assert_close(a, b)
