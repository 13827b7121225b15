"""Problems that hypothesis makes up, of any size and with any features, against the oracle.

The grids of cases.py meet every pair of features, at a few sizes. Which kernel a call gets depends on its lengths,
heads and head dims, and so do the tails of vectors, strips, tiles and blocks: here these are drawn (drawn.py).
"""

from __future__ import annotations

import harness
import pytest
from devices import CPU, SIMULATED, Device

hypothesis = pytest.importorskip("hypothesis", reason="the problems are made up by hypothesis")
import drawn  # noqa: E402

# What a simulated GPU executes in a second or so.
FEW_ROWS, FEW_SCORES = (40, 140), 2**13


def check(case, device=CPU, draws=1):
    """At four times the contract's multiples, as many of these problems are a few numbers, of which E_pt may be small
    by chance: this is about numbers that are not where they belong."""
    harness.check(case, slack=4.0, device=device, draws=draws, few_keys=True)


@drawn.settings(60)
@hypothesis.given(drawn.problems())
def test_drawn(case):
    check(case, draws=drawn.draws_of(case))


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("target", SIMULATED)
@drawn.settings(12)
@hypothesis.given(drawn.problems_for_gpus(FEW_ROWS, FEW_SCORES), hypothesis.strategies.integers(0, 99))
def test_drawn_on_a_simulated_gpu(target, case, seed):
    check(case, Device(target, schedule="random", seed=seed))


@pytest.mark.gpu
@pytest.mark.skipif("config.getoption('device') != 'cuda'", reason="needs a real GPU")
@drawn.settings(60)
@hypothesis.given(drawn.problems_for_gpus())
def test_drawn_on_a_gpu(case):
    check(case, Device("cuda"), drawn.draws_of(case))
