"""Keys in ranges on GPUs: any number of them gives what one gives, and each is weighed as much as its keys."""

from __future__ import annotations

import pytest
import test_gpu_kvcache as stored
import test_kvcache as serving
import torch

from flash_attn import explain, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu


def pytest_generate_tests(metafunc):
    every, few = stored.devices(metafunc.config)
    metafunc.parametrize("device", every + few, ids=lambda device: device.name)


@pytest.fixture(autouse=True)
def _needs_code(device):
    stored.needs_code_of(device)


def test_no_queries(device):
    """There is nothing to be lent, and nothing to be written but the rows outside of sequences."""
    cache = torch.randn(2, 40, 2, 16).to(device.torch_name)
    cu_seqlens = torch.zeros(3, dtype=torch.int32, device=device.torch_name)
    with device.scope():
        out = flash_attn_with_kvcache(cache[:, :0], cache, cache, num_splits=3)
        rows = flash_attn_varlen_func(cache[0, :0], cache[0], cache[0], cu_seqlens, cu_seqlens, 5, 40, num_splits=3)
        slack = flash_attn_varlen_func(cache[0, :4], cache[0], cache[0], cu_seqlens, cu_seqlens, 5, 40, num_splits=3)
    assert out.shape == (2, 0, 2, 16) and rows.shape == (0, 2, 16) and not slack.any()


@pytest.mark.parametrize("num_splits", (2, 3, 128))
@pytest.mark.parametrize("dtype", ("bf16", "fp16", "fp32"))
def test_ranges_with_few_or_no_keys(dtype, num_splits, device):
    """Sequences of 0, 1 and 130 keys; more ranges than steps; queries that see none of any range."""
    row = {**serving.PLAIN, "dtype": dtype, "Sq": 3, "new": 0, "storage": "page 16", "num_splits": num_splits}
    call = serving.make_call(row)
    call.cache_seqlens = torch.tensor([0, 1, 130], dtype=torch.int32)
    serving.check(call, dtype, device)


def test_a_whole_cache(device):
    """No lengths or tables: other variants take no ranges."""
    q, k = torch.randn(2, 9, 4, 40).half(), torch.randn(2, 300, 2, 40).half()
    expected = flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[:2]
    q, k = q.to(device.torch_name), k.to(device.torch_name)
    with device.scope():
        got = flash_attn_with_kvcache(q, k, k, causal=True, num_splits=4, return_softmax_lse=True)
    for x, y in zip(got, expected):
        torch.testing.assert_close(x.cpu(), y, rtol=2e-3, atol=2e-3)


def test_packed_rows_outside_of_sequences(device):
    """They are 0, and their LSE is +inf, with rows of scratch memory that no range writes."""
    dtype, cu_q, cu_k = torch.bfloat16, torch.tensor([2, 5, 5, 9]).int(), torch.tensor([0, 150, 150, 400]).int()
    q, k = torch.randn(13, 4, 64).to(dtype), torch.randn(410, 2, 64).to(dtype)
    used = torch.tensor([150, 0, 140]).int()
    arguments = [x.to(device.torch_name) for x in (q, k, k, cu_q, cu_k)]
    with device.scope():
        results = [
            flash_attn_varlen_func(*arguments, 4, 250, causal=True, seqused_k=used.to(device.torch_name),
                                   num_splits=n, return_attn_probs=True)[:2] for n in (1, 5)
        ]  # fmt: skip
    (one, one_lse), (five, five_lse) = [[x.cpu() for x in result] for result in results]
    torch.testing.assert_close(five, one, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(five_lse, one_lse, rtol=1e-4, atol=1e-4)
    for rows in (slice(0, 2), slice(9, 13)):
        assert not five[rows].any() and torch.isposinf(five_lse[:, rows]).all()


def test_nan_and_infinity_of_a_range(device):
    """Are those of the whole, and of no other row."""
    call = serving.make_call({**serving.PLAIN, "new": 0, "num_splits": 3})
    call.k_cache[0, 150, 0, 5] = float("nan")
    call.v_cache[2, 3, 1, 7] = float("inf")
    there = call.to(device.torch_name)
    with device.scope():
        out, lse = (x.cpu() for x in flash_attn_with_kvcache(**there.arguments(), return_softmax_lse=True))
    group = call.q.shape[2] // call.k_cache.shape[2]
    assert out[0, :, :group].isnan().all() and lse[0, :group].isnan().all()
    assert out[2, :, group:, 7].isposinf().all()
    out[0, :, :group], lse[0, :group], out[2, :, group:, 7] = 0, 0, 0
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_dropout_drops_the_same(device):
    """S_dmask is written by a call that takes its keys in one range."""
    q, k = (
        torch.randn(1, 1, 2, 64).half().to(device.torch_name),
        torch.randn(1, 700, 2, 64).half().to(device.torch_name),
    )
    results = []
    with device.scope():
        assert "combine" in explain(flash_attn_func, q, k, k, dropout_p=0.4).kernel
        for whole in (False, True):
            torch.manual_seed(3)
            out = flash_attn_func(q, k, k, dropout_p=0.4, return_attn_probs=whole)
            results.append((out[0] if whole else out).cpu())
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


def test_explain(device):
    call = serving.make_call({**serving.PLAIN, "dtype": "bf16", "new": 0}).to(device.torch_name)
    arguments = call.arguments()
    with device.scope():
        chosen, three, one = (explain(flash_attn_with_kvcache, **{**arguments, "num_splits": n}) for n in (0, 3, 1))
    both = "fa_forward_bf16_d64_cache, fa_combine_bf16_d256_general"
    assert (chosen.kernel, three.kernel, one.kernel) == (both, both, "fa_forward_bf16_d64_cache")
    assert "keys in 3 ranges: num_splits" in three.reasons
    assert [r for r in chosen.reasons if r.startswith("keys in 3 ranges: ") and "multiprocessors" in r]
    assert not [r for r in one.reasons if "range" in r]


def test_results_are_those_of_every_run(device):
    """Ranges are combined in their order: bit for bit."""
    call = serving.make_call({**serving.PLAIN, "dtype": "bf16", "new": 0, "num_splits": 5}).to(device.torch_name)
    with device.scope():
        first, second = (flash_attn_with_kvcache(**call.arguments()) for _ in range(2))
    assert torch.equal(first, second)
