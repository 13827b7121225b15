"""What calls on a GPU promise beside right results: the same bits in every order, refusals, clamping, error texts."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import cases
import harness
import oracle
import philox
import pytest
import torch
from devices import SIMULATED, Device
from far_memory import spread

import flash_attn
from flash_attn import flash_attn_interface as interface
from flash_attn.testing import simulated, simulator_library

pytestmark = [pytest.mark.gpu, pytest.mark.simulated]

ORDERS = [("in-order", 0), ("round-robin", 0), *(("random", seed) for seed in range(3))]


def qkv(S=70, D=64, dtype=torch.bfloat16, H=2, Hk=1):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(1, S, heads, D, generator=g).to(dtype).requires_grad_() for heads in (H, Hk, Hk)]


@pytest.mark.parametrize("target", SIMULATED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_the_order_of_waves(target, dtype):
    inputs = qkv(S=150, dtype=dtype)
    results = []
    for schedule, seed in ORDERS:
        with simulated(target, schedule=schedule, seed=seed):
            torch.manual_seed(1)
            out = flash_attn.flash_attn_func(*inputs, dropout_p=0.2, causal=True)
            results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("window, slopes", [((-1, -1), None), ((30, 5), torch.tensor([0.05, 0.2]))])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", SIMULATED)
def test_dropout_masks_are_the_cpus(target, dtype, window, slopes):
    """Signs of S_dmask: those of the rebuilt mask and of the CPU backend's, bit for bit. Its values: the CPU's."""
    q, k, v = (x.detach() for x in qkv(S=77, D=40, dtype=harness.TORCH_DTYPES[dtype]))

    def masks():
        torch.manual_seed(5)
        _, _, s_dmask, rng_state = interface._flash_attn_forward(
            q, k, v, 0.3, 0.2, False, window_size_left=window[0], window_size_right=window[1], softcap=0.0,
            alibi_slopes=slopes, return_softmax=True
        )  # fmt: skip
        return s_dmask, rng_state

    s_cpu, rng_cpu = masks()
    with simulated(target):
        s_gpu, rng_gpu = masks()
    assert torch.equal(rng_cpu, rng_gpu)
    keep = philox.keep_mask(rng_cpu.tolist(), 0.3, 1, 2, 77, 77) & oracle.visible(77, 77, False, window)
    assert torch.equal(s_gpu > 0, keep) and torch.equal(s_cpu > 0, keep)
    assert (s_gpu.float() - s_cpu.float()).abs().max() < 2e-2


@pytest.fixture
def nan_where_nothing_is_written():
    """Memory that torch allocates holds NaN."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    "cu_q, cu_k, longest",
    [
        ((0, 400, 60), (0, 20, 90), (40, 50)),  # past the end, then decreasing
        ((-7, 30, 60), (5, 2, 2**30), (40, 50)),
        ((0, 30, 2**31 - 1), (-(2**31), 2**31 - 1, 90), (40, 50)),
        ((3, 3, 3), (7, 7, 7), (0, 0)),
    ],
)
@pytest.mark.parametrize("target", SIMULATED)
def test_lengths_in_gpu_memory_are_clamped(target, cu_q, cu_k, longest, nan_where_nothing_is_written):
    """Nothing outside of the tensors is touched (the simulator watches), and every output element is finite: 0 outside
    of all sequences and past their promised longest length."""
    q, k, v = (torch.randn(n, 2, 64).requires_grad_() for n in (60, 90, 90))
    cu = [torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k)]
    with simulated(target, schedule="random", seed=4):
        out = flash_attn.flash_attn_varlen_func(q, k, v, *cu, *longest, causal=True)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    for results, ends, most in (((out, grads[0]), cu[0], longest[0]), (grads[1:], cu[1], longest[1])):
        ends, outside = ends.clamp(0, len(results[0])).tolist(), torch.ones(len(results[0]), dtype=torch.bool)
        for begin, end in zip(ends, ends[1:]):
            outside[begin : min(begin + most, end)] = False
        assert all(x[outside].eq(0).all() for x in results)


@pytest.mark.parametrize("moved", ["q", "k", "v"])
@pytest.mark.parametrize(
    "offset, strides",
    [(1, (2**10, 256, 64, 1)), (0, (2**10 + 1, 256, 64, 1)), (0, (2**10, 257, 64, 1)), (0, (2**10, 256, 65, 1)),
     (0, (2**10, 2**22, 64, 1)), (0, (2**10, 256, 64, 1))],
)  # fmt: skip
def test_the_plain_variant_needs_aligned_tensors(moved, offset, strides):
    """Units of 16 bytes, of which rows of a block are less than 2^31 bytes apart."""
    tensors = dict.fromkeys("qkv", torch.zeros(2, 2, 2, 64, dtype=torch.bfloat16))
    tensors[moved] = torch.zeros(2**23, dtype=torch.bfloat16).as_strided((2, 2, 2, 64), strides, offset)
    with simulated("gfx942"):
        explanation = flash_attn.explain(*tensors.values())
    aligned = offset == 0 and strides == (2**10, 256, 64, 1)
    assert explanation.kernel == f"fa_forward_bf16_d64_{'plain' if aligned else 'general'}"


@pytest.mark.parametrize("target", SIMULATED)
def test_far_strides(target):
    """Batches, rows or heads more than 2^32 elements apart."""
    near = [torch.randn(2, 3, 2, 64, dtype=torch.bfloat16) for _ in range(4)]

    def results(place):
        *leaves, dout = (place(x) for x in near)
        leaves = [x.requires_grad_() for x in leaves]
        out = flash_attn.flash_attn_func(*leaves, causal=True)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    with simulated(target):
        expected = results(torch.clone)
        for dim in range(3):
            got = results(functools.partial(spread, dim=dim))
            assert all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in zip(got, expected))


@pytest.mark.parametrize("target", SIMULATED)
def test_check_inputs_reads_the_lengths(target):
    q = torch.randn(60, 2, 64)
    cu = torch.tensor((0, 400, 60), dtype=torch.int32)
    with simulated(target):
        with pytest.raises(RuntimeError, match="cu_seqlens_q"):
            flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 400, 400, check_inputs=True)
        good = torch.tensor((0, 20, 60), dtype=torch.int32)
        checked = flash_attn.flash_attn_varlen_func(q, q, q, good, good, 40, 40, check_inputs=True)
        assert torch.equal(checked, flash_attn.flash_attn_varlen_func(q, q, q, good, good, 40, 40))


def too_wide(target):
    rows = [f"head dim 257 to 576 {way}" for way in ("forward", "backward")]
    return pytest.mark.feature(*rows, dtype="*", backend=Device(target).backend, missing=True)


@pytest.mark.parametrize("target", [pytest.param(target, marks=too_wide(target)) for target in SIMULATED])
def test_what_there_is_no_kernel_for(target):
    wide = torch.zeros(1, 4, 1, 264)
    double = torch.zeros(1, 4, 1, 64, dtype=torch.float64)
    with simulated(target):
        with pytest.raises(NotImplementedError, match=f"on {target} .*D = 264.*up to D = 256"):
            flash_attn.flash_attn_func(wide, wide, wide)
        with pytest.raises(NotImplementedError, match="float64.*accepted dtypes"):
            flash_attn.flash_attn_func(double, double, double)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("attn_bias", torch.zeros(1, 1, 1, 8)),
        ("attn_mask", torch.ones(1, 8, dtype=torch.bool)),
        ("learnable_sink", torch.zeros(1)),
        ("key_begin", torch.zeros(1, 8, dtype=torch.int32)),
    ],
)
@pytest.mark.parametrize("target", SIMULATED)
def test_features_that_gpus_lack_are_refused_by_name(target, argument, value):
    q = torch.zeros(1, 8, 1, 64)
    with simulated(target), pytest.raises(NotImplementedError, match=argument):
        flash_attn.flash_attn_func(q, q, q, **{argument: value})


def test_a_gpu_without_code_objects_is_named_with_the_remedy():
    """gfx1200 runs the same kernels as gfx1201, but only exact targets are compiled."""
    q = torch.zeros(1, 8, 1, 64)
    with simulated("gfx1200"), pytest.raises(NotImplementedError, match="gfx1200.*gfx942.*GPU_ARCHS=gfx1200"):
        flash_attn.flash_attn_func(q, q, q)


def test_simulations_end_and_do_not_nest():
    q = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ZeroDivisionError), simulated("gfx942"):
        assert flash_attn.explain(q, q, q).backend == "gpu"
        with pytest.raises(RuntimeError, match="active already"), simulated("gfx1201"):
            pass
        assert flash_attn.explain(q, q, q).instruction_set == "gfx942"
        1 / 0  # noqa: B018
    assert flash_attn.explain(q, q, q).backend == "cpu"
    with pytest.raises(RuntimeError, match="gfx000"), simulated("gfx000"):
        pass
    with pytest.raises(RuntimeError, match="in-order.*sideways"), simulated("gfx942", schedule="sideways"):
        pass
    with pytest.raises(RuntimeError, match="FLASH_ATTN_HIP_LIBRARY"), simulated("gfx942", library="/nowhere/lib.so"):
        pass
    assert flash_attn.explain(q, q, q).backend == "cpu"


@pytest.mark.parametrize("target", SIMULATED)
def test_the_runtime_is_found_through_the_variable(target):
    """The path that real GPUs take: dlopen of $FLASH_ATTN_HIP_LIBRARY, device properties, targets."""
    code = "from flash_attn import _native; print(_native.load()._gpus())"
    env = {**os.environ, "FLASH_ATTN_HIP_LIBRARY": simulator_library(), "GFXSIM_TARGET": target}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert f"'target': '{target}'" in done.stdout and "HIP" in done.stdout, done.stdout


def test_a_broken_runtime_says_what_was_tried(tmp_path):
    broken = tmp_path / "libamdhip64.so"
    broken.write_text("not a library")
    code = "from flash_attn import _native; _native.load()._gpus()"
    env = {**os.environ, "FLASH_ATTN_HIP_LIBRARY": str(broken)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and str(broken) in done.stderr and "FLASH_ATTN_HIP_LIBRARY" in done.stderr, done.stderr


def test_s_dmask_shapes_of_varlen():
    case = cases.Case(dtype="bf16", varlen=True, lengths=((5, 9), (0, 3), (30, 70)), slack=(2, 2), dropout_p=0.4)
    for target in SIMULATED:
        harness.check(case, device=Device(target, "random", 9))
