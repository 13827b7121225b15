#!/usr/bin/env python3
"""Proof of what this machine runs: torch, GPU, architecture, kernels, their hashes, forward and backward.

    python prove_fa3_mi300x.py                     the GPU, or the CPU where there is none
    python prove_fa3_mi300x.py --simulate gfx942   an MI300X's code objects in the simulator (needs tools/gfxsim built)

One line each; the exit status is 0 when all are good. The same as `python -m flash_attn verify`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
if not (ROOT / "flash_attn" / "lib").is_dir():
    sys.path.remove(str(ROOT))  # nothing was built in this tree: the installed package is meant

from flash_attn import verify  # noqa: E402

if __name__ == "__main__":
    sys.exit(verify.main(prog="prove_fa3_mi300x.py"))
