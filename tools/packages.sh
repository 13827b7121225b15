# Sourced by the set-up: messages, and the machine's packages through apt.

say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

die() {
  printf '\nset-up failed: %s\n' "$*" >&2
  exit 1
}

# apt_install PACKAGE...: installs through apt, as root or with sudo that needs no password. Fails where it cannot.
apt_install() {
  local root=()
  command -v apt-get >/dev/null || return 1
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || return 1
    root=(sudo -n)
  fi
  local options=(-qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=2)
  say "apt: installing $*"
  "${root[@]}" apt-get "${options[@]}" update >/dev/null || return 1
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" install -y --no-install-recommends "$@" \
    </dev/null >/dev/null
}

# need_packages PACKAGE...: apt_install, or the end with what the user has to do.
need_packages() {
  [ $# -eq 0 ] || apt_install "$@" || die "these packages are missing and could not be installed from here (no apt," \
    "no root, no sudo or no network); as root run: apt-get install $*"
}

cxx_works() { printf '#include <concepts>\n#include <span>\n' | "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; }
gtest_works() { echo '#include <gtest/gtest.h>' | "${CXX:-c++}" -x c++ -fsyntax-only - 2>/dev/null; }

# cmake_works: CMake 3.25 or newer, and Ninja or Make, on PATH.
cmake_works() {
  local version
  version=$(cmake --version 2>/dev/null | sed -n 's/^cmake version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p') || return 1
  # shellcheck disable=SC2086
  set -- ${version:-0 0}
  { [ "$1" -gt 3 ] || { [ "$1" -eq 3 ] && [ "$2" -ge 25 ]; }; } && { command -v ninja || command -v make; } >/dev/null
}
