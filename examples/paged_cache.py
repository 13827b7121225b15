"""The key/value cache of a serving process: pages with reference counts, and attention over them.

Letters: T packed rows of a step, B sequences in it, H heads, D head dimension.
Slot s of a sequence is slot s % page_size of its page number s // page_size; row b of a block table lists the pages of
sequence b. Sequences that begin alike hold the same pages: only full pages are shared, and those are never written
again, so that no page needs to be copied.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch


class OutOfPages(RuntimeError):
    """Every page is held by a sequence."""


class PagePool:
    """Which pages are held, by how many sequences, and which prefix a full page belongs to.

    A released page keeps its prefix until the page is needed for something else (the longest released goes first), so
    that a later sequence, or the same one after a pre-emption, may still find it.
    """

    def __init__(self, pages, page_size):
        if pages < 1 or page_size < 1:
            raise ValueError(f"pages is {pages} and page_size {page_size}; both must be 1 or more.")
        self.pages, self.page_size = pages, page_size
        self.holders = [0] * pages
        self.free = OrderedDict.fromkeys(range(pages))  # pages without holders, the longest released first
        self.page_of_prefix, self.prefix_of_page = {}, {}

    @property
    def used(self):
        """Pages that at least one sequence holds."""
        return self.pages - len(self.free)

    @property
    def shared(self):
        """Pages that more than one sequence holds."""
        return sum(holders > 1 for holders in self.holders)

    def pages_for(self, tokens):
        """Pages that so many tokens need."""
        return -(-tokens // self.page_size)

    def take(self):
        """A page for one holder, with nothing in it."""
        if not self.free:
            raise OutOfPages(f"all {self.pages} pages are held")
        page, _ = self.free.popitem(last=False)
        self.page_of_prefix.pop(self.prefix_of_page.pop(page, None), None)
        self.holders[page] = 1
        return page

    def release(self, page):
        """One holder fewer."""
        if self.holders[page] < 1:
            raise ValueError(f"page {page} is released, but nothing holds it.")
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self.free[page] = None

    def publish(self, page, prefix):
        """The page is full: it ends the bytes `prefix`, all tokens of its sequence so far."""
        if self.holders[page] < 1 or len(prefix) % self.page_size:
            raise ValueError(f"page {page} with {self.holders[page]} holders cannot end {len(prefix)} tokens.")
        if prefix not in self.page_of_prefix and page not in self.prefix_of_page:
            self.page_of_prefix[prefix], self.prefix_of_page[page] = page, prefix

    def hold_prefix(self, tokens):
        """One holder more for each full page that is known to begin `tokens` (bytes); the list of those pages."""
        found = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.page_of_prefix.get(tokens[:end])
            if page is None:
                break
            found.append(page)
        for page in found:
            self.free.pop(page, None)
            self.holders[page] += 1
        return found


@dataclass
class StepRows:
    """Where the packed rows of one step belong: of each sequence its next tokens, after those that the cache holds."""

    counts: list  # per sequence, rows in this step
    cached: list  # per sequence, tokens before them
    tables: list  # per sequence, its pages

    def __post_init__(self):
        def cumulative(lengths):
            return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

        lengths = [cached + count for cached, count in zip(self.cached, self.counts)]
        longest = max(map(len, self.tables))
        # Entries past a sequence's pages are never read.
        self.block_table = torch.tensor([[*t, *[0] * (longest - len(t))] for t in self.tables], dtype=torch.int32)
        self.cache_seqlens = torch.tensor(self.cached, dtype=torch.int32)
        self.cu_seqlens_q, self.cu_seqlens_k = cumulative(self.counts), cumulative(lengths)
        self.max_seqlen_q, self.max_seqlen_k = max(self.counts), max(lengths)

    def slots(self, page_size):
        """Index of each row's slot among all slots of all pages: int64 (T,)."""
        places = zip(self.counts, self.cached, self.tables)
        positions = [(table, s) for count, start, table in places for s in range(start, start + count)]
        return torch.tensor([table[s // page_size] * page_size + s % page_size for table, s in positions])


class PagedAttention:
    """Attention of one layer over its pages, in place of gpt_model's functions: stores the new keys, then attends.

    Before each step of the model `rows` is set, the same for all layers.
    """

    def __init__(self, pages, page_size, heads, head_dim, dtype):
        self.k_pages = torch.zeros(pages, page_size, heads, head_dim, dtype=dtype)
        self.v_pages = torch.zeros_like(self.k_pages)
        self.rows = None

    def __call__(self, q, k, v, slopes):
        """q, k, v, result (1, T, H, D), the packed rows of all sequences; slopes (H,) fp32."""
        only_decoding = self.rows.max_seqlen_q == 1
        return (self._decode if only_decoding else self._mixed)(q[0], k[0], v[0], slopes)[None]

    def _decode(self, q, k, v, slopes):
        """One row per sequence: stored and attended to in one call."""
        from flash_attn import flash_attn_with_kvcache

        q, k, v = (x[:, None] for x in (q, k, v))  # (B, 1, H, D)
        out = flash_attn_with_kvcache(
            q, self.k_pages, self.v_pages, k, v, causal=True, alibi_slopes=slopes,
            cache_seqlens=self.rows.cache_seqlens, block_table=self.rows.block_table,
        )  # fmt: skip
        return out[:, 0]

    def _mixed(self, q, k, v, slopes):
        """Chunks of prompts and single rows of decoding sequences together."""
        from flash_attn import flash_attn_varlen_func

        rows = self.rows
        slots = rows.slots(self.k_pages.shape[1])
        self.k_pages.flatten(0, 1)[slots] = k
        self.v_pages.flatten(0, 1)[slots] = v
        return flash_attn_varlen_func(
            q, self.k_pages, self.v_pages, rows.cu_seqlens_q, rows.cu_seqlens_k, rows.max_seqlen_q, rows.max_seqlen_k,
            causal=True, alibi_slopes=slopes, block_table=rows.block_table,
        )  # fmt: skip
