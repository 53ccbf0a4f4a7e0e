#!/bin/sh
# Makes .venv ready for tensorstow: the build tools, a fitting torch, the native core, extras.
#
#   tools/setup.sh python         check the machine, make .venv, install build tools
#   tools/setup.sh native         build the native core, install torch meanwhile, and tensorstow (editable)
#   tools/setup.sh extra NAME     install what tensorstow[NAME] needs: demo, bench, test, dev, peers
#
# `make` calls these in order and remembers what is done. Three variables change what happens:
#
#   TENSORSTOW_PYTHON=/path/to/python   make .venv with this Python, and see the packages it
#                                       already has (an image with its own torch, or no index)
#   TENSORSTOW_TORCH="torch --index-url URL"   give pip this for torch (ROCm, XPU, nightly)
#   TENSORSTOW_TORCH_VERSION=2.11.0     install this release of torch, whatever .venv has
#
# An existing .venv that works is kept: remove it for a change of these to count.
set -eu

TORCH_VERSION=${TENSORSTOW_TORCH_VERSION:-2.13.0} # the newest that is tested; it has wheels for NEWEST_PYTHON
NEWEST_PYTHON=3.14
# Trainers that ask for more than the tests use, or for other versions: without what they ask for,
# and with what they import.
TRAINERS="torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing torchdata tyro docstring_parser typeguard
  axolotl==0.19.0 addict llamafactory==0.9.5 torchtune==0.6.1 omegaconf antlr4-python3-runtime==4.9.3"
CPU_INDEX=https://download.pytorch.org/whl/cpu
VENV=.venv

cd "$(dirname "$0")/.."

say() { echo "tensorstow: $*" >&2; }
die() {
  say "$*"
  exit 1
}
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# --- what only the system can give: each missing piece is one line with its package -------------

# Run, not looked up: pyenv and others leave commands that exist and only print an error.
is_python() {
  "$1" -c "import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= ($2))" 2>/dev/null
}

find_python() {
  if [ -n "${TENSORSTOW_PYTHON:-}" ]; then
    is_python "$TENSORSTOW_PYTHON" 3,99 ||
      die "TENSORSTOW_PYTHON=$TENSORSTOW_PYTHON is not a Python 3.11 or newer: name another one"
    echo "$TENSORSTOW_PYTHON"
    return
  fi
  # The user's own choice first. Outside an active .venv, which may be about to be replaced.
  for name in python3 python3.13 python3.12 python3.11 python3.14; do
    is_python "$name" "$(echo "$NEWEST_PYTHON" | tr . ,)" && echo "$name" && return
  done
  die "no Python 3.11 to $NEWEST_PYTHON found: install one (Debian/Ubuntu: apt-get install" \
    "python3 python3-venv python3-dev), or name it in TENSORSTOW_PYTHON"
}

check_python_parts() {
  "$1" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$1 cannot make virtual environments: install its venv module" \
      "(Debian/Ubuntu: apt-get install python3-venv)"
  header=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
  [ -f "$header" ] ||
    die "no $header, which the native core is built with: install Python's headers" \
      "(Debian/Ubuntu: apt-get install python3-dev)"
}

# Succeeds if compiler $1 compiles the C++20 program on standard input.
compiles() { "$1" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; }

# The one that CMake will take: $CXX, else the first of these.
find_compiler() {
  for compiler in ${CXX:-c++ g++ clang++}; do
    command -v "$compiler" && return
  done
  die "no C++ compiler found: install one (Debian/Ubuntu: apt-get install g++)"
}

check_compiler() {
  compiler=$(find_compiler)
  echo '#include <bit>
        #include <concepts>
        #include <span>
        int main() { return std::popcount(0u); }' | compiles "$compiler" ||
    die "$compiler does not compile C++20: install a newer one, GCC 11 or Clang 14 at least" \
      "(Debian/Ubuntu: apt-get install g++), or name one in CXX"
  echo '#include <linux/io_uring.h>' | compiles "$compiler" ||
    die "no linux/io_uring.h found: install the kernel's headers for programs" \
      "(Debian/Ubuntu: apt-get install linux-libc-dev)"
}

# --- .venv and torch ----------------------------------------------------------------------------

make_venv() {
  # An existing one is kept if it works: it may be somebody's own.
  if is_python "$VENV/bin/python" 3,99 && pip --version >/dev/null 2>&1; then
    python=$VENV/bin/python
    check_python_parts "$python"
    return
  fi
  python=$(find_python)
  check_python_parts "$python"
  say "making $VENV with $("$python" --version)"
  "$python" -m venv --clear ${TENSORSTOW_PYTHON:+--system-site-packages} "$VENV"
}

has_torch() {
  "$VENV/bin/python" - 2>/dev/null <<'PYTHON'
import os
import sys
from importlib.metadata import version

found = version("torch")
asked = os.environ.get("TENSORSTOW_TORCH_VERSION")
major, minor = map(int, found.split(".")[:2])
sys.exit((major, minor) < (2, 11) or (asked or found).split("+")[0] != found.split("+")[0])
PYTHON
}

has_nvidia() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

install_torch() {
  if [ -n "${TENSORSTOW_TORCH:-}" ]; then
    # shellcheck disable=SC2086  # several arguments on purpose
    pip install $TENSORSTOW_TORCH
  elif has_torch; then
    say "torch is already there"
  elif has_nvidia; then
    say "NVIDIA accelerator found: installing torch with CUDA"
    release=${TENSORSTOW_TORCH_VERSION:+==$TENSORSTOW_TORCH_VERSION}
    pip install --no-compile "torch${release:->=2.11}"
  else
    [ ! -e /dev/kfd ] ||
      say "AMD accelerator found: for ROCm set TENSORSTOW_TORCH" \
        "(see https://pytorch.org/get-started), this installs torch for the CPU"
    install_cpu_torch
  fi
}

# PyPI's torch for Linux brings gigabytes of CUDA. The suffix +cpu asks for the other build by
# name: PyPI cannot have it, so pip finds it in the machine's own mirrors, then in torch's index.
install_cpu_torch() {
  say "no NVIDIA accelerator found: installing torch $TORCH_VERSION for the CPU"
  # Most of its modules are never imported: those that are get compiled then.
  pip install --no-compile "torch==$TORCH_VERSION+cpu" 2>/dev/null && return
  pip install --no-compile --extra-index-url "$CPU_INDEX" "torch==$TORCH_VERSION+cpu" && return
  say "no CPU build of torch $TORCH_VERSION can be reached: taking the one the index has"
  pip install --no-compile "torch==$TORCH_VERSION"
}

install_build_tools() {
  # Without build isolation pip takes these from .venv, so an incremental build stays one.
  "$VENV/bin/python" - <<'PYTHON' | pip install --quiet -r /dev/stdin
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], "cmake", "ninja", sep="\n")
PYTHON
}

# The releases that the tests are known to pass with, or what this Python and this index have.
tested() {
  pip install --quiet --constraint tools/constraints.txt "$@" ||
    { say "cannot install the releases in tools/constraints.txt: taking the newest" &&
      pip install --quiet "$@"; }
}

# --- the three steps ----------------------------------------------------------------------------

case "${1:-}" in
  python)
    [ "$(uname -s)" = Linux ] || die "this is $(uname -s); only Linux works so far"
    make_venv
    check_compiler
    install_build_tools
    ;;
  native)
    check_compiler
    # The core needs no torch: one is downloaded and unpacked while the other is compiled.
    install_torch &
    torch=$!
    say "building the native core"
    pip install --quiet --no-build-isolation --no-deps --config-settings build-dir=build/native --editable . ||
      { kill $torch 2>/dev/null || true; die "the native core cannot be built: see the lines above"; }
    wait $torch || die "torch cannot be installed: see the lines above"
    ;;
  extra)
    # tensorstow itself is installed: pip only adds what the extra names.
    say "installing what tensorstow[$2] needs"
    tested --no-compile "tensorstow[$2]"
    [ "$2" != test ] || tested "tensorstow[kernel]" ||
      say "no Triton can be installed here: tests of the fused kernel will be skipped"
    # shellcheck disable=SC2086  # several packages on purpose
    [ "$2" != test ] || pip install --quiet --no-compile --no-deps $TRAINERS ||
      say "torchtitan, axolotl and others cannot be installed here: their tests will be skipped"
    ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
