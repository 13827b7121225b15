#!/usr/bin/env bash
# Everything that `make run` and `make test` need on a bare Debian- or Ubuntu-like machine with Python 3: compiler, CMake,
# and a virtual environment with torch. Run again it only checks; after an interruption it starts the unfinished part anew.
#
#   tools/setup.sh run         .venv          to use the package
#   tools/setup.sh test        .venv          to test it as well
#   tools/setup.sh test-debian .venv-debian   to test it with Debian's python3-torch
#   tools/setup.sh clients     .venv-clients  to test client libraries with it; lies over .venv, which `test` sets up
#
# torch is the one that $PYTHON (default: python3) imports; else the pinned one from PyPI; else Debian's. docs/ci.md has more.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/packages.sh

role=${1:-run}
case $role in
  run | test) venv=.venv ;;
  test-debian) venv=.venv-debian ;;
  clients) venv=.venv-clients ;;
  *) die "the role is '$role'; it must be run, test, test-debian or clients" ;;
esac
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_CONSTRAINT=
pip_log=$PWD/build/setup-pip.log

# The release and the version of the torch that a Python sees, without importing it ("2.13 2.13.0+cpu"); fails below 1.13.
torch_of() {
  "$1" - <<'PY' 2>/dev/null
import importlib.util, re, sys
from pathlib import Path
spec = importlib.util.find_spec("torch")
text = Path(spec.submodule_search_locations[0], "version.py").read_text() if spec else ""
match = re.search(r"^__version__.*?'((\d+)\.(\d+)[^']*)'", text, re.MULTILINE)
if not match or (int(match[2]), int(match[3])) < (1, 13):
    sys.exit(1)
print(f"{match[2]}.{match[3]} {match[1]}")
PY
}

# pip of the environment, kept to the torch that is there.
pip() { PIP_CONSTRAINT=$(constraints) "$venv/bin/python" -m pip --retries 2 --timeout 30 "$@"; }
constraints() { [ ! -f "$venv/constraints.txt" ] || echo "$PWD/$venv/constraints.txt"; }

install_machine_packages() {
  local missing=()
  cxx_works || missing+=(g++)
  [ "$role" = run ] || gtest_works || missing+=(libgtest-dev)
  command -v make >/dev/null || missing+=(make)
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then missing+=(python3-venv); fi
  if ! "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; then
    missing+=(python3-dev)
  fi
  need_packages "${missing[@]}"
  "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    die "$python has no headers (Python.h), which the binding is compiled with; install them, or choose another with PYTHON="
}

# What compiles the AMD kernels without ROCm and packs them, and what the simulator decodes them with. Optional: not every
# distribution has it.
offer_gpu_compiler() {
  local tool missing=
  for tool in clang++-22 ld.lld-22 llvm-readelf-22 llvm-config-22; do command -v $tool >/dev/null || missing=$tool; done
  [ -f /usr/lib/llvm-22/include/llvm-c/Disassembler.h ] || missing=llvm-22-dev
  echo '#include <zstd.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null || missing=libzstd-dev
  [ -z "$missing" ] || apt_install clang-22 lld-22 llvm-22 llvm-22-dev libzstd-dev ||
    say "no clang 22 to be had here; the AMD kernels will not be compiled, nor executed in the simulator"
}

# For builds of CI that compile the core once more (tools/test.sh). Optional.
offer_compiler_cache() {
  command -v ccache >/dev/null || apt_install ccache || say "no ccache to be had here; the core will be compiled for each build"
}

# For examples/rust, which the C++ tests build. Optional.
offer_rust() {
  local tool missing=
  for tool in cargo rustc pkg-config; do command -v $tool >/dev/null || missing=$tool; done
  [ -z "$missing" ] || apt_install cargo rustc pkg-config || say "no cargo to be had here; examples/rust will not be built"
}

# The environment on top of a Python that has torch already.
make_venv_on() {
  local base=$1 outer
  "$base" -m venv --system-site-packages "$venv" || return 1
  torch_of "$venv/bin/python" >/dev/null && return
  # `base` is itself a virtual environment: --system-site-packages reaches only the Python below it.
  outer=$("$base" -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))')
  "$venv/bin/python" -c "import sysconfig; open(sysconfig.get_path('purelib') + '/outer_environment.pth', 'w').write('''$outer\n''')"
}

# The pinned torch: the build for CPUs where it can be had, which is a tenth of PyPI's.
make_venv_with_pinned_torch() {
  local pinned
  pinned=$(sed -n 's/^torch==//p' requirements/torch.txt)
  "$python" -m venv "$venv" || return 1
  if [ "$(uname -s)" = Linux ] && pip --timeout 10 --retries 1 install --no-deps "torch==$pinned+cpu" \
    --extra-index-url https://download.pytorch.org/whl/cpu >>"$pip_log" 2>&1; then
    "$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$venv/constraints.txt"
    pip install -q torch >>"$pip_log" 2>&1
    return
  fi
  say "no CPU build of torch $pinned to be had; taking PyPI's own, which may be the CUDA build of some GB"
  pip install -q "torch==$pinned" >>"$pip_log" 2>&1
}

make_venv_with_debian_torch() {
  local packages=(python3-venv python3-dev python3-torch libtorch-dev pybind11-dev python3-numpy)
  if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then apt_install "${packages[@]}" || return 1; fi
  rm -rf "$venv"
  make_venv_on /usr/bin/python3
}

choose_torch() {
  local found
  if [ "$role" = test-debian ]; then
    make_venv_with_debian_torch || die "Debian's python3-torch could not be installed through apt"
  elif found=$(torch_of "$python") && "$python" -c 'import torch' 2>/dev/null; then
    say "torch ${found#* } of $python is reused"
    make_venv_on "$python"
  else
    say "$python has no torch; installing the pinned one (log: $pip_log)"
    make_venv_with_pinned_torch || {
      tail -n 5 "$pip_log"
      say "not to be had from PyPI; trying Debian's python3-torch"
      make_venv_with_debian_torch
    } || die "no torch: $python imports none, PyPI has none for it, and apt could not install python3-torch"
  fi
}

make_environment() {
  local stamp=$venv/.complete key found
  if [ -f "$stamp" ] && [ "$("$python" -c 'import sys; print(sys.prefix)')" = "$PWD/$venv" ]; then
    python=$(sed -n 3p "$stamp") # the environment is activated; it cannot be made from itself
  fi
  key="$(cksum <requirements/torch.txt) $("$python" -c 'import sys; print(sys.executable, sys.version)' | tr '\n' ' ')"
  if [ -f "$stamp" ] && [ "$(sed -n 1p "$stamp")" = "$key" ] && found=$(torch_of "$venv/bin/python") &&
    [ "$(sed -n 2p "$stamp")" = "$found" ]; then
    say "$venv with torch ${found#* } is there"
    return
  fi
  rm -rf "$venv"
  choose_torch
  "$venv/bin/python" -W ignore -c 'import torch' || die "the torch in $venv cannot be imported"
  found=$(torch_of "$venv/bin/python")
  # A torch from before 2.3 was compiled for numpy 1.
  "$venv/bin/python" - "${found#* }" >"$venv/constraints.txt" <<'PY'
import sys
import importlib.metadata as metadata
print("torch==" + metadata.version("torch"))
print("numpy<2" if tuple(map(int, sys.argv[1].split(".")[:2])) < (2, 3) else "")
PY
  printf '%s\n%s\n%s\n' "$key" "$found" "$(command -v "$python")" >"$stamp"
  say "$venv has torch ${found#* }"
}

# The clients' environment: their packages, then .venv's torch and flash_attn, of which nothing is replaced.
make_clients_environment() {
  local base=$PWD/.venv stamp=$venv/.complete below found key over=()
  [ -f "$base/.complete" ] || die "the clients are installed over .venv, which is not there: tools/setup.sh test makes it"
  found=$(sed -n 2p "$base/.complete")
  "$base/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' &&
    [ "$(printf '%s\n' 2.6 "${found% *}" | sort -V | head -n 1)" = 2.6 ] ||
    die "transformers 5 and diffusers need Python 3.11 and torch 2.6 or newer; .venv has" \
      "$("$base/bin/python" --version) and torch ${found#* }"
  key=$(cksum <"$base/.complete")
  if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
    say "$venv is there"
    return
  fi
  rm -rf "$venv"
  ! grep -q '^include-system-site-packages = true' "$base/pyvenv.cfg" || over=(--system-site-packages)
  "$base/bin/python" -m venv "${over[@]}" "$venv"
  # As a site directory, so that the editable install there counts; what the clients bring comes before it.
  below=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$below')" >"${below/#$base/$PWD/$venv}/below.pth"
  cp "$base/constraints.txt" "$venv/constraints.txt"
  echo "$key" >"$stamp"
}

# Debian's packages for an environment on Debian's Python whose requirements PyPI cannot serve.
debian_packages_for() {
  case $1 in
    build) echo python3-setuptools python3-wheel ;;
    cmake) echo cmake ninja-build ;;
    run) echo python3-numpy python3-matplotlib python3-tqdm ;;
    test) echo python3-pytest python3-pytest-xdist python3-hypothesis python3-psutil ;;
  esac
}

install_requirements() {
  local name file stamp key
  for name in "$@"; do
    file=requirements/$name.txt
    [ "$name" != clients ] || file=tests/clients/requirements.txt
    stamp=$venv/.requirements-$name
    key="$(cat "$file" "$venv/.complete" | cksum)"
    [ "$(cat "$stamp" 2>/dev/null)" != "$key" ] || continue
    say "installing $file"
    if ! pip install -q -r "$file" >>"$pip_log" 2>&1; then
      tail -n 5 "$pip_log"
      # shellcheck disable=SC2046
      [ "$("$venv/bin/python" -c 'import sys; print(sys.base_prefix)')" = /usr ] && [ -n "$(debian_packages_for "$name")" ] &&
        apt_install $(debian_packages_for "$name") ||
        die "$file could not be installed; is a package index reachable? (log: $pip_log)"
      say "taken from Debian instead$([ "$name" != run ] || echo "; without einops, which only flash_attn.bert_padding uses")"
    fi
    echo "$key" >"$stamp"
  done
}

# Upstream's source distribution, against which the signatures are tested. Without it they are tested against the table.
fetch_upstream() {
  ! ls build/upstream/*.tar.gz >/dev/null 2>&1 || return 0
  "$venv/bin/python" tools/fetch_upstream_signatures.py --download build/upstream >>"$pip_log" 2>&1 ||
    say "upstream's source distribution could not be fetched; its table stands in"
}

mkdir -p build
: >"$pip_log"
if command -v flock >/dev/null; then
  exec 9>"$venv.lock"
  flock -n 9 || { say "waiting for another set-up to end" && flock 9; }
fi
command -v "$python" >/dev/null || die "$python is not there; install Python 3.9 or newer, or name one with PYTHON="
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' || die "$("$python" --version) is too old; 3.9 or newer is needed"
[ "$role" != test-debian ] || python=/usr/bin/python3
say "set-up for '$role'"
if [ "$role" = clients ]; then
  make_clients_environment
  install_requirements clients
  [ "$(torch_of "$venv/bin/python")" = "$(sed -n 2p .venv/.complete)" ] || die "a client has replaced the torch of .venv"
  say "set-up for 'clients' is complete"
  exit
fi
install_machine_packages
make_environment
PATH=$PWD/$venv/bin:$PATH
cmake_works || install_requirements cmake
case $role in
  run) install_requirements build run ;;
  test)
    install_requirements build run test lint package docs
    fetch_upstream
    offer_gpu_compiler
    offer_compiler_cache
    offer_rust
    ;;
  test-debian) install_requirements build run test ;;
esac
say "set-up for '$role' is complete"
