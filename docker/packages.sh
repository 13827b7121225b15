#!/usr/bin/env bash
# What a bare image needs before tools/setup.sh or tools/wheel.sh: Python with its headers and venv, compiler, make, git.
# Where all of it is there nothing happens.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/packages.sh

missing=()
python=${PYTHON:-python3}
command -v "$python" >/dev/null || missing+=(python3)
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
cxx_works || missing+=(g++)
for tool in make git; do command -v $tool >/dev/null || missing+=($tool); done
need_packages "${missing[@]}"
