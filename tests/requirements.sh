#!/usr/bin/env bash
# Checks that this machine can build Onefold, and reports everything that is missing at once. `make` runs it first.
#
#   tests/requirements.sh [--tests|--packages]
#
# With --tests it also checks what `make test` needs beyond `make demo`, and with --packages what `make wheel`, `make dist`
# and `make test-delta` need. LIBTORCH, CARGO, CC, CXX, CARGO_TARGET_DIR and ONEFOLD_CACHE have the meaning that they have
# for `make`. The exit status is 1 if something is missing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
tests='' oldest_rust=1.94 oldest_python=3.8
case "${1:-}" in
--tests) tests=yes oldest_python=3.11 ;;
--packages) oldest_rust=1.95 oldest_python=3.11 ;;
esac

missing=0
# `require PROBLEM HINT`: reports what is missing and what to do.
require() { missing=$((missing + 1)); printf 'error: %s\n  hint: %s\n' "$1" "$2" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }
# Returns whether version $1 is at least version $2.
at_least() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$2" ]; }

cargo=${CARGO:-cargo} cc=${CC:-cc} cxx=${CXX:-c++}
cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
target=${CARGO_TARGET_DIR:-target}
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT

# The machine.
[ "$(uname -sm)" = "Linux x86_64" ] || [ -n "${LIBTORCH:-}" ] ||
    require "this is $(uname -sm); libtorch is fetched for Linux x86_64 only" "set LIBTORCH to a libtorch 2.11.0 for this machine"
if [ -r /proc/cpuinfo ] && [ -z "${RUSTFLAGS:-}" ] && [ "$(uname -m)" = x86_64 ]; then
    for flag in avx2 bmi2 fma; do
        grep -qw "$flag" /proc/cpuinfo ||
            require "the processor has no ${flag^^}" "build for any x86-64 processor: export RUSTFLAGS='-C target-cpu=x86-64'"
    done
fi
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d ' ' -f 2)
at_least "${glibc:-0}" 2.28 ||
    require "glibc 2.28 or newer is needed; found ${glibc:-another C library}" "use a distribution of 2018 or later with glibc"

# `space FOLDER GIBIBYTES PURPOSE VARIABLE`: checks the free space on the file system of FOLDER, which VARIABLE sets.
space() {
    local folder=$1 free
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    [ -w "$folder" ] || require "$folder is not writable; $3 go there" "change its permissions, or set $4"
    free=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free" -ge "$2" ] ||
        require "$3 need $2 GiB of disk space; $folder has $free GiB" "free some space, or set $4 to a folder on a larger disk"
}
if [ ! -d "$target/release" ]; then
    if [ -n "$tests" ]; then space "$target" 8 "compiled files" CARGO_TARGET_DIR
    else space "$target" 3 "compiled files" CARGO_TARGET_DIR; fi
fi
[ -d "$cache" ] || space "$cache" 2 "libtorch and test packages" ONEFOLD_CACHE

# Programs.
if ! has "$cargo"; then
    require "there is no $cargo" "install Rust $oldest_rust or newer with rustup"
else
    rust=$(rustc --version 2>/dev/null | sed -n 's/^rustc \([0-9.]*\).*/\1/p')
    at_least "${rust:-0}" "$oldest_rust" ||
        require "Rust $oldest_rust or newer is needed; found ${rust:-none}" "rustup update stable"
fi
for tool in flock sha256sum awk; do
    has "$tool" || require "there is no $tool" "install it (Debian and Ubuntu: packages util-linux, coreutils, mawk)"
done
printf '#include <filesystem>\n#include <thread>\nint main() { return std::filesystem::path("a") == "b"; }\n' >"$scratch/a.cpp"
compiles() { "$cxx" -std=c++17 "$@" "$scratch/a.cpp" -o "$scratch/a" >/dev/null 2>&1; }
if ! has "$cc" || ! has "$cxx"; then
    require "there is no C and C++ compiler ($cc, $cxx)" "install one (Debian and Ubuntu: package build-essential), or set CC and CXX"
elif ! compiles; then
    require "$cxx cannot compile and link a C++17 program" "install a newer one with its standard library (Debian and Ubuntu: package build-essential)"
elif [ -n "$tests" ]; then
    compiles -fsanitize=address,undefined && compiles -fsanitize=thread ||
        require "$cxx has no address and thread sanitizers" "install them (GCC: libasan and libtsan of its version), or set CXX"
fi
python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
if ! at_least "${python:-0}" "$oldest_python"; then
    require "Python $oldest_python or newer is needed; found ${python:-none}" "put a newer python3 first on the PATH${tests:+, or run make test-rust}"
elif ! python3 -m pip --version >/dev/null 2>&1; then
    require "python3 has no pip" "install it (Debian and Ubuntu: package python3-pip)"
fi
if [ -n "$tests" ]; then
    for tool in openssl setarch bash kill; do
        has "$tool" || require "there is no $tool" "install it (Debian and Ubuntu: packages openssl, util-linux, procps)"
    done
fi

# The network, unless everything is already downloaded.
if has "$cargo" && ! "$cargo" fetch --locked --target x86_64-unknown-linux-gnu >"$scratch/cargo.log" 2>&1; then
    require "cargo cannot fetch the crates: $(tail -n 1 "$scratch/cargo.log")" "check the network and cargo's registry"
fi
if [ -z "${LIBTORCH:-}" ] && [ ! -d "$cache/libtorch-2.11.0" ] && [ -n "$python" ] &&
    ! python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --dest "$scratch" \
        nvidia-cuda-runtime==13.0.96 >"$scratch/pip.log" 2>&1; then
    require "pip cannot fetch packages: $(tail -n 1 "$scratch/pip.log")" "check the network and pip's index"
fi

[ "$missing" -eq 0 ]
