"""What a GPU adds to right results: repeats, streams, graphs, compilation."""

from __future__ import annotations

import pytest
import torch

import flash_attn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("config.getoption('device') != 'cuda'", reason="needs a real GPU")]

PAIRS = ((1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512),
         (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048))  # fmt: skip


def inputs(B, Sq, Sk, H, D, dtype=torch.float16, Hk=None, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    shapes = ((B, Sq, H, D), (B, Sk, Hk or H, D), (B, Sk, Hk or H, D))
    return [torch.randn(s, generator=g, device="cuda", dtype=dtype).requires_grad_() for s in shapes]


def attend(leaves, **kwargs):
    torch.manual_seed(42)
    out, lse, _ = flash_attn.flash_attn_func(*leaves, return_attn_probs=True, **kwargs)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("Sq, Sk", PAIRS)
def test_race_condition(Sq, Sk, D, causal, dropout_p):
    """The contract's loop (section 8.1): B = 60, H = 4, fp16, 250 repeats with the same bits; dq's too."""
    leaves = inputs(60, Sq, Sk, 4, D)
    first = attend(leaves, causal=causal, dropout_p=dropout_p)
    for _ in range(250):
        again = attend(leaves, causal=causal, dropout_p=dropout_p)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_two_streams():
    """Calls run on the current stream: work queued there before is seen, and streams do not wait for each other."""
    leaves = [inputs(2, 512, 512, 4, 64, seed=n) for n in range(2)]
    expected = [attend(x, causal=True) for x in leaves]
    streams = [torch.cuda.Stream() for _ in leaves]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, x in zip(streams, leaves):
            with torch.cuda.stream(stream):
                late = [y.detach() * 0 for y in x]
                torch.cuda._sleep(1_000_000)
                for a, b in zip(late, x):
                    a.copy_(b.detach())
                results.append(attend([y.requires_grad_() for y in late], causal=True))
        torch.cuda.synchronize()
        for got, want in zip(results, expected):
            assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_graph_capture_and_replay(dropout_p):
    """Forward and backward in one CUDA graph; a replay sees new inputs, and with dropout draws a new mask."""
    leaves = inputs(2, 300, 300, 4, 64, dtype=torch.bfloat16)
    dout = torch.randn_like(leaves[0])

    def step():
        out = flash_attn.flash_attn_func(*leaves, causal=True, dropout_p=dropout_p)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, captured)) == (dropout_p == 0)
    with torch.no_grad():
        leaves[0].mul_(0.5)
    graph.replay()
    assert not torch.equal(first[0], captured[0])
    if dropout_p == 0:
        assert all(torch.equal(a, b) for a, b in zip(captured, step()))


def test_first_call_inside_a_capture():
    """The code object may be loaded while a stream is captured: nothing of ours allocates on the stream."""
    leaves = inputs(1, 70, 70, 2, 250, dtype=torch.float16)  # kernels that nothing else here uses
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn.flash_attn_func(*(x.detach() for x in leaves), window_size=(9, 3))
    graph.replay()
    assert torch.equal(out, flash_attn.flash_attn_func(*(x.detach() for x in leaves), window_size=(9, 3)))


def test_decoding_in_a_graph():
    """New keys, rotation and attention over pages in one CUDA graph: each replay is a token further."""

    def cuda(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    caches = [cuda(16, 16, 2, 64), cuda(16, 16, 2, 64)]
    q, k, v, cos, sin = cuda(2, 1, 4, 64), cuda(2, 1, 2, 64), cuda(2, 1, 2, 64), cuda(128, 32), cuda(128, 32)
    table = torch.randperm(16, device="cuda").view(2, 8).int()
    used = torch.tensor([30, 3], device="cuda", dtype=torch.int32)

    def step(k_cache, v_cache, used):
        options = dict(rotary_cos=cos, rotary_sin=sin, cache_seqlens=used, block_table=table, causal=True)
        out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
        used.add_(1)
        return out

    eager = [x.clone() for x in (*caches, used)]
    expected = [step(*eager) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*caches, used)
    for out in expected:
        graph.replay()
        assert torch.equal(captured, out)
    assert all(torch.equal(a, b) for a, b in zip((*caches, used), eager))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    """torch.compile(fullgraph=True) gives eager's bits, forward and backward, at several lengths."""
    compiled = torch.compile(
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True), fullgraph=True, dynamic=dynamic
    )
    for S in (64, 200, 333):
        leaves = inputs(2, S, S, 4, 64, Hk=2)
        results = []
        for function in (compiled, lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True)):
            out = function(*leaves)
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        assert all(torch.equal(a, b) for a, b in zip(*results))


def test_calls_do_not_wait():
    """A call returns before the GPU has done what was queued before it."""
    leaves = [x.detach() for x in inputs(1, 128, 128, 2, 64)]
    flash_attn.flash_attn_func(*leaves)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    queued = torch.cuda.Event()
    queued.record()
    flash_attn.flash_attn_func(*leaves)
    assert not queued.query(), "the call waited for the GPU"
    torch.cuda.synchronize()


def test_another_device_index_is_refused_or_used():
    """Tensors of a call are on one device; the error names both."""
    q = torch.zeros(1, 8, 1, 64, device="cuda")
    with pytest.raises(RuntimeError, match="k is on cpu and q is on cuda:0"):
        flash_attn.flash_attn_func(q, q.cpu(), q.cpu())


def test_threads():
    """Calls from many host threads, each on its own stream, give the same bits."""
    from concurrent.futures import ThreadPoolExecutor

    leaves = [x.detach() for x in inputs(2, 256, 256, 4, 64)]
    expected = flash_attn.flash_attn_func(*leaves)
    torch.cuda.synchronize()

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            result = flash_attn.flash_attn_func(*leaves)
            torch.cuda.current_stream().synchronize()
            return torch.equal(result, expected)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_lengths_checked_on_demand():
    q = torch.zeros(60, 2, 64, device="cuda")
    cu = torch.tensor([0, 400, 60], device="cuda", dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens_q"):
        flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 400, 400, check_inputs=True)
    assert torch.isfinite(flash_attn.flash_attn_varlen_func(q, q, q, cu, cu, 400, 400)).all()
