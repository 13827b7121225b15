#!/usr/bin/env bash
# Formatting and lint of the tree: ruff, pylint's checks of calls, clang-format, and the limit of 400 lines a file.
#   tools/lint.sh        check
#   tools/lint.sh --fix  rewrite
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
python_files=(*.py flash_attn tests tools examples benchmarks)
cpp_files() { find csrc tests/cpp tests/gpu tools/gfxsim -name '*.h' -o -name '*.cpp' -o -name '*.hip'; }

if [ "${1:-}" = --fix ]; then
  $bin/ruff check --fix-only --quiet "${python_files[@]}"
  $bin/ruff format --quiet "${python_files[@]}"
  cpp_files | xargs $bin/clang-format -i
  exit
fi

status=0
$bin/ruff check --quiet "${python_files[@]}" || status=1
$bin/ruff format --check --quiet "${python_files[@]}" || { echo "ruff format would change Python files: make format" && status=1; }
$bin/pylint --jobs 2 --score n "${python_files[@]}" || status=1
cpp_files | xargs $bin/clang-format --dry-run -Werror || status=1
find csrc flash_attn tests tools examples benchmarks cmake -type f -regex '.*\.\(h\|cpp\|py\|rs\|sh\|cmake\)' -exec wc -l {} + |
  awk '$2 != "total" && $1 > 400 { print $2 " has " $1 " lines; the limit is 400"; over = 1 } END { exit over }' || status=1
[ $status -eq 0 ] && echo "lint: clean"
exit $status
