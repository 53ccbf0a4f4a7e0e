#!/bin/sh
# Runs all that needs an accelerator, on a machine that is there seldom and has no network.
#
#   tools/accelerator.sh                   every stage, in this order
#   tools/accelerator.sh STAGE ...         those named
#   tools/accelerator.sh wheels [FOLDER]   beforehand, with a network: fetch what may lack there
#
#   build      the native core from source, against the torch that is there
#   tests      tests/gpu
#   parity     tests/gpu, the files that compare bits
#   peers      other projects' packages, and what they compile
#   overlap    1 billion parameters: when updates run, none, forward, backward
#   bench-1B   1 billion parameters: ours, no offload, peers
#   traces     of one step of each
#   sanitize   compute-sanitizer over a few short tests
#   bench-8B   as bench-1B, without the disk
#   bench-3B
#
# A stage that is done is skipped by the next call, as long as what it ran, the accelerator and torch
# are the same; one that was cut off goes on where it was. A failure is said, the next stages run, and
# the status is 1; where torch sees no accelerator nothing runs, and it is 2. What was measured is in
# build/accelerator, and in $OUT where that is set; results.tar.gz there, unpacked into
# build/accelerator, lets another machine of the same kind go on. Variables:
#
#   OUT=FOLDER                   where a copy of the results goes, in few files
#   ACCELERATOR_PYTHON=PYTHON    has torch (default: that of .venv, else python3)
#   ACCELERATOR_SECONDS=540      of one call
#   ACCELERATOR_STATE=FOLDER     what is kept from call to call (default build/accelerator);
#                                a rehearsal's is beside it: FOLDER-simulated
#   ACCELERATOR_WHEELS=.wheels   what `wheels` fetched
#   SIMULATED=1                  a rehearsal: the simulated accelerator of the tests, tiny sizes
set -eu

STAGES="build tests parity peers overlap bench-1B traces sanitize bench-8B bench-3B"
WHEELS=${ACCELERATOR_WHEELS:-.wheels}
MOST_WHEELS=$((60 << 20)) # bytes: more does not travel to such a machine in one go
AGAIN=75 # benchmarks/accelerator/rounds.py: a process that is to be started once more
ABSENT=77 # what a stage needs is not on this machine, and need not be
CUT_OFF=124 # timeout's own
LEAST_SECONDS=10 # in which a stage is begun

case "${OUT:-/}" in /*) ;; *) OUT=$PWD/$OUT ;; esac
cd "$(dirname "$0")/.."
SELF=$PWD/tools/accelerator.sh
STATE=${ACCELERATOR_STATE:-build/accelerator}${SIMULATED:+-simulated}
VENV=$STATE-venv # beside it: what is installed does not travel

say() { echo "accelerator: $*" >&2; }
die() {
  say "$*"
  exit 2
}

# What the machine has, or what `build` has made because that has no tensorstow from here.
python() {
  if [ -x "$VENV/bin/python" ]; then echo "$VENV/bin/python"; else echo "$BASE"; fi
}

has_tensorstow() {
  "$1" - 2>/dev/null <<'PYTHON'
import sys
from pathlib import Path

import torch

print("Python", sys.version.split()[0], "torch", torch.__version__)
import tensorstow
from tensorstow import _native

sys.exit(not Path(tensorstow.__file__).samefile("src/tensorstow/__init__.py"))
PYTHON
}

# What results hang on beside the code: "NAME, torch VERSION". Status 1 where there is no accelerator.
device_here() {
  if [ -n "${SIMULATED:-}" ]; then
    echo simulated
    return
  fi
  "$BASE" - <<'PYTHON'
import sys

import torch

device = torch.accelerator.current_accelerator(check_available=True)
if device is None:
    sys.exit("torch.accelerator has no device here")
name = device.type
if hasattr(torch.get_device_module(device), "get_device_name"):
    name = torch.get_device_module(device).get_device_name()
print(f"{name}, torch {torch.__version__}")
PYTHON
}

# --- wheels: beforehand, with a network ---------------------------------------------------------

# In the order of need. Packages whose needs the machine has (torch) are fetched without them.
wheels() {
  folder=${1:-$WHEELS}
  mkdir -p "$folder"
  lacking=0
  for name in scikit-build-core nanobind ninja pytest pytest-timeout pytest-xdist hypothesis \
    rich psutil torchao:alone deepspeed:built hjson pydantic py-cpuinfo msgpack einops tqdm \
    cmake numpy safetensors:alone; do
    fetch "$name" "$folder" || lacking=1
  done
  (cd "$folder" && wc -c -- *.whl | sort -n) >&2
  [ $lacking -eq 0 ] || say "what could not be had or has no room is named above"
  return $lacking
}

# fetch NAME[:alone|:built] FOLDER: into FOLDER, if all that is there stays below MOST_WHEELS.
fetch() {
  package=${1%:*}
  part=$(mktemp -d)
  case "$1" in
    *:built) DS_BUILD_OPS=0 "$BASE" -m pip wheel -q --no-deps -w "$part" "$package" ;;
    *:alone) download "$part" --no-deps "$package" ;;
    *) download "$part" "$package" ;;
  esac || {
    say "$package cannot be had"
    rm -rf "$part"
    return 1
  }
  for file in "$part"/*.whl; do # what came with an earlier package is there
    if [ -e "$2/$(basename "$file")" ]; then rm "$file"; fi
  done
  total=$(cat "$part"/*.whl "$2"/*.whl 2>/dev/null | wc -c)
  if [ "$total" -gt "$MOST_WHEELS" ]; then
    say "$package has no room: $total bytes with what comes before it, $MOST_WHEELS is the most"
    rm -rf "$part"
    return 1
  fi
  find "$part" -name '*.whl' -exec mv {} "$2" \;
  rm -rf "$part"
}

download() {
  to=$1
  shift
  "$BASE" -m pip download -q -d "$to" --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux_2_5_x86_64 \
    --platform manylinux1_x86_64 "$@"
}

# --- the stages, each in a process of its own ---------------------------------------------------

build() {
  if has_tensorstow "$BASE"; then
    say "it has tensorstow from here"
  else
    make_venv
    install "scikit-build-core 0.11" "nanobind 2.4" "pytest 8" "pytest-timeout 2" \
      "pytest-xdist 3.7" "hypothesis 6" "numpy 1" "rich 10" "safetensors 0.4" "psutil 5"
    command -v cmake >/dev/null || install "cmake 3.26"
    command -v ninja >/dev/null || install "ninja 1"
    "$VENV/bin/python" -m pip install -q --no-index --no-build-isolation --no-deps --editable .
    has_tensorstow "$VENV/bin/python"
  fi
  if [ -n "${SIMULATED:-}" ]; then PYTHONPATH=tests "$(python)" -c 'import simulated'; fi
}

# An environment that sees the packages of $BASE, which may be in an environment itself.
make_venv() {
  [ -x "$VENV/bin/python" ] || "$BASE" -m venv --without-pip "$VENV"
  sites=$("$BASE" -c 'import site; print(site.getsitepackages())')
  echo "import site; [site.addsitedir(path) for path in $sites]" >"$(
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
  )/of_the_machine.pth"
  "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$VENV/bin/python" -m ensurepip
}

# install "NAME LEAST" ...: from the wheels, what is not there in a version that is new enough.
install() {
  for need in "$@"; do
    # shellcheck disable=SC2086  # a name and a version
    has_package $need || "$VENV/bin/python" -m pip install -q --no-index \
      --find-links "$WHEELS" "${need% *}" || {
      say "no ${need% *} here nor in $WHEELS"
      return 1
    }
  done
}

has_package() {
  "$(python)" - "$@" 2>/dev/null <<'PYTHON'
import re
import sys
from importlib.metadata import version

found, least = ([int(n) for n in re.findall(r"\d+", text)] for text in (version(sys.argv[1]), sys.argv[2]))
sys.exit(found < least)
PYTHON
}

tests() { run_tests tests --ignore-glob '*parity*' tests/gpu; }
parity() { run_tests parity tests/gpu/*parity*.py; }

# run_tests NAME ARGUMENT ...: those that have not passed yet.
run_tests() {
  kept=$STATE/$1-$DIGEST.jsonl
  shift
  PYTHONPATH=tests "$(python)" -m pytest ${SIMULATED:+-p simulated.plugin} -p unskipped \
    -p resumed -p no:benchmark --results "$kept" -n "$PROCESSES" -q "$@"
}

peers() {
  lacking=""
  if [ -x "$VENV/bin/python" ]; then
    install "torchao 0" || lacking=1
    install "deepspeed 0" || lacking=1
  fi
  "$(python)" -c 'import torchao.optim' || lacking=1
  if "$(python)" -c 'import deepspeed'; then
    "$(python)" -c 'from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()'
  else
    lacking=1
  fi
  [ -z "$lacking" ] || return $ABSENT
}

# bench SIZE LIMIT ARGUMENT ...: LIMIT seconds for one turn of one way.
bench() {
  size=$1
  way_seconds=$2
  shift 2
  [ -z "${SIMULATED:-}" ] || set -- "$@" --simulated --quick --pairs 2
  for _ in 1 2 3 4 5 6 7 8; do
    "$(python)" benchmarks/run.py gpu --size "$size" --way-seconds "$way_seconds" \
      --journal "$STATE/journal-$DIGEST" --out "$STATE/figures" "$@" && return
    status=$?
    # By a signal too: a crash of one way is not the end of the others.
    [ $status -eq $AGAIN ] || [ $status -gt 128 ] || return $status
    say "the process ended with status $status: on in another one"
  done
  return $status
}

traces() {
  "$(python)" -m benchmarks.accelerator.traces --out "$STATE/traces-$DIGEST" ${SIMULATED:+--simulated --quick}
}

overlap() {
  "$(python)" benchmarks/run.py gpu_overlap --out "$STATE/figures" ${SIMULATED:+--simulated --quick}
}

sanitize() {
  PATH=$PATH:/usr/local/cuda/bin
  command -v compute-sanitizer >/dev/null || return $ABSENT
  # torch's own cache would hide what lies beyond an allocation.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests compute-sanitizer --tool memcheck \
    --error-exitcode 1 "$(python)" -m pytest ${SIMULATED:+-p simulated.plugin} -p unskipped \
    --timeout 0 -q tests/gpu -k "copies_there_and_back or formats_of_updates_on_the_device"
}

inside() {
  case "$1" in
    bench-1B) bench 1B 240 --pairs 4 ;; # two rounds: a call has room for one and a half
    bench-8B) bench 8B 240 --pairs 2 ;;
    bench-3B) bench 3B 240 --pairs 4 ;;
    *) "$1" ;;
  esac
}

limit_of() {
  case "$1" in
    build) echo 200 ;;
    tests | parity) echo 240 ;;
    bench-*) echo 540 ;;
    *) echo 150 ;;
  esac
}

# --- what is kept -------------------------------------------------------------------------------

# What a stage's result hangs on.
digest_of() {
  case "$1" in
    build) of="csrc CMakeLists.txt pyproject.toml" ;;
    peers) of="CMakeLists.txt pyproject.toml" ;;
    tests | parity | sanitize) of="src csrc tests pyproject.toml" ;;
    *) of="src csrc benchmarks" ;;
  esac
  # shellcheck disable=SC2086  # several paths on purpose
  {
    echo "$DEVICE"
    find $of -type f -not -path 'benchmarks/results/*' -not -name '*.pyc' -not -name '*.so' |
      LC_ALL=C sort | xargs sha256sum
  } | sha256sum | cut -c 1-12
}

# What is installed is not in what travels: its marks are where it is.
mark_of() {
  case "$1" in
    build | peers) echo "$VENV/$1.done" ;;
    *) echo "$STATE/$1.done" ;;
  esac
}

# run_stage NAME: write its result, "name|result|seconds|device", into $STATE/NAME.result.
run_stage() {
  digest=$(digest_of "$1")
  if [ "$(cat "$(mark_of "$1")" 2>/dev/null)" = "$digest" ]; then
    say "$1: done before"
    return
  fi
  left=$((END - $(date +%s)))
  if [ "$left" -lt $LEAST_SECONDS ]; then
    result "$1" "no time left" 0
    return 1
  fi
  limit=$(limit_of "$1")
  [ "$limit" -lt "$left" ] || limit=$left
  say "$1: at most $limit s"
  began=$(date +%s)
  status=0
  DIGEST=$digest timeout -k 10 "$limit" "$SELF" --inside "$1" >"$STATE/$1.log" 2>&1 || status=$?
  tail -n 12 "$STATE/$1.log" | cut -c 1-200 >&2
  case $status in
    0) found=done && mkdir -p "$(dirname "$(mark_of "$1")")" && echo "$digest" >"$(mark_of "$1")" ;;
    "$ABSENT") found="not here" ;;
    "$CUT_OFF" | 137) found="cut off after $limit s" ;;
    *) found="failed, status $status" ;;
  esac
  result "$1" "$found" $(($(date +%s) - began))
  case "$1" in bench-*) judge "${1#bench-}" ;; esac
  [ $status -eq 0 ] || [ $status -eq $ABSENT ]
}

result() {
  say "$1: $2, $3 s"
  echo "$1|$2|$3|$DEVICE" >"$STATE/$1.result"
}

# What was measured before a stage was cut off.
judge() {
  for journal in "$STATE/journal-$(digest_of "bench-$1")/"*; do
    [ -e "$journal" ] || return 0
  done
  "$(python)" benchmarks/run.py gpu --judge-only --size "$1" --out "$STATE/figures" \
    --journal "$STATE/journal-$(digest_of "bench-$1")" ${SIMULATED:+--simulated --quick} \
    >"$STATE/judge.log" 2>&1 && return
  say "the figures of $1 cannot be judged:"
  tail -n 3 "$STATE/judge.log" >&2
}

report() {
  {
    printf '# Stages\n\n| stage | result | seconds | device |\n|---|---|---|---|\n'
    each_result '| %s | %s | %s | %s |\n'
    echo
    if [ -e "$STATE/figures/table.md" ]; then cat "$STATE/figures/table.md"; fi
  } >"$STATE/table.md"
  {
    printf '{"simulated": %s, "stages": [' "$([ -n "${SIMULATED:-}" ] && echo true || echo false)"
    each_result '\n{"stage": "%s", "result": "%s", "seconds": %s, "device": "%s"},' | sed '$s/,$//'
    printf '\n]}\n'
  } >"$STATE/stages.json"
  [ -z "${OUT:-}" ] || hand_out
}

each_result() {
  for stage in $STAGES; do
    [ -e "$STATE/$stage.result" ] || continue
    IFS='|' read -r name found seconds device <"$STATE/$stage.result"
    # shellcheck disable=SC2059  # a format is what is given
    printf "$1" "$name" "$found" "$seconds" "$device"
  done
}

# Few files: not many come back from such a machine.
hand_out() {
  mkdir -p "$OUT"
  cp "$STATE/table.md" "$STATE/stages.json" "$OUT"
  [ ! -d "$STATE/figures" ] || cp "$STATE/figures/"*.json "$OUT"
  tar -czf "$OUT/results.tar.gz" -C "$STATE" --exclude 'traces-*' .
  (cd "$STATE" && find . -path './traces-*' -name '*.gz') >"$STATE/traces.list"
  [ ! -s "$STATE/traces.list" ] || tar -cf "$OUT/traces.tar" -C "$STATE" -T "$STATE/traces.list"
}

# --- one call -----------------------------------------------------------------------------------

BASE=.venv/bin/python
[ -x "$BASE" ] || BASE=python3
BASE=${ACCELERATOR_PYTHON:-$BASE}
command -v "$BASE" >/dev/null || die "no $BASE here: name a Python in ACCELERATOR_PYTHON"
CORES=$(nproc 2>/dev/null || echo 2)
PROCESSES=${TEST_PROCESSES:-$((CORES < 4 ? CORES : 4))}

case "${1:-}" in
  wheels)
    shift
    wheels "$@"
    exit
    ;;
  --inside)
    [ ! -d "$VENV/bin" ] || PATH=$(cd "$VENV/bin" && pwd):$PATH
    inside "$2"
    exit
    ;;
  -*)
    sed -n '2,/^set/s/^# \{0,1\}//p' tools/accelerator.sh
    exit 2
    ;;
esac
for stage in "$@"; do
  case " $STAGES " in
    *" $stage "*) ;;
    *) die "there is no stage $stage; there are: $STAGES" ;;
  esac
done

DEVICE=$(device_here) || die "no accelerator that $BASE sees: nothing was run"
END=$(($(date +%s) + ${ACCELERATOR_SECONDS:-540}))
export SIMULATED="${SIMULATED:-}"
mkdir -p "$STATE" "$VENV"
failed=""
for stage in ${*:-$STAGES}; do
  run_stage "$stage" || failed="$failed $stage"
  report
done
cat "$STATE/table.md"
[ -z "$failed" ] || say "not done:$failed"
[ -z "$failed" ]
