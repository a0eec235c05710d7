#!/usr/bin/env bash
# Sets the project up in .venv and runs its demonstration or its tests. Those of the NPU have their own .venv-npu.
#
#   ./build.sh setup          environment, server and commands in .venv; may be repeated
#   ./build.sh demo           starts the server with each demo model and generates through it
#   ./build.sh test [GROUP]   all tests, or one group: fast, unit, engine, server, load, npu
#   ./build.sh soak [TIMES]   the random tests of the server, so many times as long, and a new seed (100)
#
# PYTHON names the interpreter (3.11 or 3.12), TRITONSERVER_BIN a Triton server other than the packaged one.
set -euo pipefail
cd "$(dirname "$0")"
root=$PWD
venv=$root/.venv
npu_venv=$root/.venv-npu

say() { printf '\n== %s\n' "$*" >&2; }
fail() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "Python 3.11 or 3.12 is needed; name it with PYTHON=…"
}

# The packaged server is built for glibc 2.35 and loads the interpreter's shared library.
check_host() {
  "$1" - <<'PY'
import ctypes.util, os, pathlib, platform, sys, sysconfig
if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
    sys.exit(f"build.sh: {platform.system()} {platform.machine()}: the server runs on Linux x86_64 and aarch64 only")
if os.environ.get("TRITONSERVER_BIN"):
    sys.exit()
version = os.confstr("CS_GNU_LIBC_VERSION").split()[-1]
if tuple(map(int, version.split("."))) < (2, 35):
    sys.exit(f"build.sh: glibc {version}: the packaged Triton server needs 2.35; use a newer system or a container, "
             "or set TRITONSERVER_BIN to a server built for this one")
name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
if not (pathlib.Path(sysconfig.get_config_var("LIBDIR")) / name).exists() and not ctypes.util.find_library(
    name.removeprefix("lib").split(".so")[0]
):
    sys.exit(f"build.sh: {name} is missing: install the shared library of this Python (Debian: libpython3-dev), "
             "or name another with PYTHON=…")
PY
}

# Some distributions leave out what venv needs to put pip in; the host's own pip can do it.
make_venv() {
  [ -x "$2/bin/pip" ] || "$1" -m venv "$2" 2>/dev/null || {
    "$1" -m venv --without-pip "$2"
    "$1" -m pip --python "$2/bin/python" install pip
  }
}

setup() {
  local python wanted
  python=$(find_python)
  check_host "$python"
  wanted=$(cat pyproject.toml client/pyproject.toml constraints.txt build.sh | sha256sum)
  if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    say "environment in .venv ($("$python" --version))"
    make_venv "$python" "$venv"
    say "packages (torch is the largest)"
    "$venv/bin/pip" install --disable-pip-version-check -c constraints.txt -e '.[test,grammar,plot,tracing]' -e 'client[gateway]'
    # The server's package has a Python interface of its own, and xgrammar a GPU compiler, which are not used: leave
    # their requirements out.
    "$venv/bin/pip" install --disable-pip-version-check --no-deps -c constraints.txt nvidia-pytriton xgrammar
    printf '%s' "$wanted" > "$venv/.installed"
  fi
  "$venv/bin/python" backend/native/build.py
  ln -sfn "$("$venv/bin/mtp" install-server)" "$venv/bin/tritonserver"
}

# The real torch_npu over an emulated device (docs/npu.md).
setup_npu() {
  local python wanted torch install
  python=$(find_python)
  wanted=$(cat pyproject.toml constraints.txt build.sh tests/npu_host/*.py tests/npu_host/*.c* | sha256sum)
  [ "$(cat "$npu_venv/.installed" 2>/dev/null)" != "$wanted" ] || return 0
  say "environment of the emulated NPU in .venv-npu ($("$python" --version))"
  command -v g++ >/dev/null && command -v readelf >/dev/null || fail "gcc, g++ and binutils are needed to emulate an NPU"
  make_venv "$python" "$npu_venv"
  install=("$npu_venv/bin/pip" install --disable-pip-version-check -c constraints.txt)
  # torch_npu refuses a torch that is built for CUDA, so a build for the CPU is asked for first.
  torch=$(grep '^torch==' constraints.txt)
  "${install[@]}" "$torch+cpu" || "${install[@]}" "$torch"
  "${install[@]}" -e '.[npu]' pytest pytest-xdist
  "$npu_venv/bin/python" tests/npu_host/stand_ins.py "$npu_venv/cann"
  printf '%s' "$wanted" > "$npu_venv/.installed"
}

# One process for each core, four at most.
side_by_side=(-n auto --maxprocesses 4)
# A file's tests stay together, for they share engines.
run_side_by_side() { "$venv/bin/python" -m pytest "${side_by_side[@]}" --dist loadfile "$@"; }

run_npu_tests() {
  setup_npu
  LD_LIBRARY_PATH="$npu_venv/cann" "$npu_venv/bin/python" -m pytest "${side_by_side[@]}" --dist worksteal tests/npu
}

# Tests compute in their own processes: the memory of an engine (backend/mtp_backend/environment.py).
compute_in_large_pages() {
  export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864 PYTHONMALLOC=malloc
}

run_tests() {
  local group=${1:-all}
  [ "$group" = npu ] || setup
  compute_in_large_pages
  say "tests: $group"
  case $group in
    all) run_side_by_side tests/unit tests/engine; "$venv/bin/python" -m pytest tests/server tests/load; run_npu_tests ;;
    npu) run_npu_tests ;;
    fast) run_side_by_side tests/unit tests/engine -m 'not slow' ;;
    unit | engine) run_side_by_side "tests/$group" ;;
    server | load) "$venv/bin/python" -m pytest "tests/$group" ;;
    *) fail "test group '$group'; allowed: fast, unit, engine, server, load, npu" ;;
  esac
}

# 100 times: 100,000 malformed requests, 20,000 sequences, and ten minutes of clients that are killed.
soak() {
  export MTP_SOAK=${1:-100} MTP_SEED=${MTP_SEED:-$RANDOM}
  setup
  compute_in_large_pages
  say "soak: $MTP_SOAK times, seed $MTP_SEED (MTP_SEED=$MTP_SEED repeats it)"
  "$venv/bin/python" -m pytest -s tests/server/test_fuzz.py tests/server/test_chaos.py
}

case ${1:-} in
  setup) setup ;;
  demo) setup; say "demonstration"; exec "$venv/bin/python" benchmarks/demo.py ;;
  test) run_tests "${2:-all}" ;;
  soak) soak "${2:-100}" ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
