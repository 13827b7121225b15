#!/usr/bin/env bash
# The GPU kernels on this machine's NVIDIA GPU: builds them with nvcc (offline), compares with double precision, measures.
#   tools/gpu_check.sh [group ...]      groups: build check memcheck racecheck time; default build check time
# Each group takes under ten minutes and can be run alone once `build` has been. Logs go to $OUT (default build/gpu).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/gpu}
objects=build/gpu/objects
mkdir -p "$out" "$objects"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
arch=sm_${capability:-90}
groups=("$@")
[ ${#groups[@]} -gt 0 ] || groups=(build check time)
kernel_check=("$objects/kernel_check" "$objects/$arch")

build() {
  python3 tools/build_kernels.py --targets "$arch" --out "$objects" &
  local kernels=$!
  nvcc -std=c++20 -O2 -arch="$arch" --expt-relaxed-constexpr -Xcompiler -Wall,-Wextra -Icsrc -Icsrc/include -Itests/cpp \
    -Itests/gpu -o "$objects/kernel_check" tests/gpu/kernel_check.cpp tests/gpu/cuda_device.cpp
  wait "$kernels"
  for cubin in "$objects/$arch"/*.cubin; do cuobjdump -res-usage "$cubin" 2>&1 | grep -A1 Function | tr -d '\n' | sed 's/--/\n/g'; done
}
check() { "${kernel_check[@]}"; }
memcheck() { compute-sanitizer --tool memcheck --error-exitcode 3 "${kernel_check[@]}" --only D=64; }
racecheck() { compute-sanitizer --tool racecheck --error-exitcode 3 "${kernel_check[@]}" --only D=64; }
measure() { "${kernel_check[@]}" --time; }

status=0
for group in "${groups[@]}"; do
  echo "== $group ($arch, $(date -u +%FT%TZ))"
  run=$group
  [ "$group" = time ] && run=measure
  "$run" 2>&1 | tee "$out/$group.log" || status=1
done
exit $status
