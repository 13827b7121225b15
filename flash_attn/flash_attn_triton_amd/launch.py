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


def head_dims(q: Tensor, v: Tensor) -> Dict[str, int]:
    D, Dv = q.shape[-1], v.shape[-1]
    return dict(D=D, DV=Dv, BLOCK_D=head_block(D), BLOCK_DV=head_block(Dv))


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
        settings = tuning.static_settings(kind, tuning.compiled_for())
        tiles = settings.tiles
        _recorded.append(Launch(kernel, {**arguments, **tiles}, settings.options, grid(tiles)))
        return
    with _current(tensor.device):
        tuning.run_fitting(kind, tensor.device, run)
