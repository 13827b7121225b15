"""What hypothesis makes problems of: any size, any features, most often beside the sizes at which something changes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Sequence

import hypothesis
from cases import Case
from hypothesis import strategies as st

FUZZ = os.environ.get("FLASH_ATTN_FUZZ_EXAMPLES")

MOST_SCORES = 2**19  # The oracle keeps several tensors of as many numbers.
# Rows of queries or keys below which a problem is drawn several times, each time with other numbers.
ENOUGH_ROWS, MOST_DRAWS = 400, 24

LENGTHS = (40, 300, 1100, 2300)
SIZES = (8, 16, 32, 64, 96, 128, 256, 288, 512, 768, 1024, 1536, 2048)  # Of strips, tiles, blocks and their multiples.


def settings(examples: int) -> hypothesis.settings:
    """The same problems each time; `make fuzz` makes up others, as many as it says."""
    return hypothesis.settings(
        max_examples=int(FUZZ or examples),
        deadline=None,
        derandomize=FUZZ is None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
    )


def length(most: int):
    sizes = st.builds(lambda n, off: n + off, st.sampled_from([n for n in SIZES if n <= most]), st.integers(-1, 1))
    return st.one_of(st.integers(0, 24), sizes, st.integers(0, most))


head_dims = st.one_of(st.sampled_from((32, 64, 128, 192, 256)), st.integers(1, 40), st.integers(1, 300))
bound = st.one_of(st.just(-1), st.integers(0, 70), st.integers(0, 1100))


def seldom(default, *others):
    """The default three times of four, so that a problem has a few features and not all."""
    return st.one_of(*[st.just(default)] * 3, st.sampled_from(others))


@st.composite
def batches(draw, square: bool, most: Sequence[int]):
    """Whether it is packed, and the lengths of its sequences."""
    lengths = length(draw(st.sampled_from(most)))
    pair = st.builds(lambda n: (n, n), lengths) if square else st.tuples(lengths, lengths)
    if draw(st.booleans()):
        return True, tuple(draw(st.lists(pair, min_size=1, max_size=5)))
    return False, (draw(pair),) * draw(st.integers(1, 3))


def scores_of(lengths, H: int) -> int:
    return H * sum(max(Sq, 1) * max(Sk, 1) for Sq, Sk in lengths)


@st.composite
def problems(draw, most: Sequence[int] = LENGTHS, most_scores: int = MOST_SCORES) -> Case:
    """Of sequences that are `most` rows long."""
    packing = draw(seldom("separate", "kv", "qkv"))
    varlen, lengths = draw(batches(square=packing == "qkv", most=most))
    Hk = draw(st.sampled_from((1, 2, 3, 5)))
    group = 1 if packing == "qkv" else draw(st.sampled_from((1, 2, 3, 4, 7, 8, 16, 33)))
    hypothesis.assume(scores_of(lengths, Hk * group) <= most_scores)
    softcap = draw(seldom(0.0, 3.0))  # Scores are of its size, and so are their roundings.
    hides = draw(
        seldom(
            {},
            *({"mask": which} for which in ("padding", "3-D", "4-D", "heads")),
            *({"bounds": which} for which in ("documents", "prefix", "heads")),
        )
    )
    return Case(
        dtype=draw(st.sampled_from(("bf16", "fp32", "fp16", "bf16", "fp32", "fp16", "fp64"))),
        lengths=lengths,
        varlen=varlen,
        slack=draw(seldom((0, 0), (3, 5))) if varlen and packing != "qkv" else (0, 0),
        H=Hk * group,
        Hk=Hk,
        D=draw(head_dims),
        Dv=draw(st.one_of(st.none(), head_dims)) if packing == "separate" else None,
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.just((-1, -1)), st.tuples(bound, bound))),
        softcap=softcap,
        dropout_p=0.0 if softcap else draw(seldom(0.0, 0.17, 0.5)),
        alibi=draw(seldom(None, "H", "BH")),
        scale=draw(seldom(None, 0.31)),
        bias=draw(seldom(None, "BHQ", "HQ", "BQ", "B", "H", "")),
        sink=draw(seldom(False, True)),
        lse_gradient=draw(seldom(False, True)),
        packing=packing,
        strides=draw(seldom("contiguous", "heads first", "sliced")),
        deterministic=draw(seldom(False, True)),
        **hides,
    )


def problems_for_gpus(most: Sequence[int] = LENGTHS, most_scores: int = MOST_SCORES):
    """Without what GPU kernels lack."""

    def kept(case: Case) -> Case:
        return replace(
            case.upstream(),
            lse_gradient=case.lse_gradient,
            dtype="fp32" if case.dtype == "fp64" else case.dtype,
            D=min(case.D, 256),
            Dv=None if case.Dv is None else min(case.Dv, 256),
        )

    return st.builds(kept, problems(most, most_scores))


def draws_of(case: Case) -> int:
    """Of few numbers E_pt may be small by chance."""
    rows = min(case.H * sum(Sq for Sq, _ in case.lengths), case.Hk * sum(Sk for _, Sk in case.lengths))
    return max(1, min(MOST_DRAWS, ENOUGH_ROWS // max(1, rows)))
