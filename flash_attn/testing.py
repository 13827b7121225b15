"""The GPU kernels without a GPU, for tests: CPU tensors go through the same launch code into a simulated one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from typing import Iterator, Optional

from flash_attn import _native

LIBRARY_VARIABLE = "FLASH_ATTN_GFXSIM_LIBRARY"
_in_tree = pathlib.Path(__file__).resolve().parent.parent / "build" / "gfxsim" / "hip" / "libamdhip64.so"
_active = threading.Lock()


def simulator_library() -> str:
    """Path of the simulator's libamdhip64.so: $FLASH_ATTN_GFXSIM_LIBRARY, else the one built in this source tree.

    Raises FileNotFoundError, with how to build it, when it is not there.
    """
    path = os.environ.get(LIBRARY_VARIABLE) or str(_in_tree)
    if os.path.isfile(path):
        return path
    raise FileNotFoundError(
        f"the simulator's library {path} is not there; build it in the source tree with `cmake -S tools/gfxsim -B "
        "build/gfxsim -DGFXSIM_TESTS=OFF && cmake --build build/gfxsim --target gfxsim_hip`, or set "
        f"{LIBRARY_VARIABLE} to its path."
    )


@contextlib.contextmanager
def simulated(
    target: str = "gfx942",
    *,
    schedule: str = "in-order",
    seed: int = 0,
    checks: str = "all",
    threads: int = 1,
    library: Optional[str] = None,
) -> Iterator[None]:
    """Within it, attention on CPU tensors runs the AMD GPU's code objects in the simulator tools/gfxsim.

    Everything but the GPU is what runs on one: validation, choice of kernels, launches, the machine code. It is some
    ten thousand times slower. The whole process is switched, one simulation at a time.

    Arguments:
        target: the simulated GPU, such as "gfx942"; one that there is code for in this build.
        schedule: order in which waves run: "in-order", "round-robin" or "random" (by `seed`).
        checks: "all", "none", or a comma-separated list of undefined, races, waits, barriers, unit-checks. A finding
            fails the launch.
        threads: host threads that run workgroups.
        library: path of the simulator's libamdhip64.so; default: `simulator_library()`.

    Raises:
        FileNotFoundError: the simulator is not there.
        RuntimeError: another simulation is active, an argument is not accepted, or (from attention) the simulator found
            a fault.
    """
    module = _native.load()
    path = library or simulator_library()
    if not _active.acquire(blocking=False):
        raise RuntimeError("flash_attn: a simulation is active already; leave it first, there is one per process.")
    try:
        module._start_simulation(path, target, schedule, seed, checks, threads)
        yield
    finally:
        module._stop_simulation()
        _active.release()
