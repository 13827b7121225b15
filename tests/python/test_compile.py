"""The functions as part of torch: operator checks, torch.compile, autocast, checkpointing, repeated backward."""

from __future__ import annotations

import copy

import cases
import harness
import pytest
import torch
from cases import Case
from torch import nn
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn import flash_attn_interface as interface

compiled = pytest.mark.requires_torch(2, 4, "torch.compile and torch.library.opcheck as used here came with torch 2.4")
AUTOCAST_DTYPES = [
    "bf16",
    pytest.param("fp16", marks=pytest.mark.requires_torch(2, 4, "CPU autocast to float16 came with torch 2.4")),
]
OPS = torch.ops.flash_attn
CU = torch.tensor([0, 5, 5, 14], dtype=torch.int32)


def tensors(*shapes, dtype=torch.float32, grad=True):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_(grad) for s in shapes]


def op_samples():
    """(name, args) for each operator of the package, dense and varlen."""
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    dense = tensors((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24))
    packed = tensors((14, 4, 16), (14, 2, 16), (14, 2, 16))
    rest = (0.0, 0.25, True, -1, -1, 0.0, slopes, False, False)
    with_dropout = (0.3, 0.25, False, 3, 2, 0.0, None, True, True)
    for tail in (rest, with_dropout):
        yield "attention", (*dense, None, None, 0, 0, *tail)
        yield "attention", (*packed, CU, CU, 9, 9, *tail)
        yield "attention_kvpacked", (*tensors((2, 7, 4, 16), (2, 9, 2, 2, 16)), None, None, 0, 0, *tail)
        yield "attention_kvpacked", (*tensors((14, 4, 16), (14, 2, 2, 16)), CU, CU, 9, 9, *tail)
        yield "attention_qkvpacked", (*tensors((2, 7, 3, 4, 16)), None, None, 0, 0, *tail)
        yield "attention_qkvpacked", (*tensors((14, 3, 4, 16)), CU, CU, 9, 9, *tail)
    bias, sink = tensors((1, 4, 7, 9), (4,))
    begin = torch.zeros(2, 7, dtype=torch.int32)
    yield "attention", (*dense, None, None, 0, 0, *rest, bias, torch.ones(2, 9).bool(), sink, begin, begin + 6)
    (bias,) = tensors((1, 1, 9, 9))
    end = torch.full((14,), 4, dtype=torch.int32)
    packed_q, packed_kv = tensors((14, 4, 16), (14, 2, 2, 16))
    yield "attention_kvpacked", (packed_q, packed_kv, CU, CU, 9, 9, *rest, bias, None, sink, None, end)
    dense, packed = ([x.detach() for x in group] for group in (dense, packed))
    for p in (0.0, 0.3):
        score = (0.25, True, -1, -1, 0.0, slopes)
        yield "_flash_attn_forward", (*dense, p, *score, p > 0)
        yield "_flash_attn_varlen_forward", (*packed, CU, CU, 9, 9, p, *score, p > 0)
        state = torch.tensor([3, 4])
        out, lse = torch.randn(2, 7, 4, 24), torch.randn(2, 4, 7)
        grads = [torch.empty_like(x) for x in dense]
        yield "_flash_attn_backward", (torch.randn_like(out), *dense, out, lse, *grads, p, *score, False, state)
        out, lse = torch.randn(14, 4, 16), torch.randn(4, 14)
        grads = [torch.empty_like(x) for x in packed]
        yield (
            "_flash_attn_varlen_backward",
            (torch.randn_like(out), *packed, out, lse, *grads, CU, CU, 9, 9, p, *score, False, state),
        )


SAMPLES = list(op_samples())


@compiled
@pytest.mark.feature("torch.compile")
@pytest.mark.parametrize("n", range(len(SAMPLES)), ids=[f"{n}-{name}" for n, (name, _) in enumerate(SAMPLES)])
def test_opcheck(n):
    """Schema, fake kernel, autograd registration and ahead-of-time dispatch, as torch.library checks them.

    A dropout op draws anew at each call, so torch's comparison of two calls' values needs a fixed seed per call: such
    samples get every check but that one, and test_dropout_under_compile_and_checkpoint has the values.
    """
    name, args = SAMPLES[n]
    op = getattr(OPS, name).default
    draws = "forward" in name or not name.startswith("_")
    p = next(a for a in args if isinstance(a, float))
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    if not (draws and p > 0):
        utils += ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(op, args, test_utils=utils)


@compiled
@pytest.mark.parametrize(
    "name",
    ["attention", "attention_kvpacked", "attention_qkvpacked", "_flash_attn_forward", "_flash_attn_varlen_forward"],
)
def test_ops_that_draw_say_so(name):
    """Without this tag compile + checkpointing recomputes another mask, silently."""
    assert torch.Tag.nondeterministic_seeded in getattr(OPS, name).default.tags


@pytest.mark.second_torch
@pytest.mark.parametrize(
    "name", ["_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward"]
)
def test_meta_results_have_the_real_shapes(name):
    """Sizes, strides and dtypes of the results on meta tensors are those of the real call."""
    for sample, args in SAMPLES:
        if sample == name:
            op = getattr(OPS, name).default
            real = op(*args)
            meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
            for a, b in zip(
                [real] if isinstance(real, torch.Tensor) else real, [meta] if isinstance(meta, torch.Tensor) else meta
            ):
                assert b.device.type == "meta"
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


class Block(nn.Module):
    """A transformer block, pre-norm, with a choice of public functions."""

    def __init__(self, style="qkv", width=48, H=3, dropout_p=0.0):
        super().__init__()
        self.style, self.H, self.dropout_p = style, H, dropout_p
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def attend(self, x):
        B, S, width = x.shape
        qkv = self.qkv(self.norm(x)).view(B, S, 3, self.H, width // self.H)
        if self.style == "qkv":
            return flash_attn_qkvpacked_func(qkv, dropout_p=self.dropout_p, causal=True)
        if self.style == "separate":
            return flash_attn_func(*qkv.unbind(2), dropout_p=self.dropout_p, causal=True, window_size=(40, 0))
        cu = torch.arange(B + 1, dtype=torch.int32) * S
        q, k, v = qkv.flatten(0, 1).unbind(1)
        return flash_attn_varlen_func(q, k, v, cu, cu, S, S, dropout_p=self.dropout_p, causal=True).view(B, S, -1, 16)

    def forward(self, x):
        return x + self.project(self.attend(x).flatten(2))


def loss_and_grads(block, x):
    block.zero_grad()
    x = x.detach().requires_grad_()
    y = block(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


@pytest.mark.requires_torch(2, 6, "its compiler makes a graph for every length")
@pytest.mark.feature("torch.compile", dtype="fp32")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("style", ["qkv", "separate", "varlen"])
def test_fullgraph_with_dynamic_length(style, backend):
    """One graph without breaks, forward and backward, compiled once for every length."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(style)
    frames = CompileCounterWithBackend(backend)
    fast = torch.compile(block, fullgraph=True, dynamic=True, backend=frames)
    compiled_graphs = []
    for S in (33, 70, 129):
        x = torch.randn(2, S, 48)
        for a, b in zip(loss_and_grads(fast, x), loss_and_grads(block, x)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        compiled_graphs.append(frames.frame_count)
    # The first call may trace twice, for dynamo first tries to keep float arguments symbolic.
    assert compiled_graphs == compiled_graphs[:1] * 3


@compiled
@pytest.mark.feature("torch.compile")
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp64"])
def test_compiled_dtypes(dtype):
    torch._dynamo.reset()
    inputs = harness.make_inputs(Case(dtype=dtype, lengths=((40, 90),), H=4, Hk=2, D=24, causal=True, alibi="BH"))

    def call(q, k, v, slopes):
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)

    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    out, lse, _ = fast(*inputs.leaves, inputs.alibi_slopes)
    expected, expected_lse, _ = call(*inputs.leaves, inputs.alibi_slopes)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    for a, b in zip(*(torch.autograd.grad(o, inputs.leaves, inputs.dout) for o in (out, expected))):
        assert torch.equal(a, b)


@compiled
def test_compiled_raw_functions():
    """Ring-attention libraries compile the raw functions, with gradients written into given buffers."""
    torch._dynamo.reset()
    q, k, v, dout = tensors(*((2, 30, 2, 16),) * 4, grad=False)

    def step(q, k, v, dout):
        out, lse, _, state = interface._flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        interface._flash_attn_backward(
            dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, True, -1, -1, 0.0, None, False, rng_state=state
        )
        return out, dq, dk, dv

    for a, b in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, dout), step(q, k, v, dout)):
        assert torch.equal(a, b)


@compiled
@pytest.mark.feature("activation checkpointing", "torch.compile", "dropout backward")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_under_compile_and_checkpoint(backend):
    """The recomputed forward must draw the mask of the first: the gradient is that of the loss that was returned.

    With dropout drawn once, loss(x) is a function; its directional derivative must match the gradient.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block("qkv", dropout_p=0.4).double()
    fast = torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), fullgraph=True, backend=backend)
    x, direction = torch.randn(2, 40, 48).double(), torch.randn(2, 40, 48).double()

    def loss(at):
        torch.manual_seed(7)
        return fast(at).square().sum()

    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(leaf), leaf)
    h = 1e-5
    slope = (loss((x + h * direction).requires_grad_()) - loss((x - h * direction).requires_grad_())) / (2 * h)
    assert abs((grad * direction).sum() - slope) < 1e-4 * abs(slope)


@pytest.mark.second_torch
@pytest.mark.feature("activation checkpointing")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, dtype):
    """Recomputation gives the gradients of the plain call, dropout included."""
    inputs = harness.make_inputs(Case(dtype=dtype, lengths=((60, 150),), D=16, dropout_p=0.3))

    def call(q, k, v):
        return flash_attn_func(q, k, v, dropout_p=0.3)

    torch.manual_seed(4)
    expected = torch.autograd.grad(call(*inputs.leaves), inputs.leaves, inputs.dout)
    torch.manual_seed(4)
    checkpoint(call, *inputs.leaves, use_reentrant=use_reentrant).backward(inputs.dout)
    assert all(torch.equal(a, x.grad) for a, x in zip(expected, inputs.leaves))


@pytest.mark.second_torch
@pytest.mark.parametrize("dtype", AUTOCAST_DTYPES)
@pytest.mark.parametrize("style", ["qkv", "separate", "varlen"])
def test_autocast(style, dtype):
    """Under autocast the projections give `dtype`, attention runs in it, and master gradients stay fp32."""
    torch_dtype = harness.TORCH_DTYPES[dtype]
    torch.manual_seed(0)
    block = Block(style)
    x = torch.randn(2, 130, 48)
    seen = []
    plain = copy.deepcopy(block)
    attend = block.attend
    block.attend = lambda x: seen.append(attend(x)) or seen[-1]
    with torch.autocast("cpu", dtype=torch_dtype):
        got = loss_and_grads(block, x)
    assert seen[0].dtype == torch_dtype
    for a, b in zip(got, loss_and_grads(plain, x)):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() < 0.03 * b.abs().max() + 1e-4


@pytest.mark.second_torch
@pytest.mark.feature("autocast")
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_autocast_leaves_arguments_alone(dtype):
    """As upstream: the call runs in the dtype of its arguments; autocast casts what feeds it, not the call."""
    inputs = harness.make_inputs(Case(dtype=dtype, lengths=((20, 30),), D=16, causal=True))
    expected, _, _ = harness.public_call(inputs)
    expected_grads = torch.autograd.grad(expected, inputs.leaves, inputs.dout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _, _ = harness.public_call(inputs)
        grads = torch.autograd.grad(out, inputs.leaves, inputs.dout)
    assert out.dtype == expected.dtype and torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected_grads))


@pytest.mark.second_torch
def test_retain_graph():
    """Fifty backward passes over one forward: saved tensors are neither freed nor changed."""
    inputs = harness.make_inputs(Case(lengths=((70, 130),), H=4, Hk=2, D=16, dropout_p=0.2))
    out, _, _ = harness.public_call(inputs)
    first = torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)
    for _ in range(50):
        again = torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.second_torch
@pytest.mark.parametrize("which", ["q", "k", "v", "none", "qk"])
def test_gradients_only_where_wanted(which):
    """Frozen inputs get no gradient, and the others the same as when all are wanted."""
    inputs = harness.make_inputs(Case(lengths=((30, 50),), D=16))
    out, _, _ = harness.public_call(inputs)
    expected = dict(zip("qkv", torch.autograd.grad(out, inputs.leaves, inputs.dout)))
    wanted = "" if which == "none" else which
    leaves = [x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", inputs.leaves)]
    out = flash_attn_func(*leaves)
    assert out.requires_grad == bool(wanted)
    if wanted:
        out.backward(inputs.dout)
    for name, x in zip("qkv", leaves):
        assert torch.equal(x.grad, expected[name]) if name in wanted else x.grad is None


@pytest.mark.second_torch
def test_saved_tensors_changed_in_place_are_noticed():
    q, k, v = tensors((1, 8, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16))
    out = flash_attn_func(q, k, v)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.second_torch
@pytest.mark.parametrize(
    "function, shapes",
    [
        (flash_attn.flash_attn_func, ((1, 8, 2, 16),) * 3),
        (flash_attn.flash_attn_kvpacked_func, ((1, 8, 2, 16), (1, 8, 2, 2, 16))),
        (flash_attn.flash_attn_qkvpacked_func, ((1, 8, 3, 2, 16),)),
    ],
    ids=["separate", "kv", "qkv"],
)
def test_double_backward_raises(function, shapes):
    leaves = tensors(*shapes)
    with pytest.raises(RuntimeError, match="(?i)(double|second|twice|not implemented|not differentiable)"):
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        sum(g.square().sum() for g in grads).backward()


@compiled
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_functorch_transforms_raise(transform):
    q, k, v = tensors((1, 8, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16), grad=False)

    def call(q):
        return flash_attn_func(q, k, v)

    with pytest.raises((RuntimeError, NotImplementedError)):
        if transform == "grad":
            torch.func.grad(lambda q: call(q).sum())(q)
        elif transform == "vmap":
            torch.func.vmap(call)(q[None])
        else:
            torch.func.jvp(call, (q,), (torch.ones_like(q),))


@compiled
@pytest.mark.feature("torch.compile")
def test_compiled_score_tables():
    """Bias, mask, sink, bounds and the gradient of the LSE in one graph."""
    torch._dynamo.reset()
    leaves = tensors((2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (1, 4, 1, 9), (4,))
    mask, end = torch.rand(2, 9) < 0.7, torch.full((2, 7), 8, dtype=torch.int32)

    def call(q, k, v, bias, sink):
        out, lse, _ = flash_attn_func(
            q, k, v, attn_bias=bias, attn_mask=mask, learnable_sink=sink, key_end=end, return_attn_probs=True
        )
        return out.square().sum() + lse.sum()

    fast = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (fast, call))):
        assert torch.equal(a, b)


def test_gradient_of_returned_extras():
    leaves = tensors((1, 8, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16))
    out, lse, s_dmask = flash_attn_func(*leaves, dropout_p=0.5, return_attn_probs=True)
    assert out.requires_grad and lse.requires_grad and not s_dmask.requires_grad
