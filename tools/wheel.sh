#!/usr/bin/env bash
# Wheels: built, repaired, and tested where nothing else of this package is.
#
#   tools/wheel.sh tools          installs what the others need into $PYTHON's environment (default: python3)
#   tools/wheel.sh build FOLDER   builds FOLDER/flash_attn-*.whl for the torch of that environment
#   tools/wheel.sh check WHEEL    installs it into an empty environment beside that torch and uses it there
#   tools/wheel.sh install WHEEL  installs it into that environment
#
# WHEEL_PLATFORM: the platform tag that auditwheel gives, such as linux_x86_64; default: the widest that fits.
# docs/building.md lists what else a build reads.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
size_limit=10000000 # bytes

# What torch brings itself.
torch_libraries=(libc10.so libtorch_cpu.so libtorch_python.so)

build() {
  local folder=$1 exclude=() library
  for library in "${torch_libraries[@]}"; do exclude+=(--exclude "$library"); done
  rm -rf "$folder/raw"
  mkdir -p "$folder/raw"
  "$python" -m pip wheel --no-input --no-deps ${PIP_NO_ISOLATION:+--no-build-isolation} --wheel-dir "$folder/raw" .
  "$python" -m auditwheel repair "${exclude[@]}" --plat "${WHEEL_PLATFORM:-auto}" --wheel-dir "$folder" "$folder"/raw/*.whl
  rm -rf "$folder/raw"
  ls -l "$folder"/*.whl
}

check() {
  local wheel=$1 root=$PWD environment python_there size torch_folder
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
