#!/bin/sh
# Builds what is released into dist/: the source archive, and from it wheels for x86-64 and aarch64.
#
#   tools/wheels.sh PYTHON...    one wheel a Python below 3.12, and one for 3.12 and later (stable ABI)
#
# Zig's compiler links against the glibc of manylinux_2_28 and its own C++ library, so any machine builds
# both, without containers. Each wheel is audited: symbols no newer than its tag says, and no others than
# the stable ABI's.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
bin=$PWD/.venv/bin
GLIBC=2.28

rm -rf dist build/release
"$bin/python" -m build --quiet --sdist --outdir dist
mkdir -p build/release
tar -xzf dist/tensorstow-*.tar.gz -C build/release --strip-components 1

for machine in x86_64 aarch64; do
  tag=manylinux_$(echo $GLIBC | tr . _)_$machine
  for python in "$@"; do
    echo "tensorstow: a wheel for $machine, $($python --version)"
    STOW_ZIG=$bin/python STOW_TARGET=$machine-linux-gnu.$GLIBC _PYTHON_HOST_PLATFORM=$tag \
      CMAKE_TOOLCHAIN_FILE=$PWD/tools/zig.cmake \
      $python -m pip wheel --quiet --no-deps --wheel-dir dist build/release
  done
done
for wheel in dist/*.whl; do
  "$bin/auditwheel" show --json "$wheel" >build/release/audit.json
  # A glibc below the one of the tag is fine: nothing newer was needed.
  grep -Eq '"overall_tag": *"manylinux_2_(17|2[0-8])_' build/release/audit.json || {
    cat build/release/audit.json
    exit 1
  }
  case $wheel in *-abi3-*) "$bin/abi3audit" --strict "$wheel" ;; esac
done
ls -l dist
