#!/usr/bin/env python3
"""A minimal forward and backward through FlashAttention-3's names, on the GPU or, where there is none, the CPU.

`python test_fa3.py` prints one line each and exits with 0 when the results are right; `pytest test_fa3.py` works too.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
if not (ROOT / "flash_attn" / "lib").is_dir():
    sys.path.remove(str(ROOT))  # nothing was built in this tree: the installed package is meant

import flash_attn_interface  # noqa: E402
from flash_attn import verify  # noqa: E402


def lines():
    place = verify.find_place()
    yield verify.Line("device", f"{place.name} ({place.note})" if place.note else place.name)
    yield from verify.check_results(place, flash_attn_interface.flash_attn_func)


def test_fa3():
    for line in lines():
        assert line.good, line


if __name__ == "__main__":
    sys.exit(verify.show(lines()))
