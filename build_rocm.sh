#!/usr/bin/env bash
# Builds, repairs and tests one wheel for ROCm: ./build_rocm.sh <flash-attn-version> <python-version> <torch-version> <rocm-version>
#
#   ./build_rocm.sh 2.8.3 3.11 2.5.1 6.2             dist/flash_attn-2.8.3+rocm62torch2.5-cp311-cp311-linux_x86_64.whl
#   ./build_rocm.sh 2.8.3 3.11 2.5.1 6.2 --dry-run   prints the commands instead
#
# torch comes from PyTorch's ROCm index. Read from the environment:
#   GPU_ARCHS              GPU targets, separated by `;`; default: those of this machine's GPUs, else the list below, of which
#                          targets without kernels in this version are skipped
#   MAX_JOBS               compilers at a time; default: from processors and memory
#   BUILD_TRITON_BACKEND   true builds the variant with the Triton backend, labelled rocm62torch2.5triton; default: false
set -euo pipefail
cd "$(dirname "$0")"
every_target="gfx900;gfx906;gfx908;gfx90a;gfx942;gfx950;gfx1010;gfx1030;gfx1100;gfx1101;gfx1102;gfx1150;gfx1151;gfx1200;gfx1201"

usage() { sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0"; }
fail() { echo "build_rocm.sh: $*" >&2 && exit 2; }

dry_run=false versions=()
for argument in "$@"; do
  case $argument in
    --help | -h) usage && exit ;;
    --dry-run) dry_run=true ;;
    -*) fail "no option '$argument'; there are --dry-run and --help" ;;
    *) versions+=("$argument") ;;
  esac
done
[ ${#versions[@]} -eq 4 ] || { usage >&2 && fail "${#versions[@]} versions were given; four are needed"; }
flash_attn=${versions[0]} python_version=${versions[1]} torch=${versions[2]} rocm=${versions[3]}

here=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' flash_attn/__init__.py)
[ "$flash_attn" = "$here" ] || fail "this source tree is flash-attn $here, not $flash_attn"
python3 create_matrix.py --check "$python_version" "$torch" "$rocm" || fail "there is no such wheel to build"
# Checked as the build will.
read_settings='import build_environment as b; print(b.max_jobs(), "true" if b.switch("BUILD_TRITON_BACKEND") else "false")'
settings=$(PYTHONPATH=tools python3 -c "$read_settings") || exit 2
read -r jobs triton <<<"$settings"

label=rocm${rocm//./}torch${torch%.*}
[ "$triton" = false ] || label+=triton
tag=cp${python_version//./}
wheel=dist/flash_attn-$flash_attn+$label-$tag-$tag-linux_x86_64.whl
venv=build/rocm-$label-$tag

# GPUs of this machine; the processors that the tool lists too are gfx000.
targets=${GPU_ARCHS:-} variable=GPU_ARCHS
if [ -z "$targets" ]; then
  targets=$(rocm_agent_enumerator 2>/dev/null | grep -v gfx000 | sort -u | paste -sd ';' - || true)
fi
# Unlike GPU_ARCHS, PYTORCH_ROCM_ARCH may name targets without kernels.
[ -n "$targets" ] || { targets=$every_target && variable=PYTORCH_ROCM_ARCH; }

# The command itself, or with --dry-run its text.
run() {
  printf '+ %s\n' "$(printf '%q ' "$@")"
  $dry_run || "$@"
}

echo "wheel      $wheel"
echo "targets    ${targets//;/ }"
echo "jobs       $jobs"
if command -v "python$python_version" >/dev/null; then
  run "python$python_version" -m venv "$venv"
else
  run uv venv --seed --python "$python_version" "$venv"
fi
run "$venv/bin/python" -m pip install --index-url "https://download.pytorch.org/whl/rocm$rocm" "torch==$torch"
run env PYTHON="$venv/bin/python" tools/wheel.sh tools
run env PYTHON="$venv/bin/python" FLASH_ATTN_LOCAL_VERSION="$label" BUILD_TRITON_BACKEND="$triton" "$variable=$targets" \
  MAX_JOBS="$jobs" KEEP_PLATFORM=1 tools/wheel.sh build dist
run env PYTHON="$venv/bin/python" tools/wheel.sh check "$wheel"
