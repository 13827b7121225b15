#!/usr/bin/env python3
"""What the compiled AMD kernels cost, read from the code objects themselves: no GPU needed.

    tools/kernel_report.py [--json] [--check [--update]] [FOLDER]

FOLDER (default build/dev/kernels) is `kernels` of a build tree: <target>/<family>.co. For every kernel: registers,
spills, scratch and LDS from its metadata, waves per SIMD that these allow, code bytes, and instructions by class of the
main loop (one wave, the path on which no rare branch is taken; "acc" counts copies between VGPRs and AGPRs).

--check fails on spills or scratch where D <= 128, on occupancy below the manifest's, and on growth: code, registers,
spills, LDS or accumulator copies more than 10 % above csrc/hip/manifest_report.json, the committed table, or a kernel
that is not in it. --update rewrites that file.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "csrc" / "hip" / "manifest_report.json"
MANIFEST = ROOT / "csrc" / "hip" / "manifest.def"
TARGETS = ROOT / "csrc" / "hip" / "targets.h"
GROWTH = 1.10

# By kind of target: registers of one SIMD lane, their allocation granule, waves per SIMD at most, SIMDs that share
# `lds` bytes (of a WGP on RDNA, in wave32). rdna3: gfx1100, gfx1101 and gfx1151; the others have 1024 registers.
MACHINES = {
    "gcn": dict(registers=256, granule=4, waves=10, simds=4, lds=65536),
    "cdna": dict(registers=512, granule=8, waves=8, simds=4, lds=65536),
    "rdna2": dict(registers=1024, granule=16, waves=16, simds=4, lds=131072),
    "rdna3": dict(registers=1536, granule=24, waves=16, simds=4, lds=131072),
    "rdna4": dict(registers=1536, granule=24, waves=16, simds=4, lds=131072),
}

NOTE_FIELDS = {
    "vgpr": "vgpr_count",
    "agpr": "agpr_count",
    "sgpr": "sgpr_count",
    "vgpr_spills": "vgpr_spill_count",
    "sgpr_spills": "sgpr_spill_count",
    "scratch": "private_segment_fixed_size",
    "lds": "group_segment_fixed_size",
    "threads": "max_flat_workgroup_size",
    "wave": "wavefront_size",
}

CLASSES = [
    ("matrix", re.compile(r"v_(mfma|wmma|smfmac)_")),
    ("accumulator_moves", re.compile(r"v_accvgpr_")),
    ("transcendental", re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")),
    ("vector", re.compile(r"v_")),
    ("lds", re.compile(r"ds_")),
    ("scratch", re.compile(r"scratch_")),
    ("global", re.compile(r"(global|flat|buffer)_")),
    ("barrier", re.compile(r"s_barrier")),
    ("wait", re.compile(r"s_(wait|nop|delay)")),
    ("scalar", re.compile(r"s_")),
]


def tool(name: str) -> str:
    """llvm-<name> of any installed version, newest first."""
    for candidate in [f"llvm-{name}-{version}" for version in range(30, 19, -1)] + [f"llvm-{name}"]:
        if shutil.which(candidate):
            return candidate
    raise SystemExit(f"kernel_report: llvm-{name} is missing (apt install llvm-22)")


def run(*command: str) -> str:
    """Standard output of a tool that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def metadata(path: pathlib.Path) -> dict[str, dict]:
    """Kernel name -> the fields of NOTE_FIELDS."""
    kernels: dict[str, dict] = {}
    for block in re.split(r"\n\s+- \.a(?:gpr_count|rgs):", run(tool("readelf"), "--notes", str(path)))[1:]:
        # The first field of a kernel is agpr_count on CDNA and args elsewhere: what the split took off.
        agpr = re.match(r"\s*(\d+)", block)
        name = re.search(r"\n    \.name:\s+(\S+)", block)
        if not name:
            continue
        kernel = {}
        for key, field in NOTE_FIELDS.items():
            value = re.search(rf"\n    \.{field}:\s+(\d+)", block)
            kernel[key] = int(value.group(1)) if value else 0
        kernel["agpr"] = int(agpr.group(1)) if agpr else kernel["agpr"]
        kernels[name.group(1)] = kernel
    return kernels


def occupancy(kernel: dict, kind: str) -> int:
    """Waves per SIMD that registers and LDS allow on that kind of target."""
    machine = MACHINES[kind]
    granules = -(-max(kernel["vgpr"], 1) // machine["granule"]) * machine["granule"]
    by_registers = min(machine["registers"] // granules, machine["waves"])
    waves_per_group = -(-kernel["threads"] // kernel["wave"])
    groups = machine["lds"] // kernel["lds"] if kernel["lds"] else 1 << 16
    return min(by_registers, max(1, groups * waves_per_group // machine["simds"]))


def disassemble(path: pathlib.Path) -> dict[str, list[tuple[int, str, int | None]]]:
    """Kernel name -> [(address, opcode, branch target or None)]."""
    kernels: dict[str, list] = {}
    current: list = []
    base = 0
    for line in run(tool("objdump"), "-d", "--no-show-raw-insn", str(path)).splitlines():
        header = re.match(r"([0-9a-f]+) <([^>]+)>:", line)
        if header:
            base, current = int(header.group(1), 16), []
            kernels[header.group(2)] = current
            continue
        instruction = re.match(r"\s+(\S+).*//\s*([0-9A-F]+):?(.*)", line)
        if instruction:
            target = re.search(r"<[^>+]+(?:\+0x([0-9a-f]+))?>", instruction.group(3))
            is_branch = instruction.group(1).startswith(("s_cbranch", "s_branch"))
            to = base + int(target.group(1) or "0", 16) if target and is_branch else None
            current.append((int(instruction.group(2), 16), instruction.group(1), to))
    return kernels


def blocks_of(code: list[tuple[int, str, int | None]]) -> tuple[list[list[str]], list[list[int]]]:
    """Basic blocks in address order: their opcodes and their successors."""
    starts = {code[0][0]} | {target for _, _, target in code if target is not None}
    starts |= {code[i + 1][0] for i in range(len(code) - 1) if code[i][2] is not None or code[i][1] == "s_endpgm"}
    blocks, number = [], {}
    for address, opcode, target in code:
        if address in starts:
            number[address] = len(blocks)
            blocks.append([])
        blocks[-1].append((opcode, target))
    edges = []
    for i, block in enumerate(blocks):
        opcode, target = block[-1]
        following = [] if opcode in ("s_branch", "s_endpgm", "s_setpc_b64") or i + 1 == len(blocks) else [i + 1]
        edges.append(following + ([number[target]] if target in number else []))
    return [[opcode for opcode, _ in block] for block in blocks], edges


def shortest_cycle(header: int, blocks: list[list[str]], edges: list[list[int]]) -> list[str]:
    """Opcodes of the way from a block back to itself with fewest instructions, over later blocks; [] if none."""
    queue, done = [(len(blocks[header]), header, (header,))], set()
    while queue:
        length, block, path = heapq.heappop(queue)
        for following in edges[block]:
            if following == header:
                return [opcode for i in path for opcode in blocks[i]]
            if following > header and following not in done:
                heapq.heappush(queue, (length + len(blocks[following]), following, (*path, following)))
        done.add(block)
    return []


def main_loop(code: list[tuple[int, str, int | None]]) -> list[str]:
    """One round of the loop with most arithmetic, on which every branch takes its cheaper side."""

    def work(path: list[str]) -> tuple[int, int]:
        matrix = sum(op.startswith(("v_mfma", "v_wmma")) for op in path)
        return matrix, sum(op.startswith(("v_fma", "v_pk_fma", "v_dual_fma")) for op in path)

    blocks, edges = blocks_of(code)
    headers = {to for block, following in enumerate(edges) for to in following if to <= block}
    return max((shortest_cycle(header, blocks, edges) for header in headers), key=work, default=[])


def classify(opcodes: list[str]) -> dict[str, int]:
    """Instructions by class, in the order of CLASSES."""
    counts: dict[str, int] = collections.OrderedDict((name, 0) for name, _ in CLASSES)
    for opcode in opcodes:
        for name, pattern in CLASSES:
            if pattern.match(opcode):
                counts[name] += 1
                break
    return counts


def report(folder: pathlib.Path) -> dict[str, dict]:
    """'<target> <kernel>' -> everything known about it."""
    rows: dict[str, dict] = {}
    kinds = kinds_of_targets(TARGETS.read_text())
    for path in sorted(folder.glob("gfx*/*.co")):
        code = disassemble(path)
        for name, kernel in sorted(metadata(path).items()):
            instructions = code[name]
            kernel["occupancy"] = occupancy(kernel, kinds[path.parent.name])
            kernel["bytes"] = instructions[-1][0] - instructions[0][0]
            kernel["loop"] = classify(main_loop(instructions))
            kernel["opcodes"] = len({opcode for _, opcode, _ in instructions})
            rows[f"{path.parent.name} {name}"] = kernel
    return rows


def head_dim(name: str) -> int:
    """The padded head dim in a kernel's name."""
    match = re.search(r"_d(\d+)", name)
    return int(match.group(1)) if match else 0


def kinds_of_targets(targets: str) -> dict[str, str]:
    """Target -> its kind, from the text of targets.h."""
    return dict(re.findall(r"\bX\((gfx\w+), (\w+)\)", targets))


def kinds_of_groups(targets: str) -> dict[str, list[str]]:
    """What a row may name -> the kinds of targets that this stands for, from the text of targets.h."""
    kinds: dict[str, list[str]] = {}
    for name, text in re.findall(r"^#define FA_ROWS_(\w+)\(\.\.\.\) (.*)$", targets, re.MULTILINE):
        groups = [kind for group in re.findall(r"FA_ROWS_(\w+)\(", text) for kind in kinds[group]]
        kinds[name] = re.findall(r"FA_ROW_OF\((\w+)", text) + groups
    return kinds


def occupancy_floors(manifest: str, targets: str) -> dict[tuple[str, str], int]:
    """(kind of target, kernel) -> waves per SIMD that its row asks for, from manifest.def and targets.h as texts."""
    floors = {}
    kinds = kinds_of_groups(targets)
    for row in re.findall(r"^FA_ROW\((.*)\)$", manifest, re.MULTILINE):
        fields = [field.strip() for field in row.split(",")]
        family, group, dtype, width, _, variant, *_, waves = fields
        for kind in kinds[group]:
            floors[kind, f"fa_{family}_{dtype}_d{width}_{variant}"] = int(waves)
    return floors


def problems(rows: dict[str, dict], committed: dict[str, dict], floors: dict[tuple[str, str], int]) -> list[str]:
    """What --check fails on. Targets that were not compiled are not asked for."""
    found = []
    kinds = kinds_of_targets(TARGETS.read_text())
    compiled = {name.split()[0] for name in rows}
    for name, kernel in rows.items():
        target, symbol = name.split()
        floor = floors.get((kinds[target], symbol))
        if floor is None:
            found.append(f"{name}: not in {MANIFEST.name}")
        elif kernel["occupancy"] < floor:
            found.append(f"{name}: {kernel['occupancy']} waves per SIMD, the manifest asks for {floor}")
        if head_dim(name) <= 128 and (kernel["vgpr_spills"] or kernel["scratch"]):
            found.append(f"{name}: {kernel['vgpr_spills']} spilled registers, {kernel['scratch']} bytes of scratch")
        before = committed.get(name)
        if before is None:
            found.append(f"{name}: not in {COMMITTED.name}; run with --update")
            continue
        for field in ("bytes", "vgpr", "vgpr_spills", "lds", "accumulator_moves"):
            now, was = (k["loop"][field] if field in k["loop"] else k[field] for k in (kernel, before))
            if now > was * GROWTH + 8:
                found.append(f"{name}: {field} grew from {was} to {now}")
    gone = [name for name in committed if name not in rows and name.split()[0] in compiled]
    return found + [f"{name}: gone; run with --update" for name in gone]


def print_table(rows: dict[str, dict]) -> None:
    """One line per kernel."""
    print(f"{'kernel':40} vgpr agpr spill scratch   lds waves  bytes | ", end="")
    print("main loop: matrix vector/m trans  lds global scalar acc")
    for name, k in rows.items():
        loop = k["loop"]
        ratio = f"{loop['vector'] / loop['matrix']:8.2f}" if loop["matrix"] else f"{loop['vector']:8}"
        spills = f"{k['vgpr_spills']}+{k['sgpr_spills']}"
        print(f"{name:40} {k['vgpr']:4} {k['agpr']:4} {spills:>5} {k['scratch']:7} {k['lds']:5}", end=" ")
        print(f"{k['occupancy']:5} {k['bytes']:6} | {loop['matrix']:17} {ratio} {loop['transcendental']:5}", end=" ")
        print(f"{loop['lds']:4} {loop['global']:6} {loop['scalar']:6} {loop['accumulator_moves']:3}")


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=ROOT / "build" / "dev" / "kernels")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    rows = report(args.folder)
    if not rows:
        raise SystemExit(
            f"kernel_report: no code objects in {args.folder}; build the package, or the target flash_attn_kernels "
            "in any build tree"
        )
    if args.update:
        lines = [f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows)]
        COMMITTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows)
    if not args.check:
        return 0
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    found = problems(rows, committed, occupancy_floors(MANIFEST.read_text(), TARGETS.read_text()))
    for problem in found:
        print(f"kernel_report: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
