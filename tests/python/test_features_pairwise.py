"""Every feature together with every other one, dense and varlen, forward and backward."""

from __future__ import annotations

import itertools
import re

import cases
import harness
import pytest
import torch

import flash_attn


@pytest.mark.parametrize("case", [c.param() for c in cases.feature_cases()])
def test_pair(case):
    harness.check(case)


def test_every_pair_is_there():
    """The covering array holds each pair of values that some allowed problem holds."""
    rows = cases.covering(cases.FEATURES, cases.feature_row_allowed)
    assert all(cases.feature_row_allowed(row) for row in rows)
    lacking = []
    for (a, values_a), (b, values_b) in itertools.combinations(cases.FEATURES.items(), 2):
        for x, y in itertools.product(values_a, values_b):
            if not any(row[a] == x and row[b] == y for row in rows):
                lacking.append((a, x, b, y))
    # What no problem holds: softcap with dropout, packing with unequal shapes, the longest with many heads.
    for a, x, b, y in lacking:
        assert {a, b} in (
            {"softcap", "dropout_p"},
            {"head_dims", "packing"},
            {"lengths", "packing"},
            {"heads", "packing"},
            {"lengths", "heads"},
        ), (a, x, b, y)
        assert not cases.feature_row_allowed({a: x, b: y})


def test_blocks_are_spanned():
    """Some lengths of each grid have two query blocks and two or three key blocks, by `explain`'s tiles.

    The dense ones have three for every head dim, those of VARLEN_LENGTHS for D >= 128.
    """
    assert any(Sq > 512 and Sk > 4096 for Sq, Sk in cases.DENSE_LENGTHS["wide"])
    alone = [case.lengths for case in cases.lone_feature_cases()]
    for pairs in (*cases.DENSE_LENGTHS.values(), *cases.VARLEN_LENGTHS.values(), *alone):
        assert any(Sq > 512 and Sk > 2048 for Sq, Sk in pairs) or any(Sq > 2048 for Sq, _ in pairs)
    for D, dtype in itertools.product(cases.HEAD_DIMS, harness.TORCH_DTYPES.values()):
        q = torch.zeros(1, 128, 1, D, dtype=dtype, requires_grad=True)
        explanation = flash_attn.explain(q, q, q)
        for each in (explanation, explanation.backward):
            queries, keys = (int(n) for n in re.search(r"(\d+) queries x (\d+) keys", each.tile).groups())
            assert queries <= 512 and keys <= (2048 if D < 128 else 1024), each.tile
