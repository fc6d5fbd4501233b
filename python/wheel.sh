#!/usr/bin/env bash
# Builds the wheel of the package `onefold` into the directory OUT, and prints the path of the wheel.
#
#   python/wheel.sh OUT [ARGUMENTS OF MATURIN]
#
# maturin uses the workspace's profile and target directory, so crates that `make build` compiled are not compiled
# again, unless the arguments choose other features (`--features delta`). The wheel is tagged with this machine's glibc
# version: it works with this version or a newer one, and needs no Rust.
set -euo pipefail
out=$(realpath -m "$1")
shift
cd "$(dirname "$0")"
packages=$(./environment.sh)
target=${CARGO_TARGET_DIR:-$PWD/../target}
glibc=$(ldd --version | sed -n '1s/.* \([0-9]*\)\.\([0-9]*\)$/\1_\2/p')
../dist/licences.py >THIRD-PARTY.txt
rm -f "$out"/onefold-[0-9]*.whl
# cargo's messages go to stderr. The path is the only line on stdout.
CARGO_TARGET_DIR=$target PYTHONPATH=$packages "$packages/bin/maturin" build --release --locked --out "$out" \
    --compatibility "manylinux_$glibc" --auditwheel=skip "$@" 1>&2
wheels=("$out"/onefold-[0-9]*.whl)
printf '%s\n' "${wheels[0]}"
