#!/usr/bin/env bash
# Installs genai-perf in an environment of its own, about 1 GB:  install_genai_perf.sh DIR  ->  DIR/bin/genai-perf
#
# It runs perf_analyzer, which install_perf_analyzer.sh installs: the one that comes with it needs a newer C library.
# Exit codes: 0 installed, 2 wrong usage, 3 not possible on this host (the last line says why).
set -euo pipefail

VERSION=0.0.16
LIMIT=900 # seconds
PYTHON=${PYTHON:-python3}

say() { echo "genai-perf: $*" >&2; }
cannot() { say "cannot install: $*"; exit 3; }

[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
dir=$1
if [ "$(cat "$dir/version" 2>/dev/null)" = "$VERSION" ]; then
    say "$VERSION is installed in $dir"
    exit 0
fi
rm -rf "$dir"
"$PYTHON" -m venv "$dir" || cannot "$PYTHON cannot make an environment"
timeout "$LIMIT" "$dir/bin/pip" --disable-pip-version-check --timeout 30 --retries 2 install --quiet \
    --only-binary=:all: "genai-perf==$VERSION" >&2 || cannot "pip could not fetch genai-perf $VERSION"
echo "$VERSION" >"$dir/version"
say "$VERSION is installed in $dir"
