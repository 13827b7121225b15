"""Neither the number of threads nor the other sequences of a batch change a bit: problems that hypothesis makes up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import same_bits
from cases import Case

hypothesis = pytest.importorskip("hypothesis", reason="the problems are made up by hypothesis")
import drawn  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

DTYPES = st.sampled_from(("bf16", "fp32", "bf16", "fp16", "bf16"))  # bf16 has multiplicands of its own
OPEN = (-1, -1)


@st.composite
def problems(draw, lengths, windows, groups=(1, 2)) -> Case:
    Hk = draw(st.sampled_from([1, 2]))
    return Case(
        dtype=draw(DTYPES),
        lengths=tuple(draw(lengths)),
        H=Hk * draw(st.sampled_from(groups)),
        Hk=Hk,
        D=draw(st.sampled_from([40, 64, 128])),
        causal=draw(st.booleans()),
        window=draw(windows),
    )


def pairs(queries, keys):
    return st.tuples(st.sampled_from(queries), st.sampled_from(keys))


# Alike, so that whole batches are wide or narrow for as many threads as there are.
dense = st.builds(lambda pair, B: (pair,) * B, pairs([1, 20, 130, 700], [300, 1300, 2300]), st.integers(1, 3))
wide = st.one_of(st.just(OPEN), st.tuples(st.integers(100, 900), st.integers(0, 300)))

mixed = st.lists(pairs([1, 3, 17, 20, 64, 130, 400], [64, 300, 700, 1300, 2300]), min_size=2, max_size=4)
# No wider than the shortest sequence: a call by itself takes a wider window for none.
narrow = st.one_of(st.just(OPEN), st.just(OPEN), st.tuples(st.integers(-1, 63), st.integers(-1, 63)))

few = st.lists(pairs([1, 2, 5, 11, 12, 20], [64, 300, 1300]), min_size=2, max_size=3)


@drawn.settings(60)
@hypothesis.given(problems(dense, wide))
def test_threads(case):
    same_bits.check_every_thread_count(case)


@drawn.settings(60)
@hypothesis.given(problems(mixed, narrow))
def test_batches(case):
    same_bits.check_equals_dense_per_sequence(replace(case, varlen=True))


@drawn.settings(60)
@hypothesis.given(problems(few, narrow, groups=(10, 33)))
def test_batches_of_few_queries_for_many_heads(case):
    same_bits.check_equals_dense_per_sequence(replace(case, varlen=True))
