"""The kv cache, pages, seqused_k and leftpad_k on GPUs: test_kvcache.py's calls, and wrong lengths and tables."""

from __future__ import annotations

from dataclasses import replace

import cases
import kvcache_model as model
import pytest
import test_kvcache as serving
import torch
from devices import OTHERS, SIMULATED, Device, needs_code

from flash_attn import explain, flash_attn_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu

# The calls of the CPU's grid that GPUs take: not fp64.
ROWS = [row for row in cases.covering(serving.FACTORS, serving.allowed) if row["dtype"] != "fp64"]
SCHEDULES = ("in-order", "round-robin", "random")


def devices(config):
    """Those that all of a test's problems run on, and those that run a few."""
    if config.getoption("device") == "cuda":
        return [Device("cuda")], []
    return [Device(target) for target in SIMULATED], [Device(target) for target in OTHERS]


FEATURES = {
    "test_paged_varlen": "paged varlen forward",
    "test_used_and_padded_keys_in_varlen": "seqused_k, leftpad_k in varlen",
}


def pytest_generate_tests(metafunc):
    every, few = devices(metafunc.config)
    if "row" in metafunc.fixturenames:
        problems = [(row, d) for d in every for row in ROWS] + [
            (row, d) for i, d in enumerate(few) for row in ROWS[i :: len(few)]
        ]
        metafunc.parametrize("row, device", [_param(n, *each) for n, each in enumerate(problems)])
    elif "dtype" in metafunc.fixturenames:
        feature = FEATURES[metafunc.function.__name__]
        pairs = [(dtype, device) for dtype in ("fp16", "bf16", "fp32") for device in every + few]
        metafunc.parametrize("dtype, device", [
            pytest.param(dtype, d, id=f"{dtype}-{d.name}", marks=proven([feature], dtype, d)) for dtype, d in pairs
        ])  # fmt: skip
    else:
        metafunc.parametrize("device", every + few, ids=lambda device: device.name)


def proven(features, dtype, device):
    """The support matrix has columns for targets on which all problems run."""
    return [pytest.mark.feature(*features, dtype=dtype, backend=device.backend)] if device.name in SIMULATED else []


def _param(n, row, device):
    name = "-".join(f"{key}={value}".replace(" ", "") for key, value in row.items())
    scheduled = Device(device.name, SCHEDULES[n % 3], seed=n)
    marks = proven(model.features(row), row["dtype"], device)
    return pytest.param(row, scheduled, id=f"{device.name}-{name}", marks=marks)


def test_grid(row, device):
    needs_code_of(device)
    serving.check(serving.make_call(row), row["dtype"], device)


def needs_code_of(device):
    if device.name != "cuda":
        needs_code(device.name)


@pytest.mark.parametrize("page", (5, 16))
def test_paged_varlen(page, dtype, device):
    needs_code_of(device)
    serving.check_paged_varlen(page, dtype, device)


def test_used_and_padded_keys_in_varlen(dtype, device):
    needs_code_of(device)
    serving.check_used_and_padded_keys(dtype, device)


@pytest.mark.parametrize("page", (0, 4))
def test_wrong_lengths_and_tables_reach_no_other_memory(page, device):
    """On a GPU nobody reads them first. The last sequence's are right: it is what it is without the others."""
    needs_code_of(device)
    B, slots, Hk, D = 5, 12, 2, 16
    most = 2**31 - 1
    rows = (B * slots // page, page) if page else (B, slots)
    k_cache, v_cache = (torch.randn(*rows, Hk, D) for _ in range(2))
    call = model.Call(torch.randn(B, 2, 4, D), k_cache, v_cache, torch.randn(B, 2, Hk, D), torch.randn(B, 2, Hk, D))
    call.cache_seqlens = torch.tensor([-5, most, 11, 3, 7], dtype=torch.int32)
    call.cache_leftpad = torch.tensor([-1, most, 3, -most, 2], dtype=torch.int32)
    if page:
        call.block_table = torch.tensor([[-1, most, 99], [0, -1, -1], [1, 2, 15], [-7, 3, 4], [5, 6, 7]]).int()
    else:
        call.cache_batch_idx = torch.tensor([-1, most, B, -most, 2], dtype=torch.int32)
    call.options = {"causal": True}
    call.rotary_cos, call.rotary_sin = torch.rand(12, 4), torch.rand(12, 4)
    of_last = ("q", "k", "v", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table")
    last = {name: getattr(call, name)[-1:] for name in of_last if getattr(call, name) is not None}
    right = replace(call, **last, k_cache=call.k_cache.clone(), v_cache=call.v_cache.clone())
    expected, expected_out = model.appended(right), flash_attn_with_kvcache(**right.arguments())
    there, before = call.to(device.torch_name), (call.k_cache.clone(), call.v_cache.clone())
    with device.scope():
        out = flash_attn_with_kvcache(**there.arguments()).cpu()
    after = there.k_cache.cpu(), there.v_cache.cpu()
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[-1:], expected_out, rtol=1e-4, atol=1e-4)
    rows = [model.slot_index(call, 4, slot) for slot in (7, 8)]
    for old, new, should in zip(before, after, expected):
        for at in rows:
            torch.testing.assert_close(new[at], should[at], rtol=1e-3, atol=1e-3)
        changed = (new != old).flatten(2).any(-1).nonzero().tolist()
        valid = {tuple(at) for at in rows} | _slots_of_the_others(call, page)
        assert {tuple(at) for at in changed} <= valid


def _slots_of_the_others(call, page):
    """Slots that sequences with wrong lengths have nevertheless: those of pages that exist, and none of a cache."""
    if not page:
        return set()
    pages = {int(n) for n in call.block_table[:4].flatten() if 0 <= int(n) < len(call.k_cache)}
    return {(n, slot) for n in pages for slot in range(page)}


def test_rotated_queries_wider_than_values(device):
    """Else they are rotated in the memory of out."""
    needs_code_of(device)
    row = {**serving.PLAIN, "dtype": "bf16", "rotary": "interleaved", "D": 64}
    call = serving.make_call(row)
    call.v_cache, call.v = (x[..., :40].contiguous() for x in (call.v_cache, call.v))
    serving.check(call, "bf16", device)


def test_explain_names_what_appends(device):
    needs_code_of(device)
    call = serving.make_call({**serving.PLAIN, "dtype": "bf16", "storage": "page 16", "num_splits": 1})
    call = call.to(device.torch_name)
    with device.scope():
        explanation = explain(flash_attn_with_kvcache, **call.arguments())
    assert explanation.kernel == "fa_forward_bf16_d64_cache, fa_append_bf16_d256_general"
    assert "cache variant: keys in pages" in explanation.reasons
    folded = "one query to a sequence: the 3 heads that share a key head are rows of one"
    assert folded in explanation.reasons


@pytest.mark.parametrize("extra", ("none", "alibi"))
@pytest.mark.parametrize("mask", ("full", "causal", "narrow"))
def test_heads_of_one_query_share_a_block(mask, extra, device):
    """Where a window or slopes tell their rows apart, they do not."""
    needs_code_of(device)
    for heads in ("gqa", "mqa"):
        row = {
            **serving.PLAIN,
            "dtype": "bf16",
            "new": 1,
            "rotary": "halves",
            "mask": mask,
            "extra": extra,
            "heads": heads,
        }
        serving.check(serving.make_call(row), "bf16", device)


def test_a_whole_cache_is_plain_attention(device):
    """No lengths, tables or new keys: what the function without a cache computes, by the same kernel."""
    needs_code_of(device)
    q, k = torch.randn(2, 3, 4, 64).to(device.torch_name).half(), torch.randn(2, 70, 2, 64).to(device.torch_name).half()
    with device.scope():
        assert torch.equal(flash_attn_with_kvcache(q, k, k, causal=True), flash_attn_func(q, k, k, causal=True))
