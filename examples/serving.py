"""Continuous batching: which tokens of which requests the model sees at each step.

A step runs one token of every sequence that generates, and up to `chunk` tokens of prompts beside them. Requests are
served in the order in which they came: when pages run out, the sequence that came last gives up its pages and waits
again; what it has generated is kept, and its keys are computed anew (or found, where its pages were not reused).
What a request's tokens are depends on the request alone, not on what is served beside it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from gpt_model import VOCABULARY
from paged_cache import PagedAttention, PagePool, StepRows


@dataclass(frozen=True)
class Request:
    """Generate `new_tokens` bytes after `prompt`: the likeliest with temperature 0, else sampled by `seed`."""

    prompt: bytes
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if not self.prompt or self.new_tokens < 1:
            raise ValueError(
                f"a request has {len(self.prompt)} bytes of prompt and asks for {self.new_tokens} more; both must be "
                "1 or more."
            )
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more.")


def next_token(logits, request, position):
    """The token at `position` of the request's text, from logits (256,).

    argmax(logits / temperature + Gumbel noise) samples from softmax(logits / temperature); the noise is a function of
    (seed, position) alone, so that a token does not depend on how often or where it is computed.
    """
    if request.temperature == 0:
        return logits.argmax().item()
    # The CPU's generator takes the low 32 bits of the number alone: the seed must not lie above them.
    generator = torch.Generator().manual_seed(request.seed * 1_000_003 + position)
    noise = -torch.empty(VOCABULARY, dtype=torch.float64).exponential_(generator=generator).log()
    return (logits.double() / request.temperature + noise).argmax().item()


@torch.no_grad()
def generate_alone(model, request):
    """The request's new bytes without any cache: the model sees the whole text for each of them."""
    text = list(request.prompt)
    for position in range(len(text), len(text) + request.new_tokens):
        text.append(next_token(model(torch.tensor([text]))[0, -1], request, position))
    return bytes(text[len(request.prompt) :])


@dataclass(eq=False)
class Sequence:
    """A request that is being served."""

    request: Request
    tokens: bytearray  # prompt and what has been generated
    pages: list = field(default_factory=list)
    cached: int = 0  # the first tokens, whose keys are in the pages
    most_cached: int = 0  # before it was pre-empted

    @property
    def pending(self):
        """Tokens that the model has yet to see before the next one is known."""
        return len(self.tokens) - self.cached

    @property
    def generated(self):
        return bytes(self.tokens[len(self.request.prompt) :])

    @property
    def left(self):
        """Tokens that are still to be generated."""
        return len(self.request.prompt) + self.request.new_tokens - len(self.tokens)


@dataclass
class Figures:
    """Counts of a server since its start."""

    steps: int = 0
    mixed_steps: int = 0  # with rows of prompts and of generating sequences
    new_tokens: int = 0
    computed_tokens: int = 0  # rows that the model has seen
    found_tokens: int = 0  # rows that it need not see: their pages were there
    recomputed_tokens: int = 0  # rows seen again after a pre-emption
    preemptions: int = 0
    peak_pages_used: int = 0
    peak_pages_shared: int = 0


class Server:
    """Serves requests with `model`, a GPT whose attention is replaced by attention over pages."""

    def __init__(self, model, pages, page_size, max_batch, chunk, share=True):
        for name, value in (("max_batch", max_batch), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more.")
        self.model, self.max_batch, self.chunk, self.share = model, max_batch, chunk, share
        self.pool = PagePool(pages, page_size)
        self.figures = Figures()
        self.waiting, self.running = deque(), []  # both in the order in which requests came
        self.layers = []
        weight = model.embedding.weight
        for block in model.blocks:
            heads, width = block.attention.heads, weight.shape[1]
            layer = PagedAttention(pages, page_size, heads, width // heads, weight.dtype)
            block.attention.attention = layer
            self.layers.append(layer)

    def submit(self, request):
        """Queue the request; returns its Sequence, whose `generated` grows with each step until `left` is 0."""
        need = self.pool.pages_for(len(request.prompt) + request.new_tokens - 1)  # the last token is never attended to
        if need > self.pool.pages:
            raise ValueError(
                f"a request of {len(request.prompt)} + {request.new_tokens} tokens needs {need} pages of "
                f"{self.pool.page_size}, but there are {self.pool.pages}; pass at least {need} pages, larger pages, or "
                "ask for fewer tokens."
            )
        self.waiting.append(Sequence(request, bytearray(request.prompt)))
        return self.waiting[-1]

    def __bool__(self):
        """Whether anything is left to do."""
        return bool(self.running or self.waiting)

    @torch.no_grad()
    def step(self):
        """One run of the model; returns how many tokens were generated."""
        plan = self._plan()
        sequences, counts = list(plan), list(plan.values())
        rows = StepRows(counts, [s.cached for s in sequences], [s.pages for s in sequences])
        for layer in self.layers:
            layer.rows = rows
        tokens = b"".join(s.tokens[s.cached : s.cached + n] for s, n in plan.items())
        logits = self.model(torch.tensor([list(tokens)]))[0]  # (T, 256)
        self._count(sequences, counts)
        generated = 0
        for sequence, count, end in zip(sequences, counts, rows.cu_seqlens_q[1:].tolist()):
            self._cached(sequence, sequence.cached + count)
            if sequence.pending == 0:
                position = len(sequence.tokens)
                sequence.tokens.append(next_token(logits[end - 1], sequence.request, position))
                generated += 1
            if sequence.left == 0:
                self._release(sequence)
                self.running.remove(sequence)
        self.figures.new_tokens += generated
        return generated

    def _plan(self):
        """{sequence: rows of this step}, with pages for all of them."""
        plan, chunk, preemptions = {}, self.chunk, self.figures.preemptions
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # Pre-empted for one before it.
            count = 1 if sequence.pending == 1 else min(sequence.pending, chunk)
            if count and self._give_pages(sequence, sequence.cached + count):
                plan[sequence] = count
                chunk -= count if sequence.pending > 1 else 0
        if self.figures.preemptions > preemptions:
            return plan  # There is too little room for those that run already.
        while self.waiting and len(self.running) < self.max_batch and chunk > 0 and self._admit(chunk):
            sequence = self.running[-1]
            plan[sequence] = min(sequence.pending, chunk)
            chunk -= plan[sequence]
        return plan

    def _admit(self, chunk):
        """Start the first that waits with what the cache knows of it, if there are pages for its first rows."""
        sequence = self.waiting[0]
        # The last token is computed even if it is known: the next one comes from its logits.
        pages = self.pool.hold_prefix(bytes(sequence.tokens[:-1])) if self.share else []
        cached = len(pages) * self.pool.page_size
        need = self.pool.pages_for(cached + min(len(sequence.tokens) - cached, chunk)) - len(pages)
        if need > len(self.pool.free):
            for page in reversed(pages):
                self.pool.release(page)
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.pages, sequence.cached = pages + [self.pool.take() for _ in range(need)], cached
        self.figures.found_tokens += cached
        return True

    def _give_pages(self, sequence, tokens):
        """Pages for the first `tokens`; those that came last give up theirs. False if the sequence itself had to."""
        while self.pool.pages_for(tokens) > len(sequence.pages):
            if self.pool.free:
                sequence.pages.append(self.pool.take())
                continue
            last = self.running.pop()
            self._release(last)
            self.waiting.appendleft(last)
            self.figures.preemptions += 1
            if last is sequence:
                return False
        return True

    def _release(self, sequence):
        # A prefix is of use only with all pages before it, so its end is given up for reuse first.
        for page in reversed(sequence.pages):
            self.pool.release(page)
        sequence.pages, sequence.cached = [], 0

    def _cached(self, sequence, tokens):
        """The pages now hold the keys of the first `tokens`; those that became full may be shared."""
        size = self.pool.page_size
        if self.share:
            for n in range(sequence.cached // size, tokens // size):
                self.pool.publish(sequence.pages[n], bytes(sequence.tokens[: (n + 1) * size]))
        sequence.cached = tokens
        sequence.most_cached = max(sequence.most_cached, tokens)

    def _count(self, sequences, counts):
        figures = self.figures
        figures.steps += 1
        figures.peak_pages_used = max(figures.peak_pages_used, self.pool.used)
        figures.peak_pages_shared = max(figures.peak_pages_shared, self.pool.shared)
        figures.computed_tokens += sum(counts)
        generating = [s.pending == 1 and s.left < s.request.new_tokens for s in sequences]
        figures.mixed_steps += any(generating) and not all(generating)
        figures.recomputed_tokens += sum(
            max(0, min(s.cached + n, s.most_cached) - s.cached) for s, n in zip(sequences, counts)
        )
