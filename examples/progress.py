"""A progress display: tqdm's bar; where tqdm is missing, a line now and then."""

from __future__ import annotations


class Progress:
    """`done` of `total` units; nothing is shown unless `shown`."""

    def __init__(self, name, done, total, shown, unit="step"):
        try:
            from tqdm import tqdm

            self.bar = tqdm(desc=name, initial=done, total=total, unit=unit, disable=not shown, mininterval=0.5)
        except ImportError:
            self.bar = None
        self.name, self.done, self.total, self.shown = name, done, total, shown

    def step(self, count=1, **figures):
        """`count` more units are done; the figures are shown beside the bar."""
        every = max(1, self.total // 20)
        crossed = (self.done + count) // every > self.done // every
        self.done += count
        if self.bar is not None:
            self.bar.set_postfix(figures, refresh=False)
            self.bar.update(count)
        elif self.shown and crossed:
            print(f"{self.name} {self.done}/{self.total}", *(f"{k}={v}" for k, v in figures.items()), flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()
