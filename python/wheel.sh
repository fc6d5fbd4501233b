#!/usr/bin/env bash
# Builds the wheel of the package `onefold` into the folder OUT, and prints the wheel's path.
#
#   python/wheel.sh OUT
#
# maturin compiles with the workspace's one profile and its target directory, so what `make build` compiled is not compiled
# again. The wheel is tagged for this machine's glibc: it works where glibc is as new or newer, and needs no Rust there.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")"
packages=$(./environment.sh)
target=${CARGO_TARGET_DIR:-$PWD/../target}
glibc=$(ldd --version | sed -n '1s/.* \([0-9]*\)\.\([0-9]*\)$/\1_\2/p')
rm -f "$out"/onefold-[0-9]*.whl
# cargo's messages go to stderr; the only line of stdout is the path.
CARGO_TARGET_DIR=$target PYTHONPATH=$packages "$packages/bin/maturin" build --release --locked --out "$out" \
    --compatibility "manylinux_$glibc" --auditwheel=skip ${ONEFOLD_MATURIN_ARGUMENTS:-} 1>&2
wheels=("$out"/onefold-[0-9]*.whl)
printf '%s\n' "${wheels[0]}"
