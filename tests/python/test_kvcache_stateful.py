"""A serving loop of random steps against a model that keeps each sequence's keys in a list of its own.

Sequences start, are prefilled in chunks, decode together in any batch, share prefixes through the block table, and end;
pages are handed out and taken back. The model knows nothing of pages.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Dict, List

import pytest
import torch

from flash_attn import flash_attn_with_kvcache

hypothesis = pytest.importorskip("hypothesis", reason="stateful tests are written with hypothesis")
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule  # noqa: E402

STEPS = int(os.environ.get("FLASH_ATTN_FUZZ_STEPS", "12"))
EXAMPLES = int(os.environ.get("FLASH_ATTN_FUZZ_EXAMPLES", "12"))
H, Hk, D, PAGES = 4, 2, 8, 24
BEGUN = time.monotonic()


class Serving(RuleBasedStateMachine):
    steps = 0  # of all examples together

    @initialize(page=st.integers(1, 9), seed=st.integers(0, 2**20))
    def start(self, page, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.page = page
        self.k_pages, self.v_pages = (self.randn(PAGES, page, Hk, D) for _ in range(2))
        self.free: List[int] = list(range(PAGES))
        self.owners = [0] * PAGES
        self.tables: Dict[int, List[int]] = {}
        self.keys: Dict[int, torch.Tensor] = {}  # (length, 2, Hk, D)
        self.next = 0

    def randn(self, *shape):
        return torch.randn(shape, generator=self.g, dtype=torch.float64)

    def reserve(self, name: int, length: int) -> bool:
        """Pages for that many keys; shared pages that would be written are copied first."""
        table, old = self.tables[name], len(self.keys[name])
        partial = old % self.page and self.owners[table[old // self.page]] > 1
        needed = -(-length // self.page) - len(table) + bool(partial)
        if needed > len(self.free):
            return False
        if partial:
            shared, fresh = table[old // self.page], self.free.pop()
            for pages in (self.k_pages, self.v_pages):
                pages[fresh] = pages[shared]
            self.owners[shared] -= 1
            self.owners[fresh] = 1
            table[old // self.page] = fresh
        while len(table) * self.page < length:
            table.append(self.free.pop())
            self.owners[table[-1]] = 1
        return True

    def attend(self, names: List[int], new: int, rows: int, causal: bool, num_splits: int):
        batch = [n for n in names if self.reserve(n, len(self.keys[n]) + new)]
        if not batch:
            return
        width = max(1, max(len(self.tables[n]) for n in batch))
        table = torch.full((len(batch), width), 10**6, dtype=torch.int32)
        for b, n in enumerate(batch):
            table[b, : len(self.tables[n])] = torch.tensor(self.tables[n], dtype=torch.int32)
        q, k, v = self.randn(len(batch), rows, H, D), *(self.randn(len(batch), new, Hk, D) for _ in range(2))
        lengths = torch.tensor([len(self.keys[n]) for n in batch], dtype=torch.int32)
        fresh = {"k": k, "v": v} if new and width * self.page >= rows else {}
        if new and not fresh:
            return
        out, lse = flash_attn_with_kvcache(
            q, self.k_pages, self.v_pages, **fresh, cache_seqlens=lengths, block_table=table, causal=causal,
            num_splits=num_splits, return_softmax_lse=True,
        )  # fmt: skip
        for b, n in enumerate(batch):
            if fresh:
                self.keys[n] = torch.cat((self.keys[n], torch.stack((k[b], v[b]), 1)))
            expected, expected_lse = plain(q[b], self.keys[n], causal)
            torch.testing.assert_close(out[b], expected)
            torch.testing.assert_close(lse[b], expected_lse)

    @rule(length=st.integers(0, 20), chunk=st.integers(1, 8))
    def begin(self, length, chunk):
        name, self.next = self.next, self.next + 1
        self.tables[name], self.keys[name] = [], torch.zeros(0, 2, Hk, D, dtype=torch.float64)
        for first in range(0, length, chunk):
            new = min(chunk, length - first)
            self.attend([name], new, new, True, 0)

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), rows=st.integers(1, 3), new=st.integers(0, 3), causal=st.booleans(), splits=st.integers(0, 4))
    def step(self, data, rows, new, causal, splits):
        names = data.draw(st.lists(st.sampled_from(sorted(self.keys)), min_size=1, max_size=4, unique=True))
        self.attend(names, new, rows, causal, splits)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def fork(self, data):
        """Another sequence with the same keys, in the same pages."""
        source = data.draw(st.sampled_from(sorted(self.keys)))
        name, self.next = self.next, self.next + 1
        used = -(-len(self.keys[source]) // self.page)
        self.tables[name], self.keys[name] = list(self.tables[source][:used]), self.keys[source].clone()
        for page in self.tables[name]:
            self.owners[page] += 1

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(sorted(self.keys)))
        del self.keys[name]
        for page in self.tables.pop(name):
            self.owners[page] -= 1
            if self.owners[page] == 0:
                self.free.append(page)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def too_long(self, data):
        """A call that its pages cannot hold changes nothing."""
        name = data.draw(st.sampled_from(sorted(self.keys)))
        table = torch.tensor([self.tables[name] or [0]], dtype=torch.int32)
        new = len(self.tables[name] or [0]) * self.page + 1
        k = self.randn(1, new, Hk, D)
        with pytest.raises(RuntimeError, match="block_table"):
            flash_attn_with_kvcache(
                self.randn(1, 1, H, D), self.k_pages, self.v_pages, k, k, cache_seqlens=len(self.keys[name]),
                block_table=table,
            )  # fmt: skip

    @invariant()
    def caches_hold_the_keys(self):
        Serving.steps += 1
        for name, keys in getattr(self, "keys", {}).items():
            for slot, (k, v) in enumerate(keys):
                page = self.tables[name][slot // self.page]
                assert torch.equal(self.k_pages[page, slot % self.page], k)
                assert torch.equal(self.v_pages[page, slot % self.page], v)

    def teardown(self):
        """Progress, for who runs long and without capture (`make fuzz`)."""
        minutes, seconds = divmod(int(time.monotonic() - BEGUN), 60)
        print(f"\r{Serving.steps} steps, {minutes}:{seconds:02}", end="", file=sys.stderr, flush=True)


def plain(q, keys, causal):
    """Attention of q (Sq,H,D) over one sequence."""
    k, v = (keys[:, n].repeat_interleave(H // Hk, 1) for n in (0, 1))
    s = torch.einsum("ihd,jhd->hij", q, k) * D**-0.5
    if causal:
        i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
        s = s.masked_fill(j > i + len(k) - len(q), -float("inf"))
    lse = torch.logsumexp(s, -1) if len(k) else torch.full(s.shape[:2], -float("inf"), dtype=s.dtype)
    p = torch.exp(s - lse.masked_fill(lse.isinf(), 0)[..., None])
    return torch.einsum("hij,jhd->ihd", p, v), lse.masked_fill(lse.isinf(), float("inf"))


Serving.TestCase.settings = hypothesis.settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize="FLASH_ATTN_FUZZ_STEPS" not in os.environ,
)
TestServing = Serving.TestCase
