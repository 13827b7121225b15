"""A row of the table: two calls timed in turn, what their ratio must reach, and the record of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Callable, Optional

from reference import TOLERANCE
from timing import in_turn


@dataclass
class Calls:
    """What a row times; each is a function without arguments."""

    ours: Callable
    peer: Optional[Callable] = None
    aside: Optional[Callable] = None  # a time that is taken off ours, such as a plain read of the bias
    before: Optional[Callable] = None  # runs before each timed call, untimed
    check: Optional[Callable] = None  # returns the largest relative error of ours
    peer_check: Optional[Callable] = None  # the same of the peer, where rounding alone may exceed the tolerance
    kernel: str = ""
    instruction_set: str = ""


# What a row's value is, from the medians of ours, the peer and what is set aside.
QUANTITIES = {
    "ratio": "the peer's time over ours",
    "rate": "our work per second over that of our own plain call",
    "share": "bytes per second of K and V over those of a plain sum of the same memory",
    "speed-up": "time with one thread over that with two",
    "cost": "our time over that of our own plain call; a bound from above",
}


def reaches(quantity, value, required):
    """Whether a value reaches what is required; None where nothing is, or there is no value."""
    if required is None or value is None:
        return None
    return value <= required if quantity == "cost" else value >= required


@dataclass
class Row:
    """One line of the table. Times are seconds per call; `work` is in FLOP or bytes per call of ours."""

    suite: str
    name: str
    dtype: str
    build: Optional[Callable] = None  # () -> Calls
    peer: str = "torch"  # whose times peer_seconds are
    quantity: str = "ratio"
    scale: float = 1.0  # our work over the peer's, where these differ
    required: Optional[float] = None
    work: float = 0.0
    unit: str = "FLOP"
    setting: dict = field(default_factory=dict)
    device: str = "cpu"
    kernel: str = ""
    instruction_set: str = ""
    error: Optional[float] = None
    seconds: list = field(default_factory=list)
    peer_seconds: list = field(default_factory=list)
    aside_seconds: list = field(default_factory=list)

    @property
    def words(self):
        """What --rows selects by."""
        return {self.suite, *self.name.split()}

    @property
    def median(self):
        return statistics.median(self.seconds)

    @property
    def peer_median(self):
        return statistics.median(self.peer_seconds) if self.peer_seconds else None

    @property
    def ratio(self):
        """Peer's median time over ours, or None without a peer."""
        return self.peer_median / self.median if self.peer_seconds else None

    @property
    def value(self):
        """The row's quantity, or None without a peer."""
        if not self.peer_seconds:
            return None
        if self.quantity == "cost":
            aside = statistics.median(self.aside_seconds) if self.aside_seconds else 0.0
            return (self.median - aside) / self.peer_median
        return self.scale * self.ratio

    @property
    def met(self):
        """Whether the value reaches what is required; None where nothing is."""
        return reaches(self.quantity, self.value, self.required)

    def record(self):
        """The row as JSON holds it; benchmarks/README.md lists the fields."""
        kept = ("suite", "name", "dtype", "device", "kernel", "instruction_set", "error", "quantity", "required")
        record = {name: getattr(self, name) for name in kept}
        record.update(self.setting, value=self.value, met=self.met, peer=self.peer if self.peer_seconds else None)
        record.update(work=self.work, unit=self.unit, scale=self.scale, median=self.median)
        speed = "gflops" if self.unit == "FLOP" else "gbytes_per_second"
        if self.work:
            record[speed] = self.work / self.median / 1e9
        if self.peer_seconds:
            record.update(peer_median=self.peer_median, ratio=self.ratio)
            if self.work:
                record["peer_" + speed] = self.work / self.scale / self.peer_median / 1e9
        times = ("seconds", "peer_seconds", "aside_seconds")
        return {**record, **{name: getattr(self, name) for name in times}}


def check(row, calls):
    """Fill in the row's error; an end of the program if it is more than the tolerance and twice the peer's."""
    row.error = calls.check()
    allowed = TOLERANCE[row.dtype]
    if not row.error <= allowed and calls.peer_check:
        allowed = max(allowed, 2 * calls.peer_check())
    if not row.error <= allowed:
        raise SystemExit(f"{row.name}: wrong by {row.error:.2g} of the largest entry; {allowed:.2g} is allowed")


def measure(row, seconds, before=None):
    """Fill in the row: check, then time for about `seconds`; before: as in_turn has it, unless the row has its own."""
    calls = row.build()
    row.kernel, row.instruction_set = calls.kernel, calls.instruction_set
    if calls.check:
        check(row, calls)
    timed = {"seconds": calls.ours, "peer_seconds": calls.peer, "aside_seconds": calls.aside}
    timed = {name: call for name, call in timed.items() if call}
    for name, samples in zip(timed, in_turn(list(timed.values()), seconds, row.device, calls.before or before)):
        setattr(row, name, samples)


def chosen(rows, patterns):
    """The rows that have all words of at least one pattern; all of them without patterns."""
    if not patterns:
        return rows
    patterns = [set(pattern.split()) for pattern in patterns]
    return [row for row in rows if any(pattern <= row.words for pattern in patterns)]
