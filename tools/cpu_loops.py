#!/usr/bin/env python3
"""The inner loops of the CPU kernels' products, read from the compiled objects: what the compiler made of them.

    tools/cpu_loops.py [--json] [--check] [PATH ...]

PATH (default: build/dev) is a compiled csrc/cpu/isa_*.cpp for x86-64 or AArch64, or a build tree with some. Listed is
every innermost loop that broadcasts one operand from memory and consists of multiply-adds to a fifth at least, 8 or
more: its multiply-adds, all its instructions, how often it reads or writes the stack, with vectors and else, and how
often it moves an address to or from a vector register. All of that is for want of registers, and has cost up to a tenth
of the time. A function that is inlined into another one is enough to bring it about, or a stride that the compiler does
not know.

--check fails where a loop has more than one of these for 5 multiply-adds. Of loops that read K and V where they are, in
memory's time, vectors alone count: addresses of what they ask for may be on the stack, some on purpose (rows_ahead.h).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAST_MULTIPLY_ADDS = 8
LEAST_SHARE = 1 / 5  # of a loop's instructions
MOST_SPILLS = 1 / 5  # for each multiply-add

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s+([0-9a-f]+):\s+(.*?)\s*$")
IN_MEMORYS_TIME = "accumulate_columns<"  # csrc/cpu/direct_rows.h
# Of x86-64, and behind the bar of AArch64, where an operand is broadcast as a lane of a register.
JUMP = re.compile(r"^(?:j\w+|b\.\w+|cbn?z\s+\w+,)\s+([0-9a-f]+)")
MULTIPLY_ADD = re.compile(r"^(vdpbf16ps|vfn?m(add|sub)\d+p[sd])\s.*[yz]mm|^(fmla|bfdot)\s+v\d+\.4s")
BROADCAST = re.compile(
    r"^v(p?broadcast\w+\s.*\(%(?!rip)|fn?m(add|sub).*\{1to|dpbf16ps.*\{1to)|^(fmla|bfdot)\s.*\[\d\]$|^ld1r"
)
ON_STACK = re.compile(r"\(%r[sb]p[,)]|\[sp[,\]]")
VECTOR = re.compile(r"^v\w+\s.*[yz]mm|^(ldu?[rp]|stu?[rp])\s+[qds]\d")
MOVED_ADDRESS = re.compile(r"^vmov[qd]\s+(%xmm\d+,%[er]|%[er]\w+,%xmm)|^fmov\s+(d\d+, x|x\d+, d)")


def functions(listing):
    """(name, [(address, instruction), ...]) of each function of an `objdump -d` listing."""
    name, code = None, []
    for line in listing.splitlines():
        if match := FUNCTION.match(line):
            if code:
                yield name, code
            name, code = match[1], []
        elif match := INSTRUCTION.match(line):
            code.append((int(match[1], 16), match[2]))
    if code:
        yield name, code


def innermost_loops(code):
    """[first, last] indices of the loops, closed by a jump back, that hold no other."""
    index = {address: i for i, (address, _) in enumerate(code)}
    loops = set()
    for last, (_, text) in enumerate(code):
        if match := JUMP.match(text):
            first = index.get(int(match[1], 16))
            if first is not None and first <= last:
                loops.add((first, last))
    return sorted(
        (first, last)
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
    )


def product_loops(listing):
    for name, code in functions(listing):
        for first, last in innermost_loops(code):
            body = [text for _, text in code[first : last + 1]]
            multiply_adds = sum(bool(MULTIPLY_ADD.match(text)) for text in body)
            dense = multiply_adds >= max(LEAST_MULTIPLY_ADDS, LEAST_SHARE * len(body))
            if dense and any(BROADCAST.match(text) for text in body):
                yield {
                    "function": short(name),
                    "address": f"{code[first][0]:x}",
                    "multiply_adds": multiply_adds,
                    "instructions": len(body),
                    **spills(body),
                }


def spills(body):
    stack = [text for text in body if ON_STACK.search(text)]
    vectors = sum(bool(VECTOR.match(text)) for text in stack)
    moved = sum(bool(MOVED_ADDRESS.match(text)) for text in body)
    return {"vectors_on_stack": vectors, "others_on_stack": len(stack) - vectors, "moved_addresses": moved}


def short(name):
    """A demangled name without what all of them have in common."""
    name = re.sub(r"flash_attn::(cpu::)?", "", name)
    return re.sub(r"^(void|auto) ", "", name.split("(")[0])


def disassemble(path):
    with path.open("rb") as file:
        of_arm = file.read(20)[18:] == b"\xb7\0"  # ELF's e_machine, EM_AARCH64
    cross = shutil.which("aarch64-linux-gnu-objdump") if of_arm else None
    command = [cross or "objdump", "-d", "-C", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def report(objects):
    return [{"object": path.name, **loop} for path in objects for loop in product_loops(disassemble(path))]


def share(loop):
    counted = loop["vectors_on_stack"]
    if not loop["function"].startswith(IN_MEMORYS_TIME):
        counted += loop["others_on_stack"] + loop["moved_addresses"]
    return counted / loop["multiply_adds"]


def too_many(loop):
    return share(loop) > MOST_SPILLS


def show(loops):
    print("multiply-adds  instructions  on stack: vectors  others  moved addresses  object and function")
    for loop in sorted(loops, key=share, reverse=True):
        mark = "  TOO MANY" if too_many(loop) else ""
        print(
            f"{loop['multiply_adds']:13} {loop['instructions']:13} {loop['vectors_on_stack']:18} "
            f"{loop['others_on_stack']:7} {loop['moved_addresses']:16}  "
            f"{loop['object'].removesuffix('.cpp.o')} {loop['function'][:100]}{mark}"
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=pathlib.Path, metavar="PATH", default=[ROOT / "build" / "dev"])
    parser.add_argument("--json", action="store_true", help="the list as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 where registers did not suffice")
    args = parser.parse_args(argv)
    if not shutil.which("objdump"):
        sys.exit("objdump is needed: install binutils")
    named = ", ".join(str(path) for path in args.paths)
    objects = [o for path in args.paths for o in (sorted(path.rglob("isa_*.cpp.o")) if path.is_dir() else [path])]
    if not objects:
        sys.exit(f"no compiled isa_*.cpp.o in {named}: build first")
    loops = report(objects)
    if not loops:
        sys.exit(f"no loop of products in {named}: neither x86-64 nor AArch64 code?")
    print(json.dumps(loops, indent=2)) if args.json else show(loops)
    bad = [loop for loop in loops if too_many(loop)]
    if args.check and bad:
        sys.exit(f"{len(bad)} of {len(loops)} loops of products are short of registers")
    if args.check and not args.json:
        print(f"{len(loops)} loops of products, none short of registers")


if __name__ == "__main__":
    main()
