"""Problems drawn at random, against torch: are there shapes for which this package is slower?"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from problems import DIRECTIONS, DTYPES, call_of, one_head
from reference import deviation, exact_dtype, exact_head
from report import panels_by_direction
from rows import Calls, Row

import flash_attn

MOST_FLOP = 1 << 31  # so that one call takes milliseconds
MOST_ELEMENTS = 1 << 24  # of K
USUAL_HEAD_DIMS = (32, 64, 80, 96, 128, 128, 192, 256)
# Bounds between the summary's classes of calls by torch's time, in seconds.
SHORT, MIDDLE = 40e-6, 400e-6


@dataclass(frozen=True)
class Drawn:
    """q (B, Sq, H, D), k and v (B, Sk, Hk, D)."""

    dtype: str
    direction: str
    B: int
    Sq: int
    Sk: int
    H: int
    Hk: int
    D: int
    causal: bool

    def flop(self):
        forward = 4 * self.B * self.H * self.Sq * self.Sk * self.D / (2 if self.causal else 1)
        return forward * (2.5 if self.direction == "backward" else 1)

    @property
    def name(self):
        mask = "causal " if self.causal else ""
        heads = f"H{self.H}/{self.Hk}"
        return f"{self.dtype} B{self.B} Sq{self.Sq} Sk{self.Sk} {heads} D{self.D} {mask}{self.direction}"

    def recorded(self):
        """The settings that JSON holds."""
        sizes = {name: getattr(self, name) for name in ("direction", "B", "Sq", "H", "Hk", "D")}
        return {**sizes, "S": self.Sk, "mask": "causal" if self.causal else "full"}

    def tensors(self):
        """q, k, v, dout, the same each time."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.B, S, H, self.D) for S, H in ((self.Sq, self.H), *[(self.Sk, self.Hk)] * 2, (self.Sq, self.H))]
        return [torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for shape in shapes]


def log_uniform(source, least, most):
    return round(math.exp(source.uniform(math.log(least), math.log(most))))


def drawn(source, dtype):
    """A problem of that dtype from the random source. If causal, of equal lengths: torch aligns others otherwise."""
    while True:
        causal, group = source.random() < 0.4, source.choice((1, 1, 2, 4, 8))
        # Of a single key the gradients of queries are 0, to which no error is relative.
        Sk, Hk = log_uniform(source, 2, 16384), source.choice((1, 2, 4, 8))
        D = source.choice(USUAL_HEAD_DIMS) if source.random() < 0.7 else 4 * source.randint(2, 64)
        problem = Drawn(
            dtype,
            source.choice(DIRECTIONS),
            B=log_uniform(source, 1, 16),
            Sq=Sk if causal else log_uniform(source, 1, 4096),
            Sk=Sk,
            H=Hk * group,
            Hk=Hk,
            D=D,
            causal=causal,
        )
        if problem.flop() <= MOST_FLOP and problem.B * Sk * Hk * D <= MOST_ELEMENTS:
            return problem


def torch_side(problem):
    """torch's attention and its tensors (B, H, S, D), contiguous; heads that share keys as queries of one head, which
    it is faster with, where no mask keeps it from that."""
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in problem.tensors())
    if problem.causal:
        shared = {"enable_gqa": True} if problem.H > problem.Hk else {}
        return partial(F.scaled_dot_product_attention, is_causal=True, **shared), (q, k, v), dout
    q, dout = (x.reshape(problem.B, problem.Hk, -1, problem.D) for x in (q, dout))
    return F.scaled_dot_product_attention, (q, k, v), dout


def drawn_calls(problem):
    *tensors, dout = problem.tensors()
    attention = partial(flash_attn.flash_attn_func, causal=problem.causal)
    ours = call_of(attention, problem.direction, tensors, dout)
    backward = problem.direction == "backward"
    theirs, inputs, of_theirs = torch_side(problem)
    peer = call_of(theirs, problem.direction, inputs, of_theirs)

    first_query = -problem.Sq if problem.H > problem.Hk else 0  # of the last head, where torch has heads as queries

    def check(call, select):
        """Error of the last head; keys that it shares have the gradients of others too."""
        one = [x[-1, :, -1].to(exact_dtype(problem.dtype)) for x in (*tensors, dout)]
        expected = exact_head(*one[: 4 if backward else 3], causal=problem.causal)
        return deviation(one_head(call(), select), expected if problem.H == problem.Hk else expected[:1])

    explanation = flash_attn.explain(*(x.requires_grad_(backward) for x in tensors), causal=problem.causal)
    explanation = explanation.backward if backward else explanation
    return Calls(
        ours,
        peer,
        check=lambda: check(ours, lambda x: x[-1, :, -1]),
        # Gradients of two or three keys are differences that may be as small as their rounding.
        peer_check=lambda: check(peer, lambda x: x[-1, -1, first_query:]),
        kernel=explanation.kernel,
        instruction_set=explanation.instruction_set,
    )


def drawn_rows(options):
    """As many as asked for, of each dtype in turn; for the record, without a bound."""
    source = random.Random(options.seed)
    problems = [drawn(source, options.dtypes[n % len(options.dtypes)]) for n in range(options.draw)]
    return [
        Row(
            "drawn",
            f"drawn {problem.name}",
            problem.dtype,
            partial(drawn_calls, problem),
            work=problem.flop(),
            setting=problem.recorded(),
        )
        for problem in problems
    ]


def classes(rows):
    """Rows by dtype, direction and how long torch takes."""
    groups = {}
    for row in rows:
        time = "short" if row.peer_median < SHORT else "middle" if row.peer_median < MIDDLE else "long"
        groups.setdefault(f"{row.dtype} {row.setting['direction']} {time}", []).append(row.ratio)
    return dict(sorted(groups.items()))


def summary(rows):
    """Lines: of each class how the ratios are distributed; none without rows."""
    if not rows:
        return []
    bounds = f"torch takes less than {SHORT * 1e6:.0f} us (short), than {MIDDLE * 1e6:.0f} us (middle), longer"
    lines = [f"\ndrawn, torch's time over ours; {bounds}", f"{'':<24}{'rows':>6}{'< 0.95':>8}{'least':>8}{'median':>8}"]
    for name, ratios in classes(rows).items():
        below = sum(ratio < 0.95 for ratio in ratios)
        lines.append(f"{name:<24}{len(ratios):>6}{below:>8}{min(ratios):>8.2f}{statistics.median(ratios):>8.2f}")
    slowest = sorted(rows, key=lambda row: row.ratio)[:10]
    return [*lines, "\nleast:", *(f"{row.ratio:>8.2f} {row.name}" for row in slowest)]


def plot(rows, against, path):
    """Each problem's ratio over torch's time, one panel per direction."""
    with panels_by_direction(rows, 5, path) as panels:
        for axes, of_direction in panels:
            for dtype in DTYPES:
                points = [row for row in of_direction if row.dtype == dtype]
                times = [row.peer_median * 1e6 for row in points]
                axes.plot(times, [row.ratio for row in points], ".", label=dtype)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set(xlabel=f"{against}, microseconds", xscale="log", yscale="log")
        panels[0][0].set_ylabel(f"{against}'s time over ours")
