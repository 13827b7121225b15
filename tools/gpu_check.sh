#!/usr/bin/env bash
# The GPU backend on this machine's NVIDIA GPU, offline: builds the package and the kernels' own test, compares, measures.
#   tools/gpu_check.sh [group ...]
# Groups, each under ten minutes, to be run alone once `build` has been (`tools/gpu_check.sh --help` lists them). Without an
# argument it runs all that have not passed since the last `build`. Logs go to $OUT (default build/gpu).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/gpu}
tree=build/gpu/tree
passed=build/gpu/passed
mkdir -p "$out" build/gpu
export PYTHONPATH=$PWD:$PWD/tests/python FLASH_ATTN_CHECK_LOG=$out

capability() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .; }

all_groups=(build kernels grid large sanitize stress train bench guides triton)
describe() {
  cat <<'TEXT'
build     compile the package for this torch, the code objects for this GPU, and tests/gpu
kernels   every kernel of the manifest against double precision, without torch (tests/gpu/kernel_check)
grid      the Python tests' grid, the kv cache and drawn problems on the GPU, through torch, and NaN among the inputs (tests/python, --device cuda)
large     lengths to 16k, tensors of more than 2^31 elements
sanitize  compute-sanitizer memcheck and racecheck on small sizes
stress    the contract's race loop, graph capture and replay, two streams, torch.compile
train     examples/train_gpt.py on the GPU against plain attention
bench     benchmarks/attention.py against torch's FlashAttention-2 and its math attention
guides    what docs/install-amd.md tells people to type: verification and both of its benchmarks
triton    the Triton backend: its suite on the GPU, and its speed beside the native kernels
TEXT
}

build() {
  rm -f "$passed"
  cmake -G Ninja -S . -B "$tree" -DFLASH_ATTN_TESTS=OFF -DFLASH_ATTN_GPU_ARCHS="$arch" -DPython_EXECUTABLE="$(command -v python3)" \
    -DFLASH_ATTN_TORCH_DIR="$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')"
  cmake --build "$tree"
  cmake --install "$tree" --component python --prefix flash_attn
  nvcc -std=c++20 -O2 -arch="$arch" --expt-relaxed-constexpr -Xcompiler -Wall,-Wextra -Icsrc -Icsrc/include -Itests/cpp \
    -Itests/gpu -o "$tree/kernel_check" tests/gpu/kernel_check.cpp tests/gpu/cuda_device.cpp
  for cubin in "$tree/kernels/$arch"/*.cubin; do
    cuobjdump -res-usage "$cubin" 2>&1 | grep -A1 Function | tr -d '\n' | sed 's/--/\n/g'
  done >"$out/resources.txt"
  python3 -m flash_attn
}
kernels() { "${kernel_check[@]}"; }
on_gpu() { OMP_NUM_THREADS=1 python3 -m pytest -q -n 8 --device cuda "$@"; }
grid() { on_gpu -m gpu tests/python/test_gpu_grid.py tests/python/test_gpu_kvcache.py tests/python/test_gpu_splits.py tests/python/test_attention_drawn.py tests/python/test_not_finite.py; }
large() { python3 -m pytest -q --device cuda tests/python/test_gpu_large.py; }
sanitize() {
  local tool
  for tool in memcheck racecheck; do
    compute-sanitizer --tool $tool --error-exitcode 3 "${kernel_check[@]}" --only "varlen dropout"
    compute-sanitizer --tool $tool --error-exitcode 3 "${kernel_check[@]}" --only "GQA 3 D=64 bf16"
  done
}
stress() { on_gpu tests/python/test_gpu_stress.py; }
train() { python3 examples/train_gpt.py --device cuda --dtype bf16; }
bench() {
  python3 benchmarks/attention.py --device cuda --against torch --fail-under 0.4 --json "$out/bench.json" --plot "$out/bench.png"
  local heads
  for heads in 1 16 128; do
    python3 benchmarks/attention.py --device cuda --against torch-math --batch 1 --heads $heads --seconds 0.05 --fail-under 1 \
      --lengths 64 256 1024 4096 $([ $heads -gt 16 ] || echo 16384) --json "$out/bench-math-$heads.json"
  done
}

guides() {
  python3 -m flash_attn verify
  python3 test_fa3.py
  python3 benchmarks/benchmark_flash_attn.py --json "$out/benchmark_flash_attn.json" --plot "$out/benchmark_flash_attn.png"
  python3 benchmarks/benchmark_flash_attn.py --causal --backward --json "$out/benchmark_flash_attn_backward.json"
  python3 benchmarks/benchmark_fa2_vs_fa3_mlp_transformer.py --preset mi300x --output-json "$out/benchmark_fa2_vs_fa3.json"
}

triton() {
  local status=0
  # Both run whatever the other says. The suite compiles hundreds of kernels: several processes, Triton's cache kept.
  FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE TRITON_CACHE_DIR=$PWD/build/gpu/triton OMP_NUM_THREADS=1 timeout 400 \
    python3 -m pytest -q -n 8 tests/test_flash_attn_triton_amd.py || status=1
  TRITON_CACHE_DIR=$PWD/build/gpu/triton timeout 180 \
    python3 benchmarks/triton_backend.py --json "$out/bench-triton.json" || status=1
  return $status
}

case ${1:-} in -h | --help) describe && exit ;; esac
arch=sm_$(capability)
[ "$arch" != sm_ ] || { echo "gpu_check: nvidia-smi finds no GPU on this machine" >&2 && exit 2; }
kernel_check=("$tree/kernel_check" "$tree/kernels/$arch")
groups=("$@")
if [ ${#groups[@]} -eq 0 ]; then
  for group in "${all_groups[@]}"; do grep -qx "$group" "$passed" 2>/dev/null || groups+=("$group"); done
fi
status=0
for group in "${groups[@]}"; do
  [[ " ${all_groups[*]} " == *" $group "* ]] || { echo "gpu_check: no group '$group'; there are ${all_groups[*]}" >&2 && exit 2; }
  begin=$SECONDS result=passed
  echo "== $group ($arch, $(date -u +%FT%TZ))"
  "$group" 2>&1 | tee "$out/$group.log" || result=FAILED status=1
  [ $result = FAILED ] || echo "$group" >>"$passed"
  echo "== $group: $result in $((SECONDS - begin)) s"
done
exit $status
