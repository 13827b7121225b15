"""Tensors that are not plain strided memory, and tensors in the states that torch puts them into."""

from __future__ import annotations

import pytest
import torch

import flash_attn
from flash_attn import flash_attn_func
from flash_attn import flash_attn_interface as interface

modern = pytest.mark.requires_torch(2, 4, "this kind of tensor, as used here, came with torch 2.4")


def qkv(S=6, grad=False):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, S, 2, 16, generator=g).requires_grad_(grad) for _ in range(3)]


def nested(x, layout):
    return torch.nested.nested_tensor([x[0], x[1, :3]], layout=getattr(torch, layout))


@pytest.fixture
def mesh(tmp_path):
    """One process as a device mesh."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.second_torch
@pytest.mark.parametrize("position, name", list(enumerate("qkv")))
def test_none_is_named(position, name):
    tensors = qkv()
    tensors[position] = None
    with pytest.raises(TypeError, match=f"{name} is None"):
        flash_attn_func(*tensors)
    score = (0.0, 1.0, False, -1, -1, 0.0, None, False)
    with pytest.raises((RuntimeError, TypeError), match=rf"\b{name}\b"):
        interface._flash_attn_forward(*tensors, *score)
    with pytest.raises(TypeError, match=rf"{name}_cache is None" if position else "q is None"):
        flash_attn.flash_attn_with_kvcache(*tensors, cache_seqlens=1)


@modern
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
@pytest.mark.parametrize("position, name", list(enumerate("qkv")))
def test_nested(position, name, layout):
    tensors = qkv()
    tensors[position] = nested(tensors[position], layout)
    with pytest.raises(TypeError, match=rf"{name} is a nested tensor.*cu_seqlens"):
        flash_attn_func(*tensors)


@modern
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["alibi_slopes", "attn_bias", "attn_mask", "key_end"])
def test_nested_among_the_other_arguments(name):
    with pytest.raises(TypeError, match=f"{name} is a nested tensor"):
        flash_attn_func(*qkv(), **{name: nested(qkv()[0], "jagged")})


@modern
def test_what_to_pass_instead_of_a_nested_tensor():
    q, k, v = qkv()
    jagged = [nested(x, "jagged") for x in (q, k, v)]
    lengths = jagged[0].offsets().int()
    out = flash_attn.flash_attn_varlen_func(*(x.values() for x in jagged), lengths, lengths, 6, 6)
    assert torch.allclose(out[:6], flash_attn_func(q, k, v)[0], atol=1e-6)
    assert torch.allclose(out[6:], flash_attn_func(q[1:, :3], k[1:, :3], v[1:, :3])[0], atol=1e-6)


@modern
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked():
    q, k, v = qkv()
    masked = torch.masked.masked_tensor(k, torch.ones_like(k).bool())
    with pytest.raises(TypeError, match="k is a MaskedTensor.*attn_mask"):
        flash_attn_func(q, masked, v)


def test_what_is_made_of_a_refused_kind_is_refused_too():
    class DTensor(torch.Tensor):
        pass

    class Own(DTensor):
        pass

    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"k is a DTensor; pass k\.to_local\(\)"):
        flash_attn_func(q, k.as_subclass(Own), v)


@pytest.mark.requires_torch(2, 5, "torch.distributed.tensor came with torch 2.5")
def test_distributed(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    q, k, v = qkv()
    sharded = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    with pytest.raises(TypeError, match=r"v is a DTensor; pass v\.to_local\(\)"):
        flash_attn_func(q, k, sharded[2])
    assert torch.equal(flash_attn_func(*(x.to_local() for x in sharded)), flash_attn_func(q, k, v))
    with pytest.raises(TypeError, match=r"k is a DTensor; pass k\.to_local\(\)"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k=sharded[1][:, :1], v=v[:, :1], cache_seqlens=1)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "change, says",
    [
        (lambda x: x.to_sparse(), "layout Sparse"),
        (lambda x: x[0, 0].to_sparse_csr(), "layout SparseCsr"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"quantized.*dequantize\(\)"),
    ],
    ids=["sparse", "sparse CSR", "quantized"],
)
@pytest.mark.parametrize("position, name", list(enumerate("qkv")))
def test_layouts_without_kernels(position, name, change, says):
    tensors = qkv()
    tensors[position] = change(tensors[position])
    with pytest.raises(NotImplementedError, match=rf"\b{name} .*{says}"):
        flash_attn_func(*tensors)


@pytest.mark.second_torch
def test_parameters_and_plain_subclasses_are_tensors():
    class Tagged(torch.Tensor):
        pass

    tensors = qkv()
    expected = flash_attn_func(*tensors)
    out = flash_attn_func(*(torch.nn.Parameter(x) for x in tensors))
    assert torch.equal(out, expected) and out.requires_grad
    assert torch.equal(flash_attn_func(*(x.as_subclass(Tagged) for x in tensors)).as_subclass(torch.Tensor), expected)


@modern
def test_wrappers_answer_for_themselves():
    """A subclass that implements __torch_dispatch__ gets the operators; one that does not is named by torch."""
    from torch.testing._internal.two_tensor import TwoTensor

    q, k, v = qkv()
    out = flash_attn_func(*(TwoTensor(x, 2 * x) for x in (q, k, v)))
    assert torch.equal(out.a, flash_attn_func(q, k, v)) and torch.equal(out.b, flash_attn_func(2 * q, 2 * k, 2 * v))

    class Opaque(torch.Tensor):
        @staticmethod
        def __new__(cls, x):
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

        __torch_dispatch__ = classmethod(lambda cls, function, types, args=(), kwargs=None: NotImplemented)

    with pytest.raises(TypeError, match="Opaque"):
        flash_attn_func(Opaque(q), k, v)


@modern
def test_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        leaves = qkv(grad=True)
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (2, 6, 2, 16) and lse.shape == (2, 2, 6) and all(g.shape == out.shape for g in grads)


@pytest.mark.second_torch
def test_meta_tensors():
    leaves = [x.detach().to("meta").requires_grad_() for x in qkv()]
    out = flash_attn_func(*leaves, causal=True)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(x.is_meta and x.shape == (2, 6, 2, 16) for x in (out, *grads))
    with pytest.raises(RuntimeError, match="one device, got q on meta, k on cpu"):
        flash_attn_func(leaves[0], *qkv()[1:])


@pytest.mark.second_torch
def test_zero_sizes():
    """No keys, or no queries, is a call with a result; no batch, heads or head dim is an error that says which."""
    q, k, v = qkv(grad=True)
    out = flash_attn_func(q, k[:, :0], v[:, :0])
    assert out.eq(0).all() and torch.autograd.grad(out.sum(), q)[0].eq(0).all()
    assert flash_attn_func(q[:, :0], k, v).shape == (2, 0, 2, 16)
    for index, says in [((slice(0),), "batch size B"), ((..., slice(0), slice(None)), "H = 0"), ((..., slice(0)), "D")]:
        with pytest.raises(RuntimeError, match=says):
            flash_attn_func(q[index], k[index], v[index])


@pytest.mark.second_torch
def test_inference_mode():
    q, k, v = qkv()
    leaf = k.clone().requires_grad_()
    with torch.inference_mode():
        inside = q.clone()
        out = flash_attn_func(q, leaf, v)
    assert out.is_inference() and not out.requires_grad
    assert torch.equal(flash_attn_func(inside, k, v), out)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        flash_attn_func(inside, leaf, v)
