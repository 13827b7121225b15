"""The functions in torch's other machinery: transforms, export, TorchScript, the profiler, pickles, processes."""

from __future__ import annotations

import copy
import io
import os
import pathlib
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import flash_attn
import flash_attn_2_cuda
from flash_attn import flash_attn_func
from flash_attn import flash_attn_interface as interface
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules.block import Block
from flash_attn.modules.mha import MHA, FlashSelfAttention

ROOT = pathlib.Path(flash_attn.__file__).resolve().parents[1]
modern = pytest.mark.requires_torch(2, 4, "torch.compile, torch.func and torch.export as used here came with torch 2.4")
OPS = torch.ops.flash_attn


def qkv(S=6, grad=False):
    g = torch.Generator().manual_seed(S)
    return [torch.randn(2, S, 2, 16, generator=g).requires_grad_(grad) for _ in range(3)]


def mha(**options):
    torch.manual_seed(0)
    return MHA(32, 2, use_flash_attn=True, causal=True, rotary_emb_dim=8, **options)


class Attend(nn.Module):
    def forward(self, q, k, v):
        return flash_attn_func(q, k, v, causal=True)


# Derivatives that do not exist


@modern
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "jacrev", "hessian"])
def test_function_transforms_are_refused(transform):
    q, k, v = qkv()
    calls = {
        "vmap": lambda f: torch.func.vmap(f)(q[None]),
        "jvp": lambda f: torch.func.jvp(f, (q,), (q,)),
        "vjp": lambda f: torch.func.vjp(f, q),
    }
    default = getattr(torch.func, transform)
    call = calls.get(transform, lambda f: default(lambda x: f(x).sum())(q))
    for attend in (flash_attn_func, flash_attn.flash_attn_with_kvcache):
        with pytest.raises(NotImplementedError, match=r"flash_attn.*torch\.func.*use \.backward\(\)"):
            call(lambda x: attend(x, k, v))  # noqa: B023


@pytest.mark.second_torch
@pytest.mark.parametrize("which", range(3))
def test_forward_mode_is_refused(which):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        tensors = qkv()
        tensors[which] = forward_ad.make_dual(tensors[which], tensors[which])
        with pytest.raises(NotImplementedError, match="flash_attn.*no forward-mode derivative"):
            flash_attn_func(*tensors)


@pytest.mark.second_torch
def test_second_derivative_is_refused():
    q, k, v = qkv(grad=True)
    with pytest.raises(NotImplementedError, match="flash_attn.*no second derivative"):
        torch.autograd.grad(flash_attn_func(q, k, v).sum(), q, create_graph=True)


# Autocast


@modern
def test_autocast_casts_nothing():
    """Autocast decides about torch's own operators; q, k, v of attention keep the dtype that they come with."""
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_attn_func(q, k, v).dtype == torch.float32
        assert mha()(torch.randn(2, 6, 32)).dtype == torch.bfloat16  # its projections are cast


@pytest.mark.requires_torch(2, 10, "compiled autograd as set here")
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}, {"window_size": (2, 0), "softcap": 5.0}], ids=str)
def test_compiled_autograd_of_an_eager_call(options):
    """A backward pass that torch compiles where forward was not."""
    from torch._dynamo import compiled_autograd

    def gradients():
        leaves = qkv(grad=True)
        torch.manual_seed(1)
        out = flash_attn_func(*leaves, **options)
        out.sin().sum().backward()
        return [x.grad for x in leaves]

    wanted = gradients()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        got = gradients()
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b)


# torch.export and TorchScript


@modern
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export(strict):
    """One operator in the graph, any length, the same bits after saving and loading."""
    S = torch.export.Dim("S", min=2, max=64)
    program = torch.export.export(Attend(), tuple(qkv()), strict=strict, dynamic_shapes=({1: S},) * 3)
    assert OPS.attention.default in [node.target for node in program.graph.nodes]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file)):
        assert torch.equal(exported.module()(*qkv(9)), Attend()(*qkv(9)))


class AttendPacked(nn.Module):
    def forward(self, rows, cu_seqlens, longest, window):
        lengths = cu_seqlens, cu_seqlens, longest, longest
        return flash_attn.flash_attn_varlen_func(rows, rows, rows, *lengths, window_size=window)


@pytest.mark.requires_torch(2, 10, "export of numbers that tensors hold")
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export_of_numbers_in_tensors(strict):
    arguments = torch.randn(10, 2, 16), torch.tensor([0, 4, 10]).int(), torch.tensor(6), torch.tensor([3, 1])
    program = torch.export.export(AttendPacked(), arguments, strict=strict)
    others = *arguments[:2], torch.tensor(7), torch.tensor([2, 0])
    assert torch.equal(program.module()(*others), AttendPacked()(*others))


@modern
@pytest.mark.parametrize(
    "strict",
    [
        pytest.param(True, id="strict"),
        pytest.param(False, id="non-strict", marks=pytest.mark.requires_torch(2, 6, "it refuses what a trace made")),
    ],
)
def test_export_of_rotation_in_place(strict):
    """The exported graph rotates queries and keys too, and the module still works afterwards."""
    module, x = mha(), torch.randn(2, 6, 32)
    expected = module(x)
    for fresh in (module, mha()):
        program = torch.export.export(fresh, (x,), strict=strict)
        assert torch.equal(program.module()(x), expected)
        assert torch.equal(program.run_decompositions().module()(x), expected)
        assert torch.equal(fresh(x), expected)


@modern
def test_export_of_a_cache():
    class Decode(nn.Module):
        def forward(self, q, k_cache, v_cache, k, v, lengths):
            return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)

    def arguments():
        return (qkv(1)[0], *(x.clone() for x in qkv(8)[1:]), *qkv(1)[1:], torch.tensor([3, 5], dtype=torch.int32))

    program = torch.export.export(Decode(), arguments())
    ours, theirs = arguments(), arguments()
    assert torch.equal(program.module()(*theirs), Decode()(*ours))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs)) and not torch.equal(ours[1], arguments()[1])


@modern
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript():
    """Traces hold the operator; scripts call it, since TorchScript has no compiler for the Python functions."""

    class Script(nn.Module):
        def forward(self, q, k, v):
            return torch.ops.flash_attn.attention(
                q, k, v, None, None, 0, 0, 0.0, 0.25, True, -1, -1, 0.0, None, False, False
            )[0]

    for compiled in (torch.jit.trace(Attend(), qkv()), torch.jit.script(Script())):
        assert torch.equal(compiled(*qkv(9)), Attend()(*qkv(9)))
    with pytest.raises(Exception, match="'?flash_attn_func"):
        torch.jit.script(Attend())


# The profiler


def names(call):
    with torch.profiler.profile() as profile:
        call()
    return {event.name for event in profile.events()}


@pytest.mark.second_torch
def test_profiler_shows_forward_and_backward():
    q, k, v = qkv(grad=True)
    seen = names(lambda: flash_attn_func(q, k, v).sum().backward())
    assert {f"flash_attn::attention{part}" for part in ("", "_forward", "_backward")} <= seen
    assert any("AttentionFunction" in name for name in seen)


@pytest.mark.second_torch
def test_profiler_shows_raw_functions_and_the_cache():
    q, k, v = qkv()
    rest = (None, 0.0, 1.0, False, -1, -1, 0.0)
    assert "flash_attn_2_cuda::fwd" in names(lambda: flash_attn_2_cuda.fwd(q, k, v, None, *rest, False, None))
    out, lse, _, _ = flash_attn_2_cuda.fwd(q, k, v, None, *rest, False, None)
    grads = (None, None, None)
    assert "flash_attn_2_cuda::bwd" in names(
        lambda: flash_attn_2_cuda.bwd(out, q, k, v, out, lse, *grads, *rest, False, None, None)
    )
    raw = names(lambda: interface._flash_attn_forward(q, k, v, *rest[1:], None, False))
    assert "flash_attn::_flash_attn_forward" in raw
    cache = names(lambda: flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=2))
    assert "flash_attn::attention_with_kvcache" in cache


# Pickles and copies

MODULES = {
    "FlashAttention": lambda: flash_attn.FlashAttention(dropout=0.1, causal=True),
    "FlashSelfAttention": lambda: FlashSelfAttention(causal=True, window_size=(3, 0)),
    "RotaryEmbedding": lambda: RotaryEmbedding(8, scale_base=512),
    "MHA": mha,
    "Block": lambda: Block(32, lambda dim: MHA(dim, 2, use_flash_attn=True, causal=True)),
}


@pytest.mark.second_torch
@pytest.mark.parametrize("name", MODULES)
def test_modules_are_pickled_and_copied(name):
    module = MODULES[name]().eval()
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert repr(twin) == repr(module) and type(twin) is type(module)
        assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), module.state_dict().values()))


@pytest.mark.second_torch
def test_copies_of_a_used_module_compute_the_same():
    """Tables that a call has built travel along, and nothing of the graph does."""
    module, x = mha().eval(), torch.randn(2, 6, 32)
    expected = module(x)
    for twin in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(twin(x), expected)


@pytest.mark.second_torch
def test_functions_and_explanations_are_pickled():
    functions = [getattr(interface, n) for n in dir(interface) if n.startswith("flash_attn_") and n.endswith("func")]
    functions += [flash_attn.flash_attn_with_kvcache, interface._flash_attn_forward, interface.FlashAttnFunc]
    assert len(functions) == 9 and all(pickle.loads(pickle.dumps(f)) is f for f in functions)
    apply = interface.FlashAttnVarlenFunc.apply
    assert pickle.loads(pickle.dumps(apply)) is apply
    explanation = flash_attn.explain(*qkv())
    assert pickle.loads(pickle.dumps(explanation)) == copy.deepcopy(explanation) == explanation


# Processes

SPAWN = """
import torch, torch.multiprocessing as mp

def work(module, q, queue):
    torch.set_num_threads(1)
    queue.put(module(q, q, q).sum().item())

if __name__ == "__main__":
    import flash_attn
    torch.set_num_threads(1)
    module, q = flash_attn.FlashAttention(causal=True), torch.randn(1, 40, 2, 16)
    expected = module(q, q, q).sum().item()
    for method in ("spawn", "fork"):
        context = mp.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=work, args=(module, q, queue))
        process.start()
        got = queue.get()
        process.join()
        assert (process.exitcode, got) == (0, expected), (method, process.exitcode, got, expected)
    print("same")
"""


def python(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.second_torch
def test_spawned_and_forked_processes(tmp_path):
    """A module and a tensor travel to another process, which computes the same."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = python(script)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


def all_modules():
    files = sorted((ROOT / "flash_attn").rglob("*.py"))
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    inside = [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts if p[-1] != "__main__"]
    # Nothing else needs Triton, which is not among the requirements; the Triton backend has a suite of its own.
    inside = [name for name in inside if not name.startswith("flash_attn.flash_attn_triton_amd")]
    return [*inside, "flash_attn_interface", "flash_attn_2_cuda", "flash_attention_amd"]


@modern
def test_importing_every_module_warns_of_nothing():
    modules = all_modules()
    assert {"flash_attn", "flash_attn.layers.rotary", "flash_attn.ops.triton.cross_entropy"} <= set(modules)
    done = python("-W", "error", "-c", "\n".join(f"import {name}" for name in modules))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
