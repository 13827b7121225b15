#!/usr/bin/env python3
"""Mutation test of the interpreter: seeded mutants of src/isa/*.cpp, each of which the unit checks must notice.

    tests/mutants.py --build BUILD [--count 50] [--seed 1] [--jobs 2] [--cxx g++] [--only TEXT]

BUILD is a build directory of gfxsim (Ninja). A mutant changes one operator or number in one line of an instruction's
semantics; that file is compiled anew and linked before the library, and `gfxsim selfcheck` runs. Not counted are
mutants that do not compile, that compile to the same code, and those that equivalent_mutants.txt shows to mean the
same. Exit status 1 when a mutant survives. --only: mutants whose `file: line` holds TEXT.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import pathlib
import random
import re
import shlex
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-w"]
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
# Statistics, findings, refusals and definedness are for other tests than the unit checks.
SKIPPED = re.compile(
    r"defined|known|Defined|constant\(scalar\)|report|checking|count_|options|#include|//|static_assert"
    r"|namespace|kind ==|traits|Error\("
    r"|mark_pending|note|issue\(|require|statistics|kAccepts|operands|waited_for|only_stores|flops|kSharedAperture"
)

SKIPPED_FUNCTIONS = re.compile(
    r"[\w:]+ (?<=Halves )\w+\(|[\w:]+ (note\w*|count_\w+|\w+_defined|wait_noting|require_\w+)\("
)

FUNCTION = re.compile(r"[A-Za-z][\w:<>,&* ]* (\w+)\(")


@dataclasses.dataclass(frozen=True)
class Mutant:
    path: pathlib.Path
    function: str
    number: int  # of the line, from 0
    column: int
    line: str
    old: str
    new: str

    def __str__(self) -> str:
        return (
            f"{self.path.name}:{self.number + 1}:{self.column + 1}: '{self.old.strip()}' becomes '{self.new.strip()}'"
        )

    def mutated_line(self) -> str:
        return self.line[: self.column] + self.new + self.line[self.column + len(self.old) :]

    def key(self) -> tuple[str, str, str]:
        """What equivalent_mutants.txt names: the place, the line before, and the line after."""
        return f"{self.path.name} {self.function}", self.line.strip(), self.mutated_line().strip()


def candidates() -> list[Mutant]:
    """Every mutant of every instruction's semantics."""
    found = []
    for path in sorted((ROOT / "src" / "isa").glob("*.cpp")):
        inside_skipped, function = False, ""
        for number, line in enumerate(path.read_text().splitlines()):
            begun = FUNCTION.match(line)
            function = begun[1] if begun else function
            inside_skipped = line != "}" and (inside_skipped or bool(SKIPPED_FUNCTIONS.match(line)))
            if (
                inside_skipped
                or SKIPPED.search(line)
                or line.startswith(("template", "using"))
                or "i < kMaxLanes" in line
            ):
                continue
            # A changed name would only be an instruction that is not known.
            code = re.sub(r'"[^"]*"', lambda text: "\0" * len(text.group()), line)
            for old, new in SWAPS:
                found += [
                    Mutant(path, function, number, at.start(), line, old, new)
                    for at in re.finditer(re.escape(old), code)
                ]
    return found


def equivalent_mutants() -> dict[tuple[str, str, str], str]:
    """Reasons by key, from blocks of four lines: file and function, line before, line after, reason."""
    text = (pathlib.Path(__file__).parent / "equivalent_mutants.txt").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) % 4:
        raise SystemExit(
            "equivalent_mutants.txt: every mutant takes four lines: file and function, before, after, reason"
        )
    blocks = [[line.strip() for line in lines[at : at + 4]] for at in range(0, len(lines), 4)]
    return {(place, before, after): reason for place, before, after, reason in blocks}


class Laboratory:
    """Compiles, links and checks mutants; thread-safe."""

    def __init__(self, build: pathlib.Path, cxx: str, folder: pathlib.Path):
        self.build, self.cxx, self.folder = build.resolve(), shlex.split(cxx), folder
        listing = subprocess.run(
            ["ninja", "-C", str(build), "-t", "commands", "gfxsim"], capture_output=True, text=True, check=True
        )
        words = shlex.split(listing.stdout.strip().splitlines()[-1])
        self.libraries = [word for word in words if word.startswith(("-l", "-L", "-Wl")) or ".so" in word]
        self.commands = sorted(str(item) for item in (self.build / "CMakeFiles/gfxsim_command.dir/cli").glob("*.o"))
        if not self.commands:
            raise SystemExit(f"{build} holds no built gfxsim: ninja -C {build} gfxsim")
        self.equivalent = equivalent_mutants()
        self.originals: dict[pathlib.Path, bytes] = {}
        self.lock = threading.Lock()

    def compile(self, source: pathlib.Path, output: pathlib.Path) -> bool:
        includes = ["-I", str(ROOT / "include"), "-I", str(ROOT / "src")]
        command = [*self.cxx, *FLAGS, *includes, "-c", str(source), "-o", str(output)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def original(self, path: pathlib.Path) -> bytes:
        """The object code of the file as it is."""
        with self.lock:
            if path not in self.originals:
                output = self.folder / (path.name + ".original.o")
                if not self.compile(path, output):
                    raise SystemExit(f"{path} does not compile with {shlex.join(self.cxx)}")
                self.originals[path] = output.read_bytes()
            return self.originals[path]

    def outcome(self, mutant: Mutant) -> str:
        if mutant.key() in self.equivalent:
            return "equivalent"
        original = self.original(mutant.path)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            source = pathlib.Path(folder) / mutant.path.name
            lines = mutant.path.read_text().splitlines()
            lines[mutant.number] = mutant.mutated_line()
            source.write_text("\n".join(lines) + "\n")
            mutated, program = source.with_suffix(".o"), pathlib.Path(folder) / "gfxsim"
            if not self.compile(source, mutated):
                return "does not compile"
            if mutated.read_bytes() == original:
                return "same code"
            # The library's own copy of the file is not drawn in: the mutant before it defines the same functions.
            inputs = [*self.commands, str(mutated), str(self.build / "libgfxsim.a"), *self.libraries]
            subprocess.run([*self.cxx, *inputs, "-o", str(program)], check=True)
            try:
                check = [str(program), "selfcheck", "--fail-fast"]
                result = subprocess.run(check, capture_output=True, timeout=120, check=False)
            except subprocess.TimeoutExpired:
                return "killed"
            return "killed" if result.returncode else "SURVIVES"


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cxx", default="g++")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    pool = [mutant for mutant in candidates() if arguments.only in f"{mutant.path.name}: {mutant.line}"]
    random.Random(arguments.seed).shuffle(pool)
    tally: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as workers:
        laboratory = Laboratory(arguments.build, arguments.cxx, pathlib.Path(folder))
        while pool and tally["killed"] + tally["SURVIVES"] < arguments.count:
            size = min(2 * arguments.jobs, arguments.count - tally["killed"] - tally["SURVIVES"])
            batch, pool = pool[:size], pool[size:]
            for mutant, outcome in zip(batch, workers.map(laboratory.outcome, batch)):
                tally[outcome] += 1
                print(f"{outcome}: {mutant}", flush=True)
                if outcome == "SURVIVES":
                    print(f"    {mutant.line.strip()}\n    {mutant.mutated_line().strip()}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.items())))
    return 1 if tally["SURVIVES"] else 0


if __name__ == "__main__":
    sys.exit(main())
