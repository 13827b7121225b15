"""The text, its split into training and held-out bytes, and the trigram model that a GPT has to beat."""

from __future__ import annotations

import hashlib
import itertools
import sysconfig
from pathlib import Path

import torch

HELD_OUT_FRACTION = 0.1


def read_text(path):
    """Bytes of the file `path`, or with None of this Python's standard library: its top-level modules by name."""
    if path is not None:
        return Path(path).read_bytes()
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(module.read_bytes() for module in sorted(folder.glob("*.py")))
    if not text:
        raise SystemExit(f"train_gpt: no Python sources in {folder}; name a text with --data FILE")
    return text


class Text:
    """Training and held-out bytes: 1-d int64 tensors; the last tenth of the text is held out."""

    def __init__(self, data, seq_len):
        self.digest = hashlib.sha256(data).hexdigest()
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        split = len(tokens) - int(len(tokens) * HELD_OUT_FRACTION)
        self.train, self.held_out = tokens[:split], tokens[split:]
        self.seq_len = seq_len
        if len(self.held_out) < seq_len + 3:
            need = int((seq_len + 3) / HELD_OUT_FRACTION) + 1
            raise SystemExit(
                f"train_gpt: the text has {len(tokens)} bytes; --seq-len {seq_len} needs at least {need}: "
                "pass a longer --data or a shorter --seq-len"
            )

    def batch(self, size, seed, step):
        """Random windows (size, seq_len + 1), a function of (seed, step) alone, so that a resumed run sees the same."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - self.seq_len, (size,), generator=generator)
        return self._windows(self.train, starts)

    def held_out_windows(self, tokens):
        """About `tokens` held-out targets as windows (n, seq_len + 1), evenly spaced and not overlapping."""
        return self._windows(self.held_out, self._held_out_starts(tokens))

    def held_out_targets(self, tokens):
        """Positions in `held_out` of the targets of held_out_windows, so that the trigram model predicts the same."""
        return (self._held_out_starts(tokens)[:, None] + torch.arange(1, self.seq_len + 1)).flatten()

    def _held_out_starts(self, tokens):
        # A window starts at 1 or later: the trigram model needs two bytes before the first target.
        room = (len(self.held_out) - 2) // self.seq_len
        count = max(1, min(room, tokens // self.seq_len))
        return 1 + torch.arange(count) * (room // count * self.seq_len)

    def _windows(self, tokens, starts):
        return tokens[starts[:, None] + torch.arange(self.seq_len + 1)]


class Trigram:
    """Interpolated trigram model over bytes.

    p(c | a b) = (n(a b c) + k3 p(c | b)) / (n(a b) + k3), likewise p(c | b) from p(c) with k2, and p(c) from 1/256:
    each order backs off to the next lower one with the weight of k pseudo-counts (Dirichlet prior). k2 and k3 are
    those that predict the last tenth of the training text best; the counts then come from all of it.
    """

    STRENGTHS = (1, 3, 10, 30, 100, 300, 1000, 3000)

    def __init__(self, train):
        split = len(train) - len(train) // 10
        self._count(train[:split])
        tuning = torch.arange(split + 2, len(train))
        pairs = itertools.product(self.STRENGTHS, repeat=2)
        self.k2, self.k3 = min(pairs, key=lambda pair: self._loss(train, tuning, *pair))
        self._count(train)

    def loss(self, tokens, targets):
        """Mean negative log-likelihood in nats per byte of tokens[targets], each given the two bytes before it."""
        return self._loss(tokens, targets, self.k2, self.k3)

    def _count(self, tokens):
        a, b, c = tokens[:-2], tokens[1:-1], tokens[2:]
        self.abc = torch.bincount((a * 256 + b) * 256 + c, minlength=256**3).view(256, 256, 256)
        self.ab, self.bc = self.abc.sum(2), self.abc.sum(0)
        self.b, self.c = self.bc.sum(1), self.bc.sum(0)

    def _loss(self, tokens, targets, k2, k3):
        a, b, c = tokens[targets - 2], tokens[targets - 1], tokens[targets]
        p1 = (self.c[c] + 1).double() / (self.c.sum() + 256)
        p2 = (self.bc[b, c] + k2 * p1) / (self.b[b] + k2)
        p3 = (self.abc[a, b, c] + k3 * p2) / (self.ab[a, b] + k3)
        return -p3.log().mean().item()
