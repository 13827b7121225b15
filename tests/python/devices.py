"""Where a case runs: the CPU, a simulated AMD GPU, or the GPU of this machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest

from flash_attn import _native
from flash_attn.testing import simulated

SIMULATED = ("gfx942", "gfx1201")
# Targets that run a part of the grid: test_gpu_targets.py.
OTHERS = ("gfx906", "gfx90a", "gfx950", "gfx1030", "gfx1100")


def needs_code(target: str) -> None:
    """Skips the running test where this build has no code objects for `target`."""
    if target not in {entry["target"] for entry in _native.load()._code_objects()}:
        pytest.skip(f"this build has no code for {target}: GPU_ARCHS={target}")


@dataclass(frozen=True)
class Device:
    """`name`: "cpu", "cuda" or a simulated target, whose waves run in the order that `schedule` and `seed` say."""

    name: str = "cpu"
    schedule: str = "in-order"
    seed: int = 0

    @property
    def torch_name(self) -> str:
        return "cuda" if self.name == "cuda" else "cpu"

    @property
    def backend(self) -> str:
        """The support matrix's name."""
        return {"cpu": "CPU", "cuda": "NVIDIA GPU"}.get(self.name, f"{self.name} (simulated)")

    def scope(self):
        """Within it, calls on tensors of `torch_name` run there, with every check of the simulator on."""
        if self.name in SIMULATED + OTHERS:
            return simulated(self.name, schedule=self.schedule, seed=self.seed)
        return contextlib.nullcontext()


CPU = Device()
