"""Tile sizes and compiler options of each kernel: a table per architecture or, on request, the fastest measured.

FLASH_ATTENTION_TRITON_AMD_AUTOTUNE=TRUE measures the candidates of a kind of call when it first occurs, with a progress
display, and keeps the fastest in `cache_file`: $XDG_CACHE_HOME/flash_attn/triton/<device>.json (default ~/.cache).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from triton.runtime.errors import OutOfResources

from flash_attn.flash_attn_triton_amd.language import IS_INTERPRETED

VARIABLE = "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE"
_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no", "")


class Kind(NamedTuple):
    """What the best settings of a launch depend on."""

    kernel: str  # "forward", "key_gradients", "query_gradients", "stored"; others have fixed settings
    dtype: torch.dtype
    block_d: int
    block_dv: int
    masked: bool  # causal or a window
    dropout: bool

    def __str__(self) -> str:
        words = [self.kernel, str(self.dtype).replace("torch.", ""), f"d{self.block_d}x{self.block_dv}"]
        return "/".join(words + ["masked"] * self.masked + ["dropout"] * self.dropout)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the wider operand."""
        return max(self.block_d, self.block_dv) * self.dtype.itemsize


class Settings(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int

    @property
    def tiles(self) -> Dict[str, int]:
        return dict(BLOCK_M=self.BLOCK_M, BLOCK_N=self.BLOCK_N)

    @property
    def options(self) -> Dict[str, int]:
        # Said explicitly, since Triton is about to change its default.
        return dict(num_warps=self.num_warps, num_stages=self.num_stages, enable_fp_fusion=True)


INTERPRETER = "interpreter"
_target = INTERPRETER


def compiled_for() -> str:
    """The architecture that recorded launches are for."""
    return _target


@contextlib.contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """Within it, recorded launches have the settings of that architecture ("gfx942")."""
    global _target
    outer, _target = _target, target
    try:
        yield
    finally:
        _target = outer


def architecture(device: torch.device) -> str:
    """gfx942, sm_90, or "interpreter" for CPU tensors."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return name.split(":")[0] or f"sm_{properties.major}{properties.minor}"


def static_settings(kind: Kind, target: str) -> Settings:
    """The table. Rows of 128 bytes are D = 64 of fp16; wider ones take smaller tiles to stay within local memory."""
    if target == INTERPRETER or kind.kernel not in _CDNA:
        return Settings(64, 64, 4, 1)
    table = next(table for prefix, table in _TABLES.items() if target.startswith(prefix))
    return Settings(*next(settings for widest, *settings in table[kind.kernel] if kind.row_bytes <= widest))


# Kernel -> (widest row in bytes, BLOCK_M, BLOCK_N, num_warps, num_stages), narrowest first. The widest is that of
# MAX_HEAD_DIM in fp32. BLOCK_N is 16, 32 or a multiple of 64, as dropout demands.
_Table = Dict[str, Tuple[Tuple[int, int, int, int, int], ...]]
_NVIDIA: _Table = {
    "forward": ((128, 128, 64, 4, 3), (256, 128, 64, 8, 3), (512, 64, 64, 8, 2), (1024, 32, 64, 8, 1)),
    "key_gradients": ((128, 64, 128, 8, 2), (256, 64, 64, 8, 2), (512, 32, 64, 8, 1), (1024, 16, 64, 8, 1)),
    "query_gradients": ((128, 128, 64, 8, 2), (256, 64, 64, 8, 2), (512, 32, 64, 8, 1), (1024, 16, 64, 8, 1)),
    "stored": ((256, 16, 64, 4, 2), (512, 16, 64, 4, 1), (1024, 16, 64, 8, 1)),
}
_CDNA: _Table = {
    "forward": ((128, 128, 64, 4, 2), (256, 128, 64, 4, 1), (512, 64, 64, 4, 1), (1024, 32, 64, 4, 1)),
    "key_gradients": ((128, 64, 64, 4, 1), (256, 32, 64, 4, 1), (512, 16, 64, 4, 1), (1024, 16, 64, 8, 1)),
    "query_gradients": ((128, 64, 64, 4, 1), (256, 32, 64, 4, 1), (512, 16, 64, 4, 1), (1024, 16, 64, 8, 1)),
    "stored": ((256, 16, 64, 4, 1), (512, 16, 64, 4, 1), (1024, 16, 64, 4, 1)),
}
_RDNA3: _Table = {
    "forward": ((128, 64, 32, 8, 1), (256, 64, 16, 8, 1), (512, 32, 16, 8, 1), (1024, 16, 16, 8, 1)),
    "key_gradients": ((128, 32, 16, 8, 1), (256, 16, 16, 8, 1), (512, 16, 16, 8, 1), (1024, 16, 16, 8, 1)),
    "query_gradients": ((128, 32, 16, 8, 1), (256, 16, 16, 8, 1), (512, 16, 16, 8, 1), (1024, 16, 16, 8, 1)),
    "stored": ((128, 16, 64, 4, 1), (256, 16, 32, 4, 1), (512, 16, 16, 4, 1), (1024, 16, 16, 8, 1)),
}
_RDNA4: _Table = {
    "forward": ((128, 64, 64, 4, 1), (256, 64, 64, 8, 1), (512, 32, 32, 8, 1), (1024, 16, 32, 8, 1)),
    "key_gradients": ((128, 32, 32, 8, 1), (256, 32, 16, 8, 1), (512, 16, 16, 8, 1), (1024, 16, 16, 8, 1)),
    "query_gradients": ((128, 32, 32, 8, 1), (256, 32, 32, 8, 1), (512, 16, 32, 8, 1), (1024, 16, 16, 8, 1)),
    "stored": ((128, 16, 64, 4, 1), (256, 16, 32, 4, 1), (512, 16, 32, 4, 1), (1024, 16, 32, 8, 1)),
}


_TABLES = {"sm_": _NVIDIA, "gfx9": _CDNA, "gfx12": _RDNA4, "gfx": _RDNA3}


def loads_again(kind: Kind, target: str) -> bool:
    """Whether backward kernels load their own tiles again for each tile that they meet, which costs loads.

    RDNA 3 has an operand of a matrix instruction twice in a wave: kept ones of 128 features leave too few registers.
    """
    return target.startswith("gfx11") and kind.row_bytes >= 256


def requested() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value.lower() not in _TRUE + _FALSE:
        raise RuntimeError(
            f"flash_attn: {VARIABLE} is {value!r}; accepted, in any case: {', '.join(_TRUE)} to measure tile sizes, "
            f"{', '.join(filter(None, _FALSE))} or unset to take them from the table"
        )
    return value.lower() in _TRUE


_fitting: Dict[Tuple[Kind, torch.device], Settings] = {}


def run_fitting(kind: Kind, device: torch.device, run: Callable[[Settings], None]) -> None:
    """run(settings): those of the table or, with tuning on, the fastest of this device, measured where not known yet.

    Where the table asks for more local memory or registers than the device has, smaller settings follow.
    """
    tuned = requested() and kind.kernel in _CDNA
    first = _fitting.get((kind, device)) or static_settings(kind, architecture(device))
    if tuned:
        first = _tuned(kind, device, run, first)
    for one in _smaller(first):
        try:
            run(one)
        except OutOfResources:
            if one == _smaller(first)[-1]:
                raise
        else:
            _fitting[kind, device] = one
            return


def _smaller(first: Settings) -> List[Settings]:
    """The settings, then without pipelining, then with tiles of fewer and fewer queries."""
    rows = [first.BLOCK_M >> n for n in range(1, 8) if first.BLOCK_M >> n >= 16]
    found = [first, first._replace(num_stages=1), *(first._replace(num_stages=1, BLOCK_M=m) for m in rows)]
    return list(dict.fromkeys(found))


# ---- Measuring.


def device_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else INTERPRETER
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-{architecture(device)}" if device.type == "cuda" else name)


def cache_file(device: torch.device) -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(root, "flash_attn", "triton", device_name(device) + ".json")


def candidates(kind: Kind, static: Settings) -> List[Settings]:
    """The table's settings, and those that differ from them in at most two places."""
    if IS_INTERPRETED:
        return [static, static._replace(BLOCK_N=128)]
    rows = [m for m in (static.BLOCK_M // 2, static.BLOCK_M, static.BLOCK_M * 2) if 16 <= m <= 256]
    product = itertools.product(rows, {static.BLOCK_N, 64, 128}, {static.num_warps, 4, 8}, (1, 2, 3))
    near = [Settings(*one) for one in product if sum(a != b for a, b in zip(one, static)) <= 2]
    return sorted(near, key=lambda one: (one != static, one))


def _seconds(run: Callable[[Settings], None], one: Settings, device: torch.device, repeats: int = 5) -> Optional[float]:
    """The best of some runs after a first; None where the settings do not fit the device."""

    def timed() -> float:
        begin = time.perf_counter()
        run(one)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    try:
        timed()
        return min(timed() for _ in range(1 if IS_INTERPRETED else repeats))
    except OutOfResources:
        return None


def _measure(kind: Kind, device: torch.device, run: Callable[[Settings], None], static: Settings) -> Settings:
    from tqdm import tqdm

    best, best_seconds = static, float("inf")
    with tqdm(candidates(kind, static), desc=f"tuning {kind}", leave=False, file=sys.stderr) as progress:
        for one in progress:
            seconds = _seconds(run, one, device)
            if seconds is not None and seconds < best_seconds:
                best, best_seconds = one, seconds
                progress.set_postfix_str(f"{best_seconds * 1e3:.3f} ms")
    return best


_memory: Dict[pathlib.Path, Dict[str, List[int]]] = {}


def _tuned(kind: Kind, device: torch.device, run: Callable[[Settings], None], static: Settings) -> Settings:
    path = cache_file(device)
    if path not in _memory:
        _memory[path] = _read(path)
    known = _memory[path]
    if str(kind) not in known:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"flash_attn: {VARIABLE} asks to measure {kind}, and a graph is being captured, in which nothing can "
                "be measured; run the call once before, or unset the variable"
            )
        known[str(kind)] = list(_measure(kind, device, run, static))
        # Another process may have written since.
        _memory[path] = {**_read(path), **known}
        _write(path, _memory[path])
    return Settings(*_memory[path][str(kind)])


def _read(path: pathlib.Path) -> Dict[str, List[int]]:
    if not path.exists():
        return {}
    try:
        known = json.loads(path.read_text())
        good = all(len(Settings(*one)) == 4 and all(type(n) is int and n > 0 for n in one) for one in known.values())
    except (ValueError, TypeError, AttributeError):
        good = False
    if not good:
        raise RuntimeError(
            f"flash_attn: {path} must hold tuned settings, a JSON object of lists of four whole numbers; delete it "
            "to measure anew"
        )
    return known


def _write(path: pathlib.Path, known: Dict[str, List[int]]) -> None:
    """Replaces the file in one step, so that a process that reads at the same time sees all of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            json.dump(known, file, indent=1, sort_keys=True)
        os.replace(file.name, path)
    except OSError as error:
        raise RuntimeError(
            f"flash_attn: tuned settings cannot be written to {path} ({error}); set XDG_CACHE_HOME to a folder that "
            f"can be written, or unset {VARIABLE}"
        ) from error
