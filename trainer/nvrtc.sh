#!/usr/bin/env bash
# Prints the folder of NVRTC 13.0 (CUDA's run-time compiler), for `ONEFOLD_NVRTC`; fetches it first if it does not exist.
#
#   ONEFOLD_NVRTC=$(trainer/nvrtc.sh) cargo test --release -p onefold-trainer nvrtc
#
# Tests compile the kernels with it, which needs no GPU. A GPU host has it with torch. Like libtorch.sh, this script unpacks
# it into the cache, checked against its hash, by a single rename.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for hint in "$@"; do say "  hint: $hint"; done; exit 1; }

if [ -n "${ONEFOLD_NVRTC:-}" ]; then
    [ -f "$ONEFOLD_NVRTC/libnvrtc.so.13" ] ||
        die "ONEFOLD_NVRTC=$ONEFOLD_NVRTC holds no libnvrtc.so.13" "unset it to have one fetched"
    printf '%s\n' "$ONEFOLD_NVRTC"
    exit 0
fi

cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
home=$cache/nvrtc-13.0.88
if [ ! -d "$home" ]; then
    [ "$(uname -sm)" = "Linux x86_64" ] ||
        die "no NVRTC wheel is pinned for $(uname -sm), only for Linux x86_64" "set ONEFOLD_NVRTC to the folder of libnvrtc.so.13"
    python3 -m pip --version >/dev/null 2>&1 ||
        die "python3 has no pip, which fetches NVRTC" "install it (Debian: apt-get install python3-pip)"
    mkdir -p "$cache"
    # One fetch at a time; a second process waits and finds the result. The kernel releases the lock of a killed process.
    exec 9>"$cache/nvrtc.lock"
    flock 9
fi
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi
rm -rf "$cache"/nvrtc.partial.*
work=$(mktemp -d "$cache/nvrtc.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT

printf 'nvidia-cuda-nvrtc==13.0.88 --hash=sha256:%s\n' \
    ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575 >"$work/wheels.txt"
say "fetching NVRTC 13.0.88 into $home (once; about 90 MB)"
python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
    --only-binary=:all: --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 \
    --dest "$work/wheels" --requirement "$work/wheels.txt" 1>&2 ||
    die "pip could not fetch NVRTC (its message is above)" "check the network and pip's index, then run this again"

mkdir "$work/nvrtc"
python3 - "$work" <<'PYTHON'
import pathlib, shutil, sys, zipfile

work = pathlib.Path(sys.argv[1])
wanted = {"libnvrtc.so.13", "libnvrtc-builtins.so.13.0"}
for wheel in (work / "wheels").glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = pathlib.PurePosixPath(info.filename).name
            if name in wanted:
                with archive.open(info) as source, open(work / "nvrtc" / name, "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                wanted.discard(name)
if wanted:
    sys.exit("the wheel holds no " + ", ".join(sorted(wanted)))
PYTHON
sync "$work/nvrtc"
mv "$work/nvrtc" "$home"
printf '%s\n' "$home"
