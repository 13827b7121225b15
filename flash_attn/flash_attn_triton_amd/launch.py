"""Every launch of a kernel goes through here: it looks up tile sizes, tunes them if asked to, and can be recorded."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from flash_attn.flash_attn_triton_amd import tuning
from flash_attn.flash_attn_triton_amd.problem import head_block

Grid = Callable[[Dict[str, int]], Tuple[int, ...]]


class Launch(NamedTuple):
    kernel: Any
    arguments: Dict[str, Any]  # of the kernel, by name, tile sizes included
    options: Dict[str, int]  # of the compiler: num_warps, num_stages, ...
    grid: Tuple[int, ...]


_recorded: Optional[List[Launch]] = None


@contextlib.contextmanager
def recording() -> Iterator[List[Launch]]:
    """Within it kernels are noted instead of launched, so tensors may be on the device "meta"."""
    global _recorded
    outer, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = outer


def is_recording() -> bool:
    return _recorded is not None


def target_of(device: torch.device) -> str:
    """The architecture that a launch is for: that of the device or, while launches are recorded, the one asked for."""
    return tuning.compiled_for() if is_recording() else tuning.architecture(device)


def head_blocks(q: Tensor, v: Tensor) -> Tuple[int, int]:
    """Features of a tile of q and k, and of v.

    On NVIDIA's GPUs fp16 and bf16 have one size for both: of tiles of two widths, which differ in how local memory is
    swizzled, ptxas 12.8 addresses the narrower one wrongly where loads are not pipelined (D = 40 with Dv = 24).
    """
    blocks = head_block(q.shape[-1]), head_block(v.shape[-1])
    if q.dtype != torch.float32 and target_of(q.device).startswith("sm_"):
        return max(blocks), max(blocks)
    return blocks


def head_dims(q: Tensor, v: Tensor) -> Dict[str, int]:
    BLOCK_D, BLOCK_DV = head_blocks(q, v)
    return dict(D=q.shape[-1], DV=v.shape[-1], BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV)


def _current(device: torch.device):
    """Triton launches on torch's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch(kernel, kind: tuning.Kind, tensor: Tensor, grid: Grid, /, **arguments) -> None:
    """Runs kernel[grid(tile sizes)](**arguments, **tile sizes) where `tensor` is; nothing where the grid is empty."""

    def run(settings: tuning.Settings) -> None:
        size = grid(settings.tiles)
        if min(size) > 0:
            kernel[size](**arguments, **settings.tiles, **settings.options)

    if _recorded is not None:
        settings = tuning.static_settings(kind, target_of(tensor.device))
        tiles = settings.tiles
        _recorded.append(Launch(kernel, {**arguments, **tiles}, settings.options, grid(tiles)))
        return
    with _current(tensor.device):
        tuning.run_fitting(kind, tensor.device, run)
