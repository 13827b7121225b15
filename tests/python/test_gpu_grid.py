"""The CPU backend's grid on GPUs: a committed pairwise list on simulated ones, on real ones the CPU's own lists too."""

from __future__ import annotations

import itertools
import json

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
    there = [c for c in wide if c.dtype != "fp64" and max(c.D, c.head_dim_v) <= 256]
    small = dict.fromkeys(case for case, _ in gpu_cases.committed())
    return [(case, Device("cuda")) for case in (*small, *there)]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        pairs = grid(metafunc.config.getoption("device"))
        metafunc.parametrize("case, device", [_param(case, device) for case, device in pairs])


def _param(case, device):
    mark = [pytest.mark.feature(*case.features(), dtype=case.dtype, backend=device.backend)]
    return pytest.param(case, device, id=f"{device.name}-{case.id}", marks=mark if device.name in SIMULATED else [])


def test_case(case, device):
    harness.check(case, device=device)


def test_committed_list_is_generated():
    """The list in tests/data is what the factors make, with every pair of their values on every target."""
    expected = json.loads(json.dumps(gpu_cases.generated()))
    assert json.loads(gpu_cases.COMMITTED.read_text()) == expected
    rows = cases.covering(gpu_cases.FACTORS, gpu_cases.allowed)
    for (a, values_a), (b, values_b) in itertools.combinations(gpu_cases.FACTORS.items(), 2):
        for x, y in itertools.product(values_a, values_b):
            assert any(row[a] == x and row[b] == y for row in rows) or not gpu_cases.allowed({a: x, b: y}), (a, x, b, y)


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
