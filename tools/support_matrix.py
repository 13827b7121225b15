#!/usr/bin/env python3
"""Turns test results into the README's support matrix.

    pytest tests/python --support-json a.json         records which features passed, per dtype and backend
    tools/support_matrix.py a.json [b.json] --write   puts the table of all records between the markers in README.md
    tools/support_matrix.py a.json [b.json] --check   exits with 1 when README.md holds another table

Rows and columns are fixed. A cell says "yes" when at least one test of it ran and all of them passed, "missing" when a
test shows that the call raises, "fails" when a test failed, and "untested" when no test ran.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Dict, List, Tuple

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- support matrix: begin -->", "<!-- support matrix: end -->"

# Backend -> dtypes of its columns.
_GPU_DTYPES = ("fp32", "fp16", "bf16")
COLUMNS = {
    "CPU": ("fp32", "fp16", "bf16", "fp64"),
    "gfx942 (simulated)": _GPU_DTYPES,
    "gfx1201 (simulated)": _GPU_DTYPES,
    "Triton (interpreted)": _GPU_DTYPES,
}

# Section -> features; most come forward and backward.
_BOTH_WAYS = {
    "layouts": ("dense", "varlen", "packed qkv and kv", "zero lengths and rows without keys", "strided inputs"),
    "head dims": ("head dim 1 to 256", "head dim 257 to 576", "Dv different from D", "MQA/GQA"),
    "scores": ("causal", "window", "softcap", "ALiBi", "dropout"),
    "beyond upstream": ("attn_bias", "attn_mask", "learnable_sink", "key_begin and key_end"),
}
SECTIONS: Dict[str, Tuple[str, ...]] = {
    section: tuple(f"{name} {way}" for name in names for way in ("forward", "backward"))
    for section, names in _BOTH_WAYS.items()
}
SECTIONS["results"] = (
    "softmax_lse",
    "gradient of softmax_lse",
    "S_dmask",
    "deterministic",
    "same bits for every thread count",
)
SECTIONS["torch"] = ("torch.compile", "autocast", "activation checkpointing")
SECTIONS["serving"] = (
    "paged varlen forward",
    "seqused_k, leftpad_k in varlen",
    "kv-cache: append and rotary",
    "kv-cache: paged",
    "kv-cache: cache_batch_idx",
    "kv-cache: cache_leftpad",
    "split-KV",
)
ROWS = tuple(row for rows in SECTIONS.values() for row in rows)


def cell(record: Dict[str, int]) -> str:
    """record counts outcomes: passed, failed, and missing (a passed test that the call raises)."""
    if record.get("failed"):
        return "fails"
    if record.get("missing"):
        return "missing" if not record.get("passed") else "fails"
    return "yes" if record.get("passed") else "untested"


def merged(files: List[Path]) -> Dict[str, Dict[str, int]]:
    """The counts of several records, added."""
    total: Dict[str, Counter] = defaultdict(Counter)
    for file in files:
        for key, counts in json.loads(file.read_text()).items():
            total[key].update(counts)
    return total


def table(results: Dict[str, Dict[str, int]]) -> str:
    """Markdown, from {"row|backend|dtype": counts}."""
    heads = [f"{backend} {dtype}" for backend, dtypes in COLUMNS.items() for dtype in dtypes]
    lines = ["| feature | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for section, rows in SECTIONS.items():
        lines.append(f"| **{section}** |" + " |" * len(heads))
        for row in rows:
            cells = [cell(results.get(f"{row}|{b}|{d}", {})) for b, dtypes in COLUMNS.items() for d in dtypes]
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def split(text: str) -> Tuple[str, str, str]:
    """README before the table, the table, and after it."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{README.name} must hold each of {BEGIN!r} and {END!r} once")
    head, rest = text.split(BEGIN)
    old, tail = rest.split(END)
    return head, old.strip("\n"), tail


def main(argv: List[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON written by pytest --support-json")
    parser.add_argument("--readme", type=Path, default=README, help="file that holds the table")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="replace the table in the file")
    action.add_argument("--check", action="store_true", help="fail when the file holds another table")
    args = parser.parse_args(argv)
    new = table(merged(args.results))
    if not (args.write or args.check):
        print(new)
        return 0
    head, old, tail = split(args.readme.read_text())
    if args.write:
        args.readme.write_text(f"{head}{BEGIN}\n{new}\n{END}{tail}")
        return 0
    difference = list(difflib.unified_diff(old.splitlines(), new.splitlines(), str(args.readme), "tests", lineterm=""))
    if difference:
        print("\n".join(difference))
        print(
            f"The support matrix is out of date: run {Path(__file__).name} {' '.join(map(str, args.results))} --write"
        )
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
