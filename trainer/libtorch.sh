#!/usr/bin/env bash
# Prints the path of a libtorch 2.11.0, for `LIBTORCH`; fetches it first if it does not exist.
#
#   export LIBTORCH=$(trainer/libtorch.sh)
#
# If LIBTORCH is already set, prints its value. Otherwise unpacks the headers and the CPU libraries of PyPI's torch 2.11.0
# wheel into ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}, which all clones share and `cargo clean` does not
# delete. pip checks every wheel against the hashes below. The directory appears by a single rename, so an interrupted run
# leaves no incomplete directory.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for hint in "$@"; do say "  hint: $hint"; done; exit 1; }

if [ -n "${LIBTORCH:-}" ]; then
    [ -f "$LIBTORCH/lib/libtorch_cpu.so" ] && [ -d "$LIBTORCH/include/torch" ] ||
        die "LIBTORCH=$LIBTORCH holds no lib/libtorch_cpu.so and include/torch" \
            "point it at an unpacked libtorch 2.11.0, or unset it to have one fetched"
    printf '%s\n' "$LIBTORCH"
    exit 0
fi

cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
home=$cache/libtorch-2.11.0
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi

own="install libtorch 2.11.0 yourself and set LIBTORCH to its folder"
[ "$(uname -sm)" = "Linux x86_64" ] ||
    die "no libtorch wheel is pinned for $(uname -sm), only for Linux x86_64" "$own"
command -v python3 >/dev/null || die "python3 is not on the PATH" "install python3 with pip" "$own"
python3 -m pip --version >/dev/null 2>&1 ||
    die "python3 has no pip, which fetches libtorch" "install it (Debian: apt-get install python3-pip)" "$own"

mkdir -p "$cache"
# One fetch at a time; a second process waits and finds the result. The kernel releases the lock of a killed process.
exec 9>"$cache/libtorch.lock"
flock 9
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi
rm -rf "$cache"/libtorch.partial.*
work=$(mktemp -d "$cache/libtorch.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT

cat >"$work/wheels.txt" <<'WHEELS'
torch==2.11.0 --hash=sha256:7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a
nvidia-cuda-cupti==13.0.85 --hash=sha256:4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
WHEELS

say "fetching libtorch 2.11.0 into $home (once; about 540 MB)"
# The Python version is pinned too, so that every machine gets the wheels with these hashes.
python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
    --only-binary=:all: --implementation cp --python-version 3.11 --abi cp311 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_25_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$work/wheels" --requirement "$work/wheels.txt" 1>&2 ||
    die "pip could not fetch the wheels of torch 2.11.0 (its message is above)" \
        "check the network and pip's index, then run this again" "$own"

mkdir "$work/libtorch"
python3 - "$work" <<'PYTHON'
import pathlib, shutil, sys, zipfile

work = pathlib.Path(sys.argv[1])
wanted = {"libtorch_cpu.so", "libc10.so", "libgomp.so.1", "libcupti.so.13", "libcudart.so.13"}
for wheel in sorted((work / "wheels").glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = pathlib.PurePosixPath(info.filename)
            if info.is_dir():
                continue
            if name.parts[:2] == ("torch", "include"):
                target = work / "libtorch" / pathlib.PurePosixPath(*name.parts[1:])
            elif name.name in wanted and name.parent.name == "lib":
                target = work / "libtorch" / "lib" / name.name
                wanted.discard(name.name)
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
if wanted:
    sys.exit("the wheels hold no " + ", ".join(sorted(wanted)))
PYTHON
ln -s libtorch_cpu.so "$work/libtorch/lib/libtorch.so"
printf '2.11.0+cu130\n' >"$work/libtorch/build-version"
sync "$work/libtorch"
mv "$work/libtorch" "$home"
printf '%s\n' "$home"
