"""The AVX2 rows: dense rows in a process whose attention, torch, oneDNN and MKL are all held to AVX2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# ATEN_CPU_CAPABILITY alone leaves torch's matrix products, which oneDNN and MKL compute, on AVX-512.
LIMITS = {
    "FLASH_ATTN_CPU_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
MEASURED = ("seconds", "peer_seconds", "error", "kernel", "instruction_set")


def command(rows, args, json_path):
    """The benchmark's command line for the dense rows of these names."""
    options = ["--device", "cpu", "--against", "torch", "--suites", "dense", "--seconds", str(args.seconds)]
    options += ["--dtypes", *sorted({row.dtype for row in rows})]
    options += [f"--{name}" for name in ("quick", "cold") if getattr(args, name)]
    options += ["--threads", str(args.threads)] if args.threads else []
    options += ["--rows", *(dense_name(row) for row in rows), "--json", str(json_path)]
    return [sys.executable, str(Path(__file__).with_name("attention.py")), *options]


def measured(rows, args):
    """Yields the rows as the process has measured them."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        path = Path(folder) / "rows.json"
        environment = {**os.environ, **LIMITS}
        process = subprocess.Popen(
            command(rows, args, path), env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            waiting = list(rows)
            for _ in process.stdout:  # a line says that there may be a new row in the file
                records = json.loads(path.read_text())["rows"] if path.exists() else []
                records = {record["name"]: record for record in records}
                while waiting and dense_name(waiting[0]) in records:
                    row = waiting.pop(0)
                    yield filled(row, records[dense_name(row)])
            if process.wait() or waiting:
                errors.seek(0)
                raise SystemExit(f"the AVX2 process failed with status {process.returncode}:\n{errors.read()}")
        finally:
            process.kill()
            process.wait()


def dense_name(row):
    """The row's name there."""
    return row.name[len("avx2 ") :]


def filled(row, record):
    for name in MEASURED:
        setattr(row, name, record[name])
    if row.instruction_set != "avx2":
        raise SystemExit(f"{row.name}: ran {row.instruction_set}, not avx2")
    row.setting = {**row.setting, "environment": LIMITS}
    return row
