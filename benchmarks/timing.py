"""Time calls in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import math
import time
from functools import partial

import torch

SHORTEST_SAMPLE = 0.01  # seconds; shorter calls are repeated within one sample
LEAST_ROUNDS = 5
LONG_ROUND = 5.0  # seconds; rounds that take longer are run twice only


def keep_freed_memory():
    """Raise glibc's thresholds to their most, as any program does that has freed 32 MB once (mallopt(3), "Dynamic
    adjustment"): below, memory of freed results goes back to the system and is faulted in again by the next call, in
    some processes and not in others."""
    torch.empty(31 << 20, dtype=torch.uint8)


def sample(call):
    """Seconds per call, over enough calls to be measurable."""
    count, elapsed, begin = 0, 0.0, time.perf_counter()
    while elapsed < SHORTEST_SAMPLE:
        call()
        count += 1
        elapsed = time.perf_counter() - begin
    return elapsed / count


def sample_after(before, call):
    """Seconds of one call right after `before`, which is not timed."""
    before()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def gpu_sample(call, count):
    """Seconds per call of a queue of `count` calls."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def sampler(device, calls):
    """How these calls are timed on the device."""
    if device == "cpu":
        return sample
    slowest = max(gpu_sample(call, 3) for call in calls)
    count = max(1, math.ceil(SHORTEST_SAMPLE / slowest))
    return lambda call: gpu_sample(call, count)


def other_work():
    """A function that does what takes tensors out of a core's caches: it writes 256 MB."""
    others = torch.zeros(64 << 20)
    return lambda: others.add_(1)


def in_turn(calls, seconds, device="cpu", before=None):
    """Samples of each call, a list per call: rounds for about `seconds`, at least five, or two if they are long.

    before: on the CPU, what runs before each call and is not timed.
    """
    keep_freed_memory()
    for call in calls:
        call()
    timed = partial(sample_after, before) if before else sampler(device, calls)
    rounds = []
    begin = time.perf_counter()
    while True:
        rounds.append([timed(call) for call in calls])
        elapsed = time.perf_counter() - begin
        least = 2 if elapsed / len(rounds) > LONG_ROUND else LEAST_ROUNDS
        if len(rounds) >= least and elapsed >= seconds:
            return [list(samples) for samples in zip(*rounds)]
