"""What the benchmarks that compare two implementations share: timing, peak memory, where it ran, a progress bar."""

from __future__ import annotations

import ctypes
import datetime
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def best_device():
    """torch's device for the numbers: the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def processor(device):
    """Name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def setting(device):
    """Where and how numbers were taken, for the head of a table and for JSON."""
    import flash_attn

    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "device": device.type,
        "processor": processor(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flash_attn": f"{flash_attn.__version__} (backend {flash_attn.__backend_version__})",
    }


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call, device, repeats):
    """Median time of one call; the first, which may load code, is not counted."""
    call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _resident(field):
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def extra_memory(call, device):
    """Bytes that this process needed during `call` beyond what it held before; None where that cannot be told.

    On a GPU torch's allocations, on Linux's CPU resident memory, whose peak can be reset there.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still resident would hide the next need of it
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        call()
        return max(_resident("VmHWM") - before, 0)
    except (OSError, AttributeError):
        return None


def peak_memory(device):
    """Bytes that this process held at most: torch's allocations on a GPU, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return _resident("VmHWM")
    except OSError:
        return None


class Progress:
    """tqdm's bar on standard error; where tqdm is missing, nothing."""

    def __init__(self, total, unit):
        try:
            from tqdm import tqdm

            self.bar = tqdm(total=total, unit=unit, leave=False, mininterval=0.2)
        except ImportError:
            self.bar = None

    def step(self, text):
        if self.bar is not None:
            self.bar.set_description(text, refresh=False)
            self.bar.update()

    def close(self):
        if self.bar is not None:
            self.bar.close()
