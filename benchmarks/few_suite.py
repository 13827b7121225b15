"""Few queries over a short cache, of any head dim: what a step of generation or of speculative decoding asks."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from problems import DTYPES, SEED
from reference import deviation, exact_dtype, exact_head
from rows import Calls, Row

import flash_attn

QUERIES = (1, 8, 16)
HEAD_DIMS = (36, 64)  # One that is no multiple of a vector.


def few_calls(dtype, Sq, Sk, H, D):
    """q (1, Sq, H, D), k and v (1, Sk, H, D); torch gets its own layout, contiguous."""
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (torch.randn(1, S, H, D, generator=generator).to(DTYPES[dtype]) for S in (Sq, Sk, Sk))
    of_torch = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def call():
        return flash_attn.flash_attn_func(q, k, v)

    def check():
        exact = exact_dtype(dtype)
        return deviation([call()[0, :, -1]], exact_head(*(x[0, :, -1].to(exact) for x in (q, k, v))))

    explanation = flash_attn.explain(flash_attn.flash_attn_func, q, k, v)
    return Calls(
        call,
        lambda: F.scaled_dot_product_attention(*of_torch),
        check=check,
        kernel=explanation.kernel,
        instruction_set=explanation.instruction_set,
    )


def few_rows(options):
    """For the record, without a bound."""
    Sk, H = options.S, options.H
    return [
        Row(
            "few",
            f"few {dtype} D{D} Sq{Sq} Sk{Sk}",
            dtype,
            partial(few_calls, dtype, Sq, Sk, H, D),
            work=4 * H * Sq * Sk * D,
            setting={"B": 1, "Sq": Sq, "S": Sk, "H": H, "D": D},
        )
        for dtype in options.dtypes
        for D in HEAD_DIMS
        for Sq in QUERIES
    ]
