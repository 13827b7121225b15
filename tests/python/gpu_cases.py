"""The grid of problems for simulated GPUs: small, pairwise, and committed, so that what CI proves can be read.

    python tests/python/gpu_cases.py > tests/data/simulated_grid.json

Blocks of the kernels keep 64 to 256 rows and stream 16 to 64 a step, so some lengths of each list have three streamed
tiles and two kept ones in both directions, and none is a multiple of a tile.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import cases
from cases import MASKS, Case, Row
from devices import SIMULATED, Device

COMMITTED = Path(__file__).resolve().parent.parent / "data" / "simulated_grid.json"

HEADS = {"one": (1, 1), "mha": (2, 2), "gqa": (3, 1), "two groups": (4, 2)}
LENGTHS = {
    "wide": ((143, 273),),
    "tall": ((273, 143),),
    "square": ((201, 201),),
    "batch": ((35, 70),) * 3,
    "ragged": ((33, 143), (0, 20), (205, 0), (1, 1), (70, 273)),
    "ragged tall": ((0, 0), (273, 131), (5, 70), (130, 3)),
    "ragged self": ((40, 40), (0, 0), (201, 201), (1, 1)),
}
FACTORS: Dict[str, Sequence] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "lengths": tuple(LENGTHS),
    "mask": tuple(MASKS),
    "heads": tuple(HEADS),
    "head_dims": ((64, None), (128, None), (40, None), (128, 64), (72, 24), (33, 17), (256, None), (192, 128)),
    "softcap": (0.0, 15.0),
    "alibi": (None, "H", "BH"),
    "dropout_p": (0.0, 0.17, 0.5),
    "packing": ("separate", "kv", "qkv"),
    "strides": ("contiguous", "heads first", "sliced"),
    "scale": (None, 0.31, -0.2),
    "deterministic": (False, True),
    "lse_gradient": (False, True),
    "schedule": ("in-order", "round-robin", "random"),
}


def allowed(row: Row) -> bool:
    """Softcap excludes dropout, packing wants equal shapes; wide heads are few, since simulating is slow."""
    if row.get("softcap") and row.get("dropout_p"):
        return False
    D, Dv = row.get("head_dims", (1, None))
    packing = row.get("packing", "separate")
    if packing != "separate" and Dv is not None:
        return False
    if D >= 192 and row.get("heads", "one") not in ("one", "mha"):
        return False
    if packing == "qkv":
        H, Hk = HEADS[row.get("heads", "one")]
        return H == Hk and all(Sq == Sk for Sq, Sk in LENGTHS[row.get("lengths", "square")])
    return True


def case_of(row: Row) -> Case:
    H, Hk = HEADS[row["heads"]]
    D, Dv = row["head_dims"]
    varlen = row["lengths"].startswith("ragged")
    taken = ("dtype", "softcap", "alibi", "dropout_p", "packing", "strides", "scale", "deterministic", "lse_gradient")
    return Case(
        lengths=LENGTHS[row["lengths"]],
        varlen=varlen,
        slack=(3, 5) if varlen and row["packing"] != "qkv" else (0, 0),
        H=H,
        Hk=Hk,
        D=D,
        Dv=Dv,
        **MASKS[row["mask"]],
        **{name: row[name] for name in taken},
    )


def generated() -> List[Dict[str, Any]]:
    """The pairwise list as it is committed: every row on every target."""
    return [
        {"device": asdict(Device(target, row["schedule"], seed)), "case": asdict(case_of(row))}
        for seed, row in enumerate(cases.covering(FACTORS, allowed))
        for target in SIMULATED
    ]


def product(target: str, lengths: str, mask: str) -> Iterator[Tuple[Case, Device]]:
    """The full product of the factors that choose kernels and tiles; the others are drawn by a fixed seed."""
    chosen = ("dtype", "heads", "head_dims")
    for n, values in enumerate(itertools.product(*(FACTORS[name] for name in chosen))):
        fixed = {**dict(zip(chosen, values)), "lengths": lengths, "mask": mask}
        draw = random.Random(f"{lengths} {mask} {n}")
        while allowed(fixed):
            row = {name: fixed[name] if name in fixed else draw.choice(values) for name, values in FACTORS.items()}
            if allowed(row):
                yield case_of(row), Device(target, "random", n)
                break


def committed() -> List[Tuple[Case, Device]]:
    entries = json.loads(COMMITTED.read_text())
    return [(_tuples(Case, entry["case"]), Device(**entry["device"])) for entry in entries]


def _tuples(kind, values: Dict[str, Any]):
    """JSON has lists where a case has tuples."""
    return kind(
        **{
            name: tuple(tuple(x) if isinstance(x, list) else x for x in value) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )


if __name__ == "__main__":
    print("[" + ",\n ".join(json.dumps(entry) for entry in generated()) + "]")
