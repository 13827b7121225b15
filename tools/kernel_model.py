#!/usr/bin/env python3
"""Writes the tables of docs/amd-kernels.md: what a timing model says of the CDNA kernels' main loops.

    tools/kernel_model.py [--check] MODEL [FOLDER]

MODEL is the path of amd_loop_model.py, which is not part of this repository: it replays a main loop from its code
object, `MODEL --json --kernel NAME FILE`. FOLDER (default build/dev/kernels) is `kernels` of a build tree. The text
between the two markers of the document is replaced; --check fails instead when a kernel that the document promises a
share of busy matrix clocks for is below it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import subprocess
import sys

import kernel_report

DOCUMENT = kernel_report.ROOT / "docs" / "amd-kernels.md"
BEGIN, END = "<!-- tools/kernel_model.py writes this -->\n", "<!-- to here -->\n"

# Share of the main loop's clocks in which the matrix unit of gfx942 must be busy.
FLOORS = {
    "fa_forward_bf16_d64_plain": 0.50,
    "fa_forward_bf16_d128_plain": 0.60,
    "fa_backward_dkdv_bf16_d64_plain": 0.45,
    "fa_backward_dkdv_bf16_d128_plain": 0.45,
    "fa_backward_dq_bf16_d64_plain": 0.45,
    "fa_backward_dq_bf16_d128_plain": 0.45,
}


def model(path: pathlib.Path, code_object: pathlib.Path, kernel: str) -> dict | None:
    """The model's answer for one kernel; None where it finds no loop of matrix instructions."""
    command = [sys.executable, str(path), "--json", "--kernel", f"^{kernel}$", str(code_object)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    kernels = json.loads(done.stdout)["kernels"] if done.returncode == 0 and done.stdout.strip() else {}
    return kernels.get(kernel) if kernels.get(kernel, {}).get("paths") else None


def waits(stalls: dict[str, float], clocks: float) -> str:
    """The two longest of a wave's waits, in percent of the loop."""
    longest = sorted(stalls.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {round(100 * value / clocks)} %" for name, value in longest)


def line(name: str, kernel: dict, answer: dict | None) -> str:
    """One row of a table."""
    loop = kernel["loop"]
    fast = answer["paths"]["fast"] if answer else None
    cells = [
        f"`{name.removeprefix('fa_')}`",
        f"{kernel['vgpr']} ({kernel['agpr']})",
        kernel["lds"],
        kernel["occupancy"],
    ]
    if not fast:
        return "| " + " | ".join(map(str, [*cells, *["-"] * 8])) + " |"
    mix, matrix = fast["mix"], fast["mix"]["matrix"]
    cells += [matrix, f"{(mix.get('valu', 0)) / matrix:.1f}", mix.get("trans", 0), f"{mix.get('lds', 0) / matrix:.2f}"]
    cells += [loop["accumulator_moves"], f"{round(fast['clocks_per_iteration'])}", f"**{fast['matrix_busy']:.0%}**"]
    busy = f"vector {fast['vector_busy']:.0%}, LDS {fast['lds_busy']:.0%}; "
    cells.append(busy.replace("%", " %") + waits(fast["stalls"], fast["clocks_per_iteration"]))
    return "| " + " | ".join(map(str, cells)).replace("%**", " %**") + " |"


COLUMNS = (
    "kernel, VGPR (AGPR), LDS, waves per SIMD, matrix, vector per matrix, exp2, LDS per matrix, copies, clocks, "
    "matrix busy, also busy; a wave waits"
).split(", ")
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"


def tables(answers: dict[str, dict | None], rows: dict[str, dict]) -> str:
    """Markdown: a table for each variant."""
    text = ""
    for variant in ("plain", "general"):
        names = [name for name in answers if name.endswith(variant)]
        text += f"\n### {variant.capitalize()}\n\n{HEADER}"
        text += "".join(line(name, rows[f"gfx942 {name}"], answers[name]) + "\n" for name in names)
    return text + "\n"


def below_floors(answers: dict[str, dict | None]) -> list[str]:
    """Kernels that keep the matrix unit less busy than FLOORS asks for."""
    found = []
    for name, floor in FLOORS.items():
        answer = answers.get(name)
        busy = answer["paths"]["fast"]["matrix_busy"] if answer else 0.0
        if busy < floor:
            found.append(f"{name}: matrix unit busy {busy:.0%} of the main loop, at least {floor:.0%} wanted")
    return found


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument(
        "folder", nargs="?", type=pathlib.Path, default=kernel_report.ROOT / "build" / "dev" / "kernels"
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows = kernel_report.report(args.folder)
    answers = {}
    for name in sorted((name.split()[1] for name in rows if name.startswith("gfx942 ")), key=order):
        if rows[f"gfx942 {name}"]["loop"]["matrix"] and (not args.check or name in FLOORS):
            code_object = args.folder / "gfx942" / ("forward.co" if "forward" in name else "backward.co")
            answers[name] = model(args.model, code_object, name)
    if not args.check:
        before, rest = DOCUMENT.read_text().split(BEGIN)
        DOCUMENT.write_text(before + BEGIN + tables(answers, rows) + END + rest.split(END)[1])
    found = below_floors(answers)
    for problem in found:
        print(f"kernel_model: {problem}", file=sys.stderr)
    return 1 if found else 0


def order(name: str) -> tuple[str, int, str]:
    """By family, head dim, type."""
    family, dtype, width = re.match(r"fa_(\w+?)_(b?f16|f32)_d(\d+)_", name).groups()
    return family.replace("forward", " "), int(width), dtype


if __name__ == "__main__":
    sys.exit(main())
