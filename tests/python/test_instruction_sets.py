"""Every instruction set that this machine executes gives the oracle's results: the choice is one of speed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import cases
import harness
import pytest
import same_bits
import torch
from cases import Case
from instruction_sets import KNOWN, available, cpu, with_tiles

import flash_attn

# A slice of the grid: every dtype, tails of vectors of every width, and each feature.
SLICE = [
    Case(dtype=dtype, lengths=((137, 1100),), H=2, Hk=1, D=D, Dv=Dv, causal=True)
    for dtype in cases.DTYPES
    for D, Dv in ((1, None), (5, 3), (17, 33), (31, 63), (64, None), (111, 8), (257, 40))
]
SLICE += [
    replace(Case(dtype=dtype, lengths=((67, 1100), (3, 1), (300, 41)), varlen=True, H=3, Hk=1, D=40), **settings)
    for dtype in cases.DTYPES
    for settings in (
        {},
        {"window": (100, 7)},
        {"softcap": 15.0},
        {"alibi": "BH"},
        {"dropout_p": 0.17},
        {"bias": "H", "mask": "3-D", "sink": True, "bounds": "heads", "lse_gradient": True},
    )
]


# What the tiles' kernels add: blocks of 32 rows and columns, and their tails.
TILES = [
    Case(dtype="bf16", lengths=((Sq, Sk),), H=4, Hk=Hk, D=D, Dv=Dv, causal=causal)
    for Sq, Sk in ((65, 129), (160, 350))
    for Hk in (1, 4)
    for D, Dv in ((40, None), (64, None), (128, None), (256, None), (192, 128), (24, 72))
    for causal in (False, True)
]
# Numbers in parts, as which fp16 and fp32 are multiplied there, take the same ways.
TILES += [replace(c, dtype=dtype) for dtype in ("fp16", "fp32") for c in TILES if c.Hk == 1 and c.lengths[0][0] == 160]


def fp32_uses_tiles(isa):
    """Not on every processor that has them."""
    q = torch.zeros(1, 128, 1, 64)
    found = flash_attn.explain(q, q, q)
    assert found.instruction_set == isa or any("faster than tiles" in reason for reason in found.reasons)
    return found.instruction_set == isa


@pytest.mark.second_torch
@pytest.mark.parametrize("case", [c.param() for c in SLICE])
def test_slice(case, isa):
    q = torch.zeros(1, 128, 1, 64, dtype=harness.TORCH_DTYPES[case.dtype])
    used = flash_attn.explain(q, q, q).instruction_set
    if case.dtype == "fp64":
        assert used == "portable"  # the reference precision has one kernel
    elif case.dtype != "fp32" or isa != "amx_bf16" or fp32_uses_tiles(isa):
        # Only bf16 has the BF16 dot product; others run the set below it. In tiles they are sums of bf16.
        pairs = isa in ("avx512_bf16", "neon_bf16")
        assert used == (isa.removesuffix("_bf16") if pairs and case.dtype != "bf16" else isa)
    harness.check(case)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("window, rising", [((-1, 0), True), ((130, 5), True), ((130, 5), False)], ids=str)
def test_what_is_hidden_is_not_among_the_maxima(window, rising, dtype, isa):
    """Next to the greatest score that a row sees a hidden one is greater by 128: as maximum it would leave zeros."""
    n, t = 300, harness.TORCH_DTYPES[dtype]
    rank = torch.arange(n) if rising else torch.arange(n).flip(0)
    q, k = torch.zeros(1, n, 2, 16), torch.zeros(1, n, 2, 16)
    q[..., 0], q[..., 1] = 4096.0, 128.0  # The score of key j is 128 rank[j], exactly, in every dtype.
    k[0, :, :, 0], k[0, :, :, 1] = (rank // 32)[:, None].float(), (rank % 32)[:, None].float()
    v = torch.randn(1, n, 2, 16).to(t)
    out, lse, _ = flash_attn.flash_attn_func(
        q.to(t), k.to(t), v, softmax_scale=1.0, window_size=window, return_attn_probs=True
    )
    i = torch.arange(n)
    greatest = (i + window[1]).clamp(max=n - 1) if rising else (i - window[0]).clamp(min=0)
    atol = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}[dtype]
    torch.testing.assert_close(out, v[:, greatest], rtol=atol, atol=atol)
    torch.testing.assert_close(lse, 128.0 * rank[greatest].float().expand(1, 2, n), rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_new_maximum_scales_what_came_before(dtype, isa):
    """Each of a few keys weighs a bit more than all before it together: nothing may be lost, nor be scaled twice."""
    n, t = 700, harness.TORCH_DTYPES[dtype]
    q, k, v = torch.zeros(1, 40, 1, 16), torch.zeros(1, n, 1, 16), torch.rand(1, n, 1, 16).to(t)
    q[..., 0] = 1.0
    score = 0.0
    for key in (70, 71, 200, 290, 330, 620):
        score += 6.25  # 2^9, above what tiles let a weight exceed 1 by
        k[0, key, 0, 0] = score
    v[0, 71:, 0] += 1.0  # What is lost shows.
    out, lse, _ = flash_attn.flash_attn_func(q.to(t), k.to(t), v, softmax_scale=1.0, return_attn_probs=True)
    scores = k[0, :, 0, 0].double()
    expected = (torch.softmax(scores, 0)[:, None] * v[0, :, 0].double()).sum(0)
    atol = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}[dtype]
    torch.testing.assert_close(out[0, :, 0].double(), expected.expand(40, 16), rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, 0).expand(1, 1, 40), rtol=1e-6, atol=1e-5)


@with_tiles
@pytest.mark.parametrize("case", [c.param() for c in TILES])
def test_tiles(case, isa):
    harness.check(case)


# Sequences on both sides of the rows per key head from which tiles are used (5, 17, 33) and all is packed first (65),
# of the keys (17, 64) and, backward, lengths (9, 17, 64).
MIXED = Case(
    dtype="bf16",
    lengths=(
        (70, 1100),
        (2, 300),
        (3, 300),
        (5, 1),
        (8, 300),
        (9, 300),
        (16, 700),
        (17, 300),
        (32, 1300),
        (33, 300),
        (130, 130),
        (70, 63),
        (70, 64),
        (70, 17),
        (70, 16),
        (16, 16),
        (4, 20),
    ),
    varlen=True,
    H=4,
    Hk=2,
    D=40,
)


@with_tiles
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("settings", [{"causal": True}, {"window": (40, 9)}, {"alibi": "BH"}], ids=str)
def test_tiles_equal_dense_per_sequence(settings, dtype, isa):
    same_bits.check_equals_dense_per_sequence(replace(MIXED, dtype=dtype, **settings))


@with_tiles
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("settings", [{}, {"causal": True, "dropout_p": 0.2}], ids=str)
def test_tiles_same_bits_for_every_thread_count(settings, dtype, isa):
    same_bits.check_every_thread_count(replace(MIXED, dtype=dtype, **settings))


def explained(queries, dtype, D=64, **lengths):
    """Of four query heads to a key head."""
    t = harness.TORCH_DTYPES[dtype]
    q, k = torch.zeros(2, queries, 8, D, dtype=t), torch.zeros(2, 300, 2, D, dtype=t)
    if lengths:
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    return flash_attn.explain(q, k, k, **lengths)


def of_two_lengths(longest, other):
    """Queries; both sequences have 300 keys."""
    queries, keys = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, longest, longest + other], [0, 300, 600]))
    return {"cu_seqlens_q": queries, "cu_seqlens_k": keys, "max_seqlen_q": longest, "max_seqlen_k": 300}


@with_tiles
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_few_rows_do_not_use_tiles(dtype, isa):
    if dtype == "fp32" and not fp32_uses_tiles(isa):
        pytest.skip("on this processor vectors of fp32 are faster than tiles, whatever the number of rows")
    most = 16 if dtype == "fp32" else 4  # 64 and 16 rows.
    few = explained(most, dtype)
    assert few.instruction_set == "avx512" and any("run on the avx512 kernels" in reason for reason in few.reasons)
    assert explained(most + 1, dtype).instruction_set == isa
    mixed = explained(17, dtype, **of_two_lengths(30, 4))
    assert mixed.instruction_set == isa
    assert any("run on the avx512 kernels" in reason for reason in mixed.reasons)


@with_tiles
def test_few_rows_of_bf16_use_tiles_that_are_not_packed(isa):
    vectors = ("avx512", "avx512_bf16")
    for queries, D, direct in ((1, 64, False), (2, 64, True), (2, 72, True), (8, 64, True), (9, 64, False)):
        found = explained(queries, "bf16", D)
        assert any("tiles of K and V that are not packed" in reason for reason in found.reasons) == direct
        if direct:
            assert found.instruction_set == isa and "x 128 keys, in strips of 32 queries x 16 keys" in found.tile
        else:
            assert found.instruction_set == isa if queries > 8 else found.instruction_set in vectors
    mixed = explained(17, "bf16", **of_two_lengths(30, 4))
    assert [
        limit for limit in (4, 16, 32) for reason in mixed.reasons if f"sequences with up to {limit} rows" in reason
    ] == [4, 32]


@with_tiles
def test_few_keys_do_not_use_tiles(isa):
    """Each number of fp16 and fp32 is cut into parts first, so tiles pay from some keys on; backward, lengths."""

    def used(dtype, queries, keys):
        q, k = (torch.zeros(1, n, 1, 64, dtype=harness.TORCH_DTYPES[dtype]) for n in (queries, keys))
        found = flash_attn.explain(q.requires_grad_(), k, k)
        for each, words in ((found, "keys run on the avx512"), (found.backward, "as many keys run on the avx512")):
            assert (each.instruction_set == isa) != any(words in reason for reason in each.reasons)
        return found.instruction_set == isa, found.backward.instruction_set == isa

    if fp32_uses_tiles(isa):
        assert used("fp32", 300, 63) == (False, False) and used("fp32", 300, 64) == (True, True)
    assert used("fp16", 300, 8) == (False, False) and used("fp16", 300, 9) == (False, True)
    assert used("fp16", 300, 17) == (True, True) and used("bf16", 300, 1) == (True, True)


def test_emulation_is_never_chosen():
    cpu()._force_cpu_isa("")
    q = torch.zeros(1, 128, 1, 8, dtype=torch.bfloat16)
    assert flash_attn.explain(q, q, q).instruction_set != "amx_bf16_emulated"


def test_portable_is_always_there():
    assert available()[-1] == "portable" and set(available()) <= set(KNOWN)


def test_unknown_name_is_refused():
    with pytest.raises(RuntimeError, match="(?s)portable.*sse9"):
        cpu()._force_cpu_isa("sse9")
    assert flash_attn.explain(*(torch.zeros(1, 1, 1, 8),) * 3).instruction_set in available()


def report(**environment):
    script = (
        "import torch, flash_attn; q = torch.zeros(1, 128, 1, 8, dtype=torch.bfloat16);"
        "print(flash_attn.explain(q, q, q).instruction_set)"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )


@pytest.mark.second_torch
@pytest.mark.parametrize("name", available())
def test_environment_variable(name):
    done = report(FLASH_ATTN_CPU_ISA=name)
    assert done.stdout.strip() == name, done.stderr


def test_environment_variable_with_an_unknown_name():
    done = report(FLASH_ATTN_CPU_ISA="sse9")
    assert done.returncode != 0 and "FLASH_ATTN_CPU_ISA" in done.stderr and "sse9" in done.stderr
    assert "portable" in done.stderr
