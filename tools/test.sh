#!/usr/bin/env bash
# The test suite in stages, on the environment of tools/setup.sh.
#
#   tools/test.sh                all stages
#   tools/test.sh lint cpp       set-up and those stages: lint, build, cpp, arm, windows, sanitize, python, kernels, simulation, matrix,
#                                triton, wheel, docs, and fuzz, which is long
#   tools/test.sh build clients  client libraries with the package; their set-up downloads them
#   tools/test.sh second-torch   set-up, build and the stated subset (pytest's marker second_torch) on Debian's torch
#
# PYTEST_ARGS is added to pytest's command line.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/stages.sh
. tools/packages.sh
jobs=${MAX_JOBS:-$(nproc)}

# The code objects that the first build compiled, for builds that need not compile them again.
compiled_kernels() { [ ! -d build/dev/kernels/gfx942 ] || echo "-DFLASH_ATTN_KERNELS_DIR=$PWD/build/dev/kernels"; }

# cached COMMAND...: a build that takes objects of the core from an earlier one, whose compiler's results are kept in this
# tree, where ccache is there. Not compared: where torch lies, which changes nothing of the core, the standard, which CMake
# 3 and 4 give in different places, and the locale, which Python sets for what it runs where there is none.
export CCACHE_DIR=$PWD/build/ccache CCACHE_IGNOREOPTIONS="-ffile-prefix-map=* -std=c++20" CCACHE_SLOPPINESS=locale
cached() {
  if command -v ccache >/dev/null; then CMAKE_CXX_COMPILER_LAUNCHER=ccache "$@"; else "$@"; fi
}

# gpu_targets LIST: what GPU_ARCHS names, else the list, where its compiler is there.
gpu_targets() {
  if [ -n "${GPU_ARCHS:-}" ]; then
    echo "$GPU_ARCHS"
  elif command -v clang++-22 >/dev/null; then
    echo "$1"
  fi
}

# build_package ON|OFF [CMAKE-ARGUMENT]: into the source tree; ON: the C++ tests too. Code objects are for every target that the
# tests simulate.
build_package() {
  local targets
  targets=$(gpu_targets "gfx906;gfx90a;gfx942;gfx950;gfx1030;gfx1100;gfx1201")
  GPU_ARCHS=$targets FLASH_ATTN_BUILD_DIR=$build_dir CMAKE_ARGS="-DFLASH_ATTN_WERROR=ON -DFLASH_ATTN_TESTS=$1 ${2:-} ${CMAKE_ARGS:-}" \
    cached "$venv/bin/python" -m pip -v install --no-build-isolation --no-deps --no-input -e .
}

# check_loops BUILD-TREE: whether the compiler found registers for the products of vector kernels, which no test's result
# shows.
check_loops() {
  "$venv/bin/python" tools/cpu_loops.py --check "$1"/csrc/CMakeFiles/flash_attn_objects.dir/cpu/isa_[an]*.o
}

# run_ctest FOLDER: and why tests were skipped, which ctest keeps in its log.
run_ctest() {
  ctest --test-dir "$1" --output-on-failure -j "$jobs" --no-tests=error
  grep '^skipped: ' "$1/Testing/Temporary/LastTest.log" || true
}

test_cpp() {
  run_ctest "$build_dir"
  case $(uname -m) in
    x86_64 | aarch64) check_loops "$build_dir" ;;
    *) echo "skipped: tools/cpu_loops.py reads code of x86-64 and AArch64" ;;
  esac
}

# configure FOLDER CMAKE-ARGUMENT...: for Ninja where it is there, which compiles tests beside the core's longest files. Make
# waits for these first.
configure() {
  local generator=()
  if [ ! -f "$1/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
  cmake -B "$1" "${generator[@]}" "${@:2}"
}

# build_core FOLDER CMAKE-ARGUMENT...: the core and its tests, compiled into build/FOLDER.
build_core() {
  local dir=build/$1
  # shellcheck disable=SC2046
  configure "$dir" -S . -DFLASH_ATTN_WERROR=ON $(compiled_kernels) "${@:2}"
  cmake --build "$dir" --parallel "$jobs"
}

# test_core FOLDER CMAKE-ARGUMENT...: and the tests executed.
test_core() {
  build_core "$@"
  run_ctest "build/$1"
}

# The instruction sets of kernels for x86-64 that this processor cannot execute, where Linux says what it can.
not_executed() {
  local set flags
  flags=$(grep -m1 '^flags' /proc/cpuinfo) || return 0
  for set in avx2:avx2 avx512:avx512dq avx512_bf16:avx512_bf16 amx_bf16:amx_bf16; do
    [[ " $flags " == *" ${set#*:} "* ]] || echo "${set%:*}"
  done
}

# Files whose code no test would execute are compiled as they are: instrumenting them takes five times as long, and the
# first build's compiler has left them in its cache.
test_sanitized() {
  local without
  without=$(not_executed | paste -sd ';')
  [ -z "$without" ] || echo "not instrumented, as this processor cannot execute it: ${without//;/, }"
  ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 \
    cached test_core "sanitize-${1%%,*}" -DFLASH_ATTN_SANITIZE="$1" -DFLASH_ATTN_NOT_SANITIZED="$without"
}

# By clang, which inlines other functions and warns of other things than GCC.
test_clang() {
  llvm_is_there "clang did not compile the core" || return 0
  CC=clang-22 CXX=clang++-22 test_core clang
}

# The core and its tests for 64-bit ARM, cross-compiled, and executed by QEMU.
test_arm() {
  if [ "$(uname -m)" = aarch64 ]; then
    echo "skipped: the C++ tests have run on such a processor, which this machine has"
    return
  fi
  if ! command -v aarch64-linux-gnu-g++ >/dev/null || ! command -v qemu-aarch64 >/dev/null; then
    apt_install g++-aarch64-linux-gnu qemu-user ||
      { echo "skipped: no cross compiler or no QEMU to be had, so nothing was compiled for 64-bit ARM" && return; }
  fi
  echo "left out: ThreadPool.WorksInAForkedChild, as QEMU 7.2 fails when a process that has threads forks;" \
    "CpuResults.AreTheSamePastTheCaches, as only x86-64 stores past caches; of the grids, portable kernels of fp32, fp16" \
    "and bf16, and of logarithms near 1 all but every 61st, which x86-64 has executed"
  GTEST_FILTER=-ThreadPool.WorksInAForkedChild:CpuResults.AreTheSamePastTheCaches GPU_ARCHS=none \
    test_core aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake
  # Those with bf16 products among them: not every QEMU has these.
  qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/tests/cpp/test_cpu --gtest_filter='CpuInstructionSets.*' |
    grep '^instruction sets:.* neon_bf16'
  check_loops build/aarch64
}

# The core and its tests for 64-bit Windows, cross-compiled by clang, and executed by Wine, which does not grant AMX's tiles
# to programs; the C and C++ examples with the installed DLL, which needs no other than Windows' own.
test_windows() {
  local wine toolchain=$PWD/cmake/x86_64-w64-mingw32.cmake prefix=$PWD/build/windows/prefix program
  if [ "$(uname -m)" != x86_64 ]; then
    echo "skipped: Wine executes programs for x86-64 on such processors only, so nothing was compiled for Windows"
    return
  fi
  llvm_is_there "nothing was compiled for Windows" || return 0
  if ! command -v x86_64-w64-mingw32-g++-posix >/dev/null || [ -z "$(wine_program)" ]; then
    apt_install g++-mingw-w64-x86-64-posix wine64 ||
      { echo "skipped: no MinGW-w64 or no Wine to be had, so nothing was compiled for Windows" && return; }
  fi
  wine=$(wine_program)
  GPU_ARCHS=none build_core windows -DCMAKE_TOOLCHAIN_FILE="$toolchain"
  # Wine's services, which the first program starts and which outlive it, would else hold the pipe that ctest reads.
  export WINEPREFIX=$PWD/build/wine WINEDEBUG=-all
  "$wine" wineboot >/dev/null 2>&1
  run_ctest build/windows

  cmake --install build/windows --prefix "$prefix" >/dev/null
  if llvm-readobj-22 --coff-imports "$prefix/bin/libflash_attn.dll" | grep '^ *Name: lib'; then
    echo "libflash_attn.dll needs the libraries above, which Windows does not have" >&2
    return 1
  fi
  configure build/windows-examples -S examples -DCMAKE_TOOLCHAIN_FILE="$toolchain" \
    -Dflash_attn_DIR="$prefix/lib/cmake/flash_attn"
  cmake --build build/windows-examples
  for program in attention_c cache_c decode_cpp; do
    WINEPATH=$prefix/bin "$wine" "build/windows-examples/$program.exe"
  done
}

# Debian's wine64 puts it where no PATH leads.
wine_program() { PATH=$PATH:/usr/lib/wine command -v wine64 || true; }

# test_python FOLDER ARGUMENT...: one thread per worker, since the workers share the processors; one that is done takes
# tests of others, whose last ones may take minutes, where xdist is as new as that. The folder is named for pytest before
# 7.3, whose workers do not look for options where testpaths points.
test_python() {
  local dist=load
  if "$venv/bin/python" -m pytest --help | grep worksteal >/dev/null; then dist=worksteal; fi
  local sdist=(build/upstream/*.tar.gz)
  if [ -f "${sdist[0]}" ]; then export FLASH_ATTN_UPSTREAM_SDIST=$PWD/${sdist[0]}; fi
  # shellcheck disable=SC2086
  OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n "$jobs" --dist $dist "$@" ${PYTEST_ARGS:-}
}

# support_matrix --check | --write: compares README.md's table with what the Python tests have shown, or rewrites it.
support_matrix() { "$venv/bin/python" tools/support_matrix.py build/support-*.json "$1"; }

# Wheels, built with build isolation as `pip install .` does, repaired, and used in an empty environment. In those for ROCm
# the binding alone, which is a CPU torch's, differs from what a ROCm build of torch would give.
test_wheel() {
  local python=$PWD/$venv/bin/python target wheel
  target=$(gpu_targets gfx942)
  rm -rf build/wheels build/wheels-again
  docker/packages.sh
  tools/setup.sh run
  export PYTHON=$python
  tools/wheel.sh tools
  # Warnings are errors as in the first build, so that the compiler's cache has its objects.
  export CMAKE_ARGS="-DFLASH_ATTN_WERROR=ON ${CMAKE_ARGS:-}"
  # The first wheel has compiled kernels with isolation, for one target; the builds after it take those of the first stage.
  GPU_ARCHS=$target FLASH_ATTN_LOCAL_VERSION=cpu cached tools/wheel.sh build build/wheels
  export CMAKE_ARGS="$(compiled_kernels) $CMAKE_ARGS"
  # The same as users compile it: all of the C++ in another folder, later, under another clock and without a cache.
  tools/wheel.sh sdist build/wheels-again
  CMAKE_ARGS="$CMAKE_ARGS -DFLASH_ATTN_WERROR=OFF" TZ=Asia/Tokyo CCACHE_DISABLE=1 GPU_ARCHS=$target \
    FLASH_ATTN_LOCAL_VERSION=cpu tools/wheel.sh build build/wheels-again build/wheels-again/*.tar.gz
  cmp build/wheels/*.whl build/wheels-again/*.whl
  echo "two builds are the same bytes: $(sha256sum build/wheels/*.whl)"
  KEEP_PLATFORM=1 BUILD_TRITON_BACKEND=false FLASH_ATTN_LOCAL_VERSION=rocm72torch2.13 tools/wheel.sh build build/wheels
  KEEP_PLATFORM=1 BUILD_TRITON_BACKEND=true FLASH_ATTN_LOCAL_VERSION=rocm72torch2.13triton tools/wheel.sh build build/wheels
  for wheel in build/wheels/*.whl; do tools/wheel.sh check "$wheel"; done
  tools/wheel.sh paths
}

# Random steps of serving from a paged kv cache, with a count of them as it goes, and problems that hypothesis makes up:
# against the oracle, and of other threads and batches.
fuzz() {
  FLASH_ATTN_FUZZ_STEPS=${FLASH_ATTN_FUZZ_STEPS:-100} FLASH_ATTN_FUZZ_EXAMPLES=${FLASH_ATTN_FUZZ_EXAMPLES:-150} \
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -s tests/python/test_kvcache_stateful.py tests/python/test_same_bits.py \
    tests/python/test_attention_drawn.py -m "not gpu"
}

# What needs LLVM 22 says so where it is not there.
llvm_is_there() {
  command -v llvm-config-22 >/dev/null && command -v clang++-22 >/dev/null && return
  echo "skipped: no LLVM 22 on this machine, so $1"
  return 1
}

# The AMD kernels cost no more registers, spills or bytes than the committed table says.
test_kernels() {
  llvm_is_there "the AMD kernels were neither compiled nor checked" || return 0
  "$venv/bin/python" tools/kernel_report.py --check build/dev/kernels
}

# The simulator of AMD GPUs, by its own tests: small kernels compiled for gfx942 and gfx1201 and executed, faults planted.
test_simulator() {
  llvm_is_there "the simulator was neither built nor tested" || return 0
  configure build/gfxsim -S tools/gfxsim -DGFXSIM_SHIPPED_KERNELS="$PWD/build/dev/kernels"
  cmake --build build/gfxsim --parallel "$jobs"
  ctest --test-dir build/gfxsim --output-on-failure -j "$jobs" --no-tests=error
}

# The package's AMD kernels, launched from torch and executed by the simulator.
test_simulation() {
  llvm_is_there "the AMD kernels were not executed" || return 0
  test_python tests/python -m gpu --support-json=build/support-gpu.json
}

# Triton of requirements/triton.txt into the environment, unless it is there.
install_triton() {
  "$venv/bin/python" - <<'PY' || "$venv/bin/python" -m pip install --no-input -q --no-deps -r requirements/triton.txt
import importlib.metadata, sys
wanted = [line.strip() for line in open("requirements/triton.txt") if line.startswith("triton==")]
try:
    sys.exit("triton==" + importlib.metadata.version("triton") not in wanted)
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
PY
}

# The Triton backend's suite in Triton's interpreter.
test_triton() {
  # shellcheck disable=SC2086
  FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE OMP_NUM_THREADS=1 PYTHONPATH=tests/python \
    "$venv/bin/python" -m pytest -p conftest -n "$jobs" --support-json=build/support-triton.json \
    tests/test_flash_attn_triton_amd.py ${PYTEST_ARGS:-}
}

# Its kernels compiled for AMD's GPUs.
compile_triton() {
  PYTHONPATH=$PWD "$venv/bin/python" tools/triton_compile.py --jobs "$jobs" --json build/triton.json
}

# Their code objects for gfx942, executed by the simulator.
simulate_triton() {
  llvm_is_there "the Triton kernels were not executed" || return 0
  [ -f build/gfxsim/CMakeCache.txt ] || configure build/gfxsim -S tools/gfxsim
  cmake --build build/gfxsim --parallel "$jobs" --target gfxsim_hip
  PYTHONPATH=$PWD "$venv/bin/python" tools/triton_simulate.py
}

use() {
  venv=$1 build_dir=$2
  PATH=$PWD/$venv/bin:$PATH
}

run_stage() {
  case $1 in
    lint) stage lint tools/lint.sh ;;
    build) stage build build_package ON ;;
    cpp)
      stage "C++ tests" test_cpp
      stage "C++ tests, clang" test_clang
      ;;
    arm) stage "C++ tests, AArch64" test_arm ;;
    windows) stage "C++ tests, Windows" test_windows ;;
    sanitize)
      stage "address and undefined" test_sanitized address,undefined
      stage thread test_sanitized thread
      ;;
    python) stage "Python tests" test_python tests/python -m "not gpu" --support-json=build/support-cpu.json ;;
    fuzz) stage fuzz fuzz ;;
    matrix) stage "support matrix" support_matrix --check ;;
    write-matrix) stage "support matrix" support_matrix --write ;;
    wheel) stage wheel test_wheel ;;
    docs) stage "documentation's site" make docs ;;
    triton)
      stage "Triton, installed" install_triton
      stage "Triton, interpreted" test_triton
      stage "Triton, compiled" compile_triton
      stage "Triton, simulated" simulate_triton
      ;;
    kernels)
      stage "code objects" test_kernels
      stage simulator test_simulator
      ;;
    simulation) stage simulation test_simulation ;;
    clients)
      stage "set-up, clients" tools/setup.sh clients
      use .venv-clients build/dev
      stage clients test_python tests/clients --dist loadfile
      use .venv build/dev
      ;;
    second-torch)
      stage "set-up, second torch" tools/setup.sh test-debian
      use .venv-debian build/dev-debian
      stage "build, second torch" build_package OFF "$(compiled_kernels)"
      stage "Python tests, second torch" test_python tests/python -m "second_torch and not gpu"
      ;;
    *)
      echo "tools/test.sh: no stage '$1'; there are lint, build, cpp, arm, windows, sanitize, python, kernels," \
        "simulation, matrix, write-matrix, triton, wheel, docs, fuzz, clients and second-torch" >&2
      exit 2
      ;;
  esac
}

[ -n "${FLASH_ATTN_STAGES:-}" ] || rm -f "$stages_file"
if [ "$*" != second-torch ]; then
  stage set-up tools/setup.sh test
  use .venv build/dev
fi
if [ $# -eq 0 ]; then set -- lint build cpp arm windows sanitize python kernels simulation triton matrix wheel docs; fi
for name in "$@"; do run_stage "$name"; done

printf '\n'
report_stages
echo "all passed: $*"
