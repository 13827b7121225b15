"""The CPU backend's grid on GPUs: a committed pairwise list on simulated ones, on real ones the CPU's own lists too."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import cases
import gpu_cases
import harness
import pytest
import torch
from devices import SIMULATED, Device

import flash_attn

pytestmark = pytest.mark.gpu


def grid(device: str):
    if device == "simulated":
        return gpu_cases.committed()
    wide = cases.feature_cases() + cases.lone_feature_cases() + cases.head_dim_cases(True) + cases.head_dim_cases(False)
    there = [c.upstream() for c in wide if c.dtype != "fp64" and max(c.D, c.head_dim_v) <= 256]
    small = dict.fromkeys(case for case, _ in gpu_cases.committed())
    return [(case, Device("cuda")) for case in dict.fromkeys((*small, *there))]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        pairs = grid(metafunc.config.getoption("device"))
        metafunc.parametrize("case, device", [_param(case, device) for case, device in pairs])


def _param(case, device):
    rows = case.features()
    for name, shown in (
        ("strided inputs", case.strides != "contiguous"),
        ("zero lengths and rows without keys", case.varlen and any(0 in pair for pair in case.lengths)),
    ):
        rows += [f"{name} {way}" for way in ("forward", "backward")] if shown else []
    mark = [pytest.mark.feature(*rows, dtype=case.dtype, backend=device.backend)]
    return pytest.param(case, device, id=f"{device.name}-{case.id}", marks=mark if device.name in SIMULATED else [])


def test_case(case, device):
    harness.check(case, device=device)


@pytest.mark.simulated
@pytest.mark.parametrize("left, right", ((65, -1), (62, -1), (-1, 62), (-1, 1)))
@pytest.mark.parametrize("target", SIMULATED)
def test_edges_of_windows_at_edges_of_tiles(target, left, right):
    """Tiles of 16, 32 or 64 rows of which the first query of a block sees the last key alone, the last one of a wave
    all but the first, the first of a wave all but the last. Then the same of keys and the queries that see them."""
    case = cases.Case(dtype="fp16", lengths=((70, 198),), H=1, Hk=1, window=(left, right))
    harness.check(case, device=Device(target))
    harness.check(replace(case, lengths=((198, 70),), window=(right, left)), device=Device(target))


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("target", SIMULATED)
@pytest.mark.parametrize("lengths, mask", list(itertools.product(gpu_cases.LENGTHS, cases.MASKS)))
def test_full_product(target, lengths, mask):
    """Every dtype, head count and head dim with every pair of lengths and mask; the other factors in turn."""
    for case, device in gpu_cases.product(target, lengths, mask):
        harness.check(case, device=device)


def test_committed_list_is_generated():
    """The list in tests/data is what the factors make, with every pair of their values on every target."""
    expected = json.loads(json.dumps(gpu_cases.generated()))
    assert json.loads(gpu_cases.COMMITTED.read_text()) == expected
    rows = cases.covering(gpu_cases.FACTORS, gpu_cases.allowed)
    for (a, values_a), (b, values_b) in itertools.combinations(gpu_cases.FACTORS.items(), 2):
        for x, y in itertools.product(values_a, values_b):
            assert any(row[a] == x and row[b] == y for row in rows) or not gpu_cases.allowed({a: x, b: y}), (a, x, b, y)


LACKING = {
    "attn_bias": {"attn_bias": torch.zeros(1, 1, 1, 9)},
    "attn_mask": {"attn_mask": torch.ones(1, 9).bool()},
    "learnable_sink": {"learnable_sink": torch.zeros(2)},
    "key_begin and key_end": {"key_end": torch.ones(1, 7).int()},
}


def missing(target, *rows):
    return pytest.mark.feature(*rows, dtype="*", backend=Device(target).backend, missing=True)


@pytest.mark.simulated
@pytest.mark.parametrize(
    "target, name",
    [
        pytest.param(t, n, marks=missing(t, f"{n} forward", f"{n} backward"))
        for t, n in itertools.product(SIMULATED, LACKING)
    ],
)
def test_lacking_score_tables(target, name):
    """Refused by name on a GPU, never ignored."""
    q, k = torch.zeros(1, 7, 2, 16), torch.zeros(1, 9, 2, 16)
    with Device(target).scope(), pytest.raises(NotImplementedError, match=f"GPU backend does not support {name}"):
        flash_attn.flash_attn_func(q, k, k, **LACKING[name])


@pytest.mark.simulated
@pytest.mark.parametrize("target", SIMULATED)
@pytest.mark.parametrize("D", (64, 128, 256))
def test_tiles_are_spanned(target, D):
    """The lengths have two kept tiles and three streamed ones, forward and backward, by what `explain` names."""
    longest = {max(pair) for pairs in gpu_cases.LENGTHS.values() for pair in pairs}
    q = torch.zeros(1, 1, 1, D, dtype=torch.bfloat16, requires_grad=True)
    with Device(target).scope():
        explanation = flash_attn.explain(q, q, q)
    for each in (explanation, explanation.backward):
        for tile in each.tile.split("; "):
            kept, streamed = int(tile.split()[2]), int(tile.split()[5])
            assert max(longest) > kept and max(longest) > 2 * streamed, tile
            assert all(n % kept and n % streamed for n in longest if n > kept), tile
