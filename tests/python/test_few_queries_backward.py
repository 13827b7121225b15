"""Backward of few queries: heads that share keys are folded into one, and few rows meet K and V where they are."""

from __future__ import annotations

from dataclasses import replace

import cases
import harness
import instruction_sets
import pytest
import same_bits
import torch
from cases import Case

import flash_attn

every_isa = pytest.mark.parametrize("isa", instruction_sets.KNOWN, indirect=True)

# Sq, H, Hk, Sk, D, Dv: up to the most queries that are direct (12, 20, 24 or 32 by the instruction set) or folded (32),
# and beyond; keys of a range and of several.
FEW = [
    Case(lengths=((Sq, Sk),) * 2, H=H, Hk=Hk, D=D, Dv=Dv)
    for Sq, H, Hk, Sk, D, Dv in (
        (1, 1, 1, 1, 64, None),
        (2, 6, 2, 2, 1, 1),
        (3, 4, 1, 15, 17, 40),
        (5, 8, 2, 129, 72, 36),
        (7, 2, 2, 256, 96, 100),
        (12, 2, 2, 257, 257, 8),
        (13, 1, 1, 1100, 40, None),
        (20, 3, 3, 2100, 8, 72),
        (21, 2, 2, 130, 64, None),
        (24, 1, 1, 300, 1, 1),
        (25, 1, 1, 64, 17, 40),
        (32, 2, 2, 513, 128, 36),
        (32, 4, 2, 77, 96, 100),
        (33, 4, 2, 200, 257, 8),
        (16, 16, 1, 640, 40, None),
    )
]
SETTINGS = [
    {"strides": "heads first"},
    {"strides": "sliced"},
    {"softcap": 15.0},
    {"lse_gradient": True},
    {"scale": 0.7},
    {"causal": True},
    {"window": (40, 9)},
    {"window": (400, 300)},
    {"alibi": "H"},
    {"dropout_p": 0.17},
    {"bias": "H", "mask": "padding"},
    {"sink": True, "lse_gradient": True},
    {"bounds": "documents"},
]
# Some sequences are folded and direct, some folded only, some neither; queries or keys may be missing.
MIXED = Case(
    lengths=((3, 300), (40, 41), (1, 129), (0, 20), (7, 0), (32, 2500), (33, 70), (2, 5000)),
    varlen=True,
    slack=(3, 2),
    D=40,
)
WITH_SETTINGS = [
    replace(case, **settings)
    for settings in SETTINGS
    for case in (
        Case(lengths=((1, 150),) * 2, H=4, Hk=2),
        Case(lengths=((9, 300),), H=2, Hk=2, D=40),
        replace(MIXED, H=6, Hk=2),
        replace(MIXED, H=2, Hk=2),
    )
    if not (settings.get("strides") and case.varlen)
]


@every_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", [case.param() for case in FEW])
def test_few_queries(case, dtype, isa):
    harness.check(replace(case, dtype=dtype))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("case", [case.param() for case in WITH_SETTINGS])
def test_few_queries_with_settings(case, dtype):
    harness.check(replace(case, dtype=dtype))


@every_isa
@pytest.mark.parametrize("H", [2, 6])
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"window": (40, 9)}], ids=str)
def test_bits_depend_on_nothing_else(settings, H, isa):
    """Neither on the other sequences of a batch nor on the number of threads."""
    for dtype in ("fp32", "bf16"):
        case = replace(MIXED, H=H, dtype=dtype, slack=(0, 0), **settings)
        same_bits.check_equals_dense_per_sequence(case)
        same_bits.check_every_thread_count(case)


def test_more_queries_than_are_copied_at_a_time():
    """Folded rows of more than 8 MB, by some sequences after others; dense and packed."""
    case = Case(lengths=((30, 33),) * 20, H=32, Hk=2, D=128)
    harness.check(case)
    harness.check(replace(case, varlen=True))


def test_results_are_left_alone_between_rows():
    """Gradients go to rows of q's own strides; what lies between them is somebody else's."""
    q = torch.randn(2, 3, 4, 32)[..., :24].requires_grad_()
    k, v = (torch.randn(2, 70, 2, 24).requires_grad_() for _ in range(2))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    buffers = [torch.full((2, n, heads, 32), 7.0) for n, heads in ((3, 4), (70, 2), (70, 2))]
    flash_attn.flash_attn_interface.flash_attn_gpu.bwd(
        torch.ones_like(out), q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(),
        *(x[..., :24] for x in buffers), None, 0.0, 24**-0.5, False, -1, -1, 0.0, False, None, None,
    )  # fmt: skip
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for buffer, grad in zip(buffers, expected):
        assert (buffer[..., 24:] == 7).all() and torch.equal(buffer[..., :24], grad)


@every_isa
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_explained(dtype, isa):
    def reasons(queries, H, Sk=300, **settings):
        q, k = (torch.zeros(1, n, heads, 64, dtype=harness.TORCH_DTYPES[dtype]) for n, heads in ((queries, H), (Sk, 2)))
        found = flash_attn.explain(q.requires_grad_(), k, k, **settings).backward
        return found.tile, " ".join(found.reasons)

    folded, direct = "met as those of one head", "meet rows of K and V where they are"
    tile, why = reasons(3, 6)
    assert folded in why and direct in why and tile.startswith("9 queries x up to 128 keys")
    tile, why = reasons(5, 2)
    assert folded not in why and direct in why and tile.startswith("5 queries x up to 128 keys")
    tile, why = reasons(32, 6)
    assert folded in why and direct not in why and tile.startswith("blocks of")
    assert folded not in reasons(33, 6)[1] and direct not in reasons(33, 2)[1]
    for settings in ({"causal": True}, {"window_size": (40, 9)}, {"dropout_p": 0.1}):
        assert folded not in reasons(3, 6, **settings)[1] and direct not in reasons(3, 2, **settings)[1]
    assert folded not in reasons(30, 6, Sk=30)[1] and folded in reasons(29, 6, Sk=30)[1]
    assert direct in reasons(1, 6, causal=True)[1] and direct not in reasons(1, 2, softcap=9.0)[1]
