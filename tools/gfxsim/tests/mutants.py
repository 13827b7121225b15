#!/usr/bin/env python3
"""Mutation test of the interpreter: seeded mutants of src/isa/*.cpp, each of which the unit checks must notice.

    tests/mutants.py --build BUILD [--count 50] [--seed 1] [--cxx g++]

BUILD is a build directory of gfxsim (Ninja). A mutant changes one operator or number in one line of an instruction's
semantics; the file is compiled anew, linked before the library, and `gfxsim selfcheck` runs. Exit status 1 when a
mutant survives. Mutants that do not compile, and those that compile to the same code, are not counted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import pathlib
import random
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SWAPS = [
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" & ", " | "),
    (" | ", " & "),
    (" ^ ", " | "),
    (" << ", " >> "),
    (" >> ", " << "),
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    ("& 31", "& 15"),
    ("& 63", "& 31"),
    ("std::min", "std::max"),
    ("std::max", "std::min"),
    ("a + b", "a"),
    ("~a", "a"),
    ("<true>", "<false>"),
    (", true", ", false"),
    ("kReadsResult", "0"),
    ("i32 a", "u32 a"),
    ("16", "8"),
]
# What statistics, findings and definedness are about is tested by other tests than the unit checks.
SKIPPED = re.compile(
    r"defined|known|Defined|constant\(scalar\)|report|checking|count_|options|#include|//|static_assert"
    r"|namespace|kind ==|traits|Error\("
    r"|mark_pending|note|issue\(|require|statistics|kAccepts|operands"
)


def candidates() -> list[tuple[pathlib.Path, int, str, str]]:
    found = []
    for path in sorted((ROOT / "src" / "isa").glob("*.cpp")):
        for number, line in enumerate(path.read_text().splitlines()):
            if (
                SKIPPED.search(line)
                or line.startswith(("template", "using"))
                or "for (int i = 0; i < kMaxLanes" in line
            ):
                continue
            found += [(path, number, old, new) for old, new in SWAPS if old in line]
    return found


def compile_command(cxx: str) -> list[str]:
    flags = [
        "-std=c++20",
        "-O1",
        "-march=native",
        "-ffp-contract=off",
        "-w",
        "-I",
        str(ROOT / "include"),
        "-I",
        str(ROOT / "src"),
    ]
    return [*shlex.split(cxx), *flags]


def link_libraries(build: pathlib.Path) -> list[str]:
    """What the command links besides its own objects, from its link line."""
    line = subprocess.run(
        ["ninja", "-C", str(build), "-t", "commands", "gfxsim"], capture_output=True, text=True, check=True
    )
    words = shlex.split(line.stdout.strip().splitlines()[-1])
    return [word for word in words if word.startswith(("-l", "-L", "-Wl")) or ".so" in word]


def run_mutant(arguments: argparse.Namespace, mutant: tuple[pathlib.Path, int, str, str], libraries: list[str]) -> str:
    path, number, old, new = mutant
    lines = path.read_text().splitlines()
    lines[number] = lines[number].replace(old, new, 1)
    build = arguments.build
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / path.name
        source.write_text("\n".join(lines) + "\n")
        mutated, program = source.with_suffix(".o"), pathlib.Path(folder) / "gfxsim"
        command = compile_command(arguments.cxx)
        if subprocess.run(
            [*command, "-c", str(source), "-o", str(mutated)], capture_output=True, check=False
        ).returncode:
            return "does not compile"
        original = source.with_suffix(".original.o")
        subprocess.run([*command, "-c", str(path), "-o", str(original)], check=True)
        same = subprocess.run(["cmp", "-s", str(mutated), str(original)], check=False).returncode == 0
        if same:
            return "same code"
        # The library's own copy of the file is not drawn in: the mutant before it defines the same functions.
        command_objects = [str(item) for item in (build / "CMakeFiles" / "gfxsim_command.dir" / "cli").glob("*.o")]
        inputs = [*command_objects, str(mutated), str(build / "libgfxsim.a"), *libraries]
        subprocess.run([*shlex.split(arguments.cxx), *inputs, "-o", str(program)], check=True)
        try:
            result = subprocess.run([str(program), "selfcheck"], capture_output=True, timeout=120, check=False)
        except subprocess.TimeoutExpired:
            return "killed"
        return "killed" if result.returncode else "SURVIVES"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cxx", default="g++")
    arguments = parser.parse_args()
    arguments.build = arguments.build.resolve()
    pool = candidates()
    random.Random(arguments.seed).shuffle(pool)
    libraries = link_libraries(arguments.build)
    killed, survivors = 0, 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as workers:
        at = 0
        while killed + survivors < arguments.count and at < len(pool):
            batch = pool[at : at + min(2 * arguments.jobs, arguments.count - killed - survivors)]
            at += len(batch)
            for mutant, outcome in zip(batch, workers.map(lambda m: run_mutant(arguments, m, libraries), batch)):
                killed += outcome == "killed"
                survivors += outcome == "SURVIVES"
                path, number, old, new = mutant
                print(f"{outcome}: {path.name}:{number + 1}: '{old.strip()}' becomes '{new.strip()}'", flush=True)
    print(f"{killed} mutants killed, {survivors} survive")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
