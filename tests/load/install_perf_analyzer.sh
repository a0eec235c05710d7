#!/usr/bin/env bash
# Installs perf_analyzer in a private folder:  install_perf_analyzer.sh DIR  ->  DIR/perf_analyzer
#
# The published binary needs glibc 2.38. On an older Debian it runs on a C library of its own, unpacked below DIR
# from signed packages; neither the host's libraries nor its apt configuration change.
# Exit codes: 0 installed, 2 wrong usage, 3 not possible on this host (the last line says why).
set -euo pipefail

VERSION=2.60.0
GLIBC=2_38      # what the wheel of this version is built for
SUITE=trixie    # the Debian release that the C library comes from
PACKAGES=(libc6 libgcc-s1 libstdc++6 libssl3t64 libzstd1 zlib1g)
LIMIT=300       # seconds for each download
PYTHON=${PYTHON:-python3}

say() { echo "perf_analyzer: $*" >&2; }
cannot() { say "cannot install: $*"; exit 3; }
works() { timeout 60 "$@" --version >/dev/null 2>&1; }

[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
mkdir -p "$1" 2>/dev/null || cannot "cannot create the folder $1"
dir=$(cd "$1" && pwd)
machine=$(uname -m)

command -v flock >/dev/null || cannot "no flock on this host"
exec 9>"$dir/.lock"
flock -w $((3 * LIMIT)) 9 || cannot "another installation holds $dir/.lock"
if [ "$(cat "$dir/version" 2>/dev/null)" = "$VERSION $machine" ] && works "$dir/perf_analyzer"; then
    say "$VERSION is installed in $dir"
    exit 0
fi

new=$(mktemp -d "$dir/.new.XXXXXX")
trap 'rm -rf "$new"' EXIT

# The wheel ------------------------------------------------------------------------------------------------------------
[ "$machine" = x86_64 ] || [ "$machine" = aarch64 ] || cannot "no build for $machine"
"$PYTHON" -m pip --version >/dev/null 2>&1 || cannot "$PYTHON has no pip"
say "fetching perf-analyzer $VERSION ($machine)"
timeout "$LIMIT" "$PYTHON" -m pip --disable-pip-version-check --timeout 30 --retries 2 download --quiet --no-deps \
    --only-binary=:all: --platform "manylinux_${GLIBC}_$machine" --dest "$new/wheel" "perf-analyzer==$VERSION" >&2 ||
    cannot "pip could not fetch perf-analyzer $VERSION"
"$PYTHON" -m zipfile -e "$new"/wheel/perf_analyzer-*.whl "$new/unpacked"
mv "$new/unpacked/perf_analyzer/bin/perf_analyzer" "$new/perf_analyzer.bin"
chmod +x "$new/perf_analyzer.bin"

# The C library, where the host's is too old ---------------------------------------------------------------------------
fetch_libc() {
    local deb mirror old="glibc is older than ${GLIBC/_/.}" keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    command -v apt-get dpkg dpkg-deb | wc -l | grep -q 3 || cannot "$old and there are no apt-get and dpkg (not Debian)"
    mirror=$(grep -shE '^(deb|URIs:)[[:space:]]' /etc/apt/sources.list /etc/apt/sources.list.d/*.list \
        /etc/apt/sources.list.d/*.sources | grep -oE '[a-z]+:[^][:space:]]+/debian/?([[:space:]]|$)' | tr -d ' \t' | sort -u) || true
    [ -n "$mirror" ] || cannot "$old and /etc/apt names no Debian mirror"
    [ -r "$keyring" ] || cannot "no $keyring to check the packages with (package debian-archive-keyring)"

    mkdir -p "$new"/apt/{state/lists/partial,cache/archives/partial} "$new/debs"
    echo "deb [signed-by=$keyring] ${mirror%%$'\n'*} $SUITE main" >"$new/apt/sources.list"
    : >"$new/apt/status"
    # Read after the host's own configuration, of which it keeps the proxies and drops the hooks.
    cat >"$new/apt/apt.conf" <<EOF
#clear APT::Update;
#clear APT::Architectures;
APT::Architectures { "$(dpkg --print-architecture)"; };
APT::Sandbox::User "root";
APT::Get::AllowUnauthenticated "false";
Acquire { AllowInsecureRepositories "false"; Languages "none"; Retries "2"; http::Timeout "30"; https::Timeout "30"; };
Dir { State "$new/apt/state"; State::status "$new/apt/status"; Cache "$new/apt/cache"; };
Dir::Etc { sourcelist "$new/apt/sources.list"; sourceparts "/dev/null"; preferences "/dev/null"; preferencesparts "/dev/null"; };
EOF
    say "fetching the C library of Debian $SUITE"
    timeout "$LIMIT" apt-get -c "$new/apt/apt.conf" -q update >&2 || cannot "apt could not read $SUITE from the host's mirror"
    (cd "$new/debs" && timeout "$LIMIT" apt-get -c "$new/apt/apt.conf" -q download "${PACKAGES[@]}" >&2) ||
        cannot "apt could not fetch the packages of $SUITE"
    for deb in "$new"/debs/*.deb; do dpkg-deb -x "$deb" "$new/libc"; done
}

write_launcher() { # the command that it runs; $here is the launcher's folder
    # shellcheck disable=SC2016  # expanded by the launcher
    printf '#!/bin/sh\nhere=$(dirname "$(readlink -f "$0")")\nunset LD_PRELOAD\nexec %s "$@"\n' "$1" >"$new/perf_analyzer"
    chmod +x "$new/perf_analyzer"
}

# shellcheck disable=SC2016
binary='"$here/perf_analyzer.bin"'
write_launcher "$binary"
if ! works "$new/perf_analyzer"; then
    fetch_libc
    loader=$(cd "$new" && find libc -type f -name 'ld-linux*.so.*' | head -n 1)
    [ -n "$loader" ] || cannot "the packages of $SUITE contain no loader"
    write_launcher "\"\$here/$loader\" --library-path \"\$here/${loader%/*}\" $binary"
    works "$new/perf_analyzer" || cannot "the binary does not start: $("$new/perf_analyzer" --version 2>&1 | tail -n 1)"
fi

rm -rf "$dir/libc"
[ ! -d "$new/libc" ] || mv "$new/libc" "$dir/"
mv "$new/perf_analyzer.bin" "$new/perf_analyzer" "$dir/"
echo "$VERSION $machine" >"$dir/version"
say "$VERSION is installed in $dir"
