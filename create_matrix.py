#!/usr/bin/env python3
"""The wheels that .github/workflows/build.yml builds, as the JSON object of a workflow's `strategy.matrix`.

    python create_matrix.py                                            every combination that can exist
    python create_matrix.py --filter torch-version=2.9.1 --filter python-version=3.11,3.12
    python create_matrix.py --excluded                                 what is left out, each with the reason
    python create_matrix.py --check 3.11 2.5.1 6.2                     status 1, with the reason, if it cannot exist

Nothing but the standard library is needed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

ROCM_MATRIX = {
    "flash-attn-version": ["2.8.3"],
    "python-version": ["3.10", "3.11", "3.12", "3.13"],
    "torch-version": [
        "2.5.1", "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0",
    ],
    "rocm-version": ["6.1", "6.2", "6.2.4", "6.3", "6.4", "7.0", "7.1", "7.2"],
}  # fmt: skip

# The ROCm releases that PyTorch's own index has each torch for. For 2.14 and later the newest is assumed.
ROCM_OF_TORCH = {
    "2.5.1": ["6.1", "6.2"],
    "2.6.0": ["6.1", "6.2.4"],
    "2.7.1": ["6.3"],
    "2.8.0": ["6.3", "6.4"],
    "2.9.1": ["6.3", "6.4"],
    "2.10.0": ["7.0", "7.1"],
    "2.11.0": ["7.1", "7.2"],
    "2.12.1": ["7.1", "7.2"],
    "2.13.0": ["7.1", "7.2"],
    "2.14.1": ["7.2"],
    "2.15.0": ["7.2"],
}
# Pythons of the matrix that a torch has no wheel for.
PYTHON_WITHOUT_TORCH = {"2.15.0": ["3.10"]}


def reason_against(python, torch, rocm):
    """Why there can be no wheel for this combination; "" when there can."""
    rocms = ROCM_OF_TORCH.get(torch)
    if rocms is None:
        return f"torch {torch} is not in the matrix, which has {', '.join(ROCM_OF_TORCH)}"
    if python not in ROCM_MATRIX["python-version"]:
        return f"Python {python} is not in the matrix, which has {', '.join(ROCM_MATRIX['python-version'])}"
    if python in PYTHON_WITHOUT_TORCH.get(torch, []):
        return f"torch {torch} has no wheel for Python {python}"
    if rocm not in rocms:
        return f"torch {torch} has no wheel for ROCm {rocm}; it has them for {', '.join(rocms)}"
    return ""


def combinations(matrix):
    """Every combination as an object, those that cannot exist with a `reason`."""
    for values in itertools.product(*matrix.values()):
        one = dict(zip(matrix, values))
        reason = reason_against(one["python-version"], one["torch-version"], one["rocm-version"])
        yield {**one, "reason": reason} if reason else one


def filtered(filters):
    """ROCM_MATRIX with only the values that filters ("torch-version=2.9.1,2.10.0", ...) name."""
    matrix = dict(ROCM_MATRIX)
    for text in filters:
        name, _, values = text.partition("=")
        if name not in ROCM_MATRIX:
            raise SystemExit(f"--filter {text}: {name!r} is none of {', '.join(ROCM_MATRIX)}")
        unknown = [value for value in values.split(",") if value not in ROCM_MATRIX[name]]
        if unknown:
            raise SystemExit(f"--filter {text}: {name} {unknown[0]!r} is none of {', '.join(ROCM_MATRIX[name])}")
        matrix[name] = [value for value in matrix[name] if value in values.split(",")]
    return matrix


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", action="append", default=[], metavar="NAME=VALUE[,VALUE]", help="only these values")
    parser.add_argument("--excluded", action="store_true", help="print what cannot exist instead, each with its reason")
    parser.add_argument(
        "--check", nargs=3, metavar=("PYTHON", "TORCH", "ROCM"), help="whether one combination can exist"
    )
    args = parser.parse_args(arguments)
    if args.check:
        reason = reason_against(*args.check)
        if reason:
            print(reason, file=sys.stderr)
        return 1 if reason else 0
    found = list(combinations(filtered(args.filter)))
    include = [one for one in found if ("reason" in one) == args.excluded]
    print(json.dumps({"include": include}, indent=2))
    if not include:
        reasons = sorted({one["reason"] for one in found if "reason" in one})
        print(f"nothing is left: {'; '.join(reasons)}", file=sys.stderr)
    return 0 if include else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
