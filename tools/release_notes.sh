#!/usr/bin/env bash
# Release notes in Markdown: what was built, how to choose a wheel, what changed since the last tag.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' flash_attn/__init__.py)
backend=$(sed -n 's/^__backend_version__ = "\(.*\)"/\1/p' flash_attn/__init__.py)
previous=$(git describe --tags --abbrev=0 HEAD^ 2>/dev/null || true)

cat <<TEXT
flash_attn $version for AMD GPUs and CPUs, implementation $backend.

A wheel's name says what it is for: \`flash_attn-$version+rocm72torch2.11-cp312-cp312-linux_x86_64.whl\` needs torch 2.11 of
ROCm 7.2 and Python 3.12; \`triton\` behind the torch release marks the variant with the Triton backend. docs/install-amd.md
has the steps.

## Changes${previous:+ since $previous}

TEXT
git log --no-merges --format='* %s' "${previous:+$previous..}HEAD" | head -n 100
