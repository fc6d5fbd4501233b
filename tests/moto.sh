#!/usr/bin/env bash
# Prints a folder with moto 5.2.5 and all that its S3 server imports, for `PYTHONPATH`; installs it first where it is not
# there yet.
#
# A test calls it, to try an S3 server that other people wrote. A ONEFOLD_MOTO that is already set wins. Otherwise the
# wheels of moto.txt (30 MB) go into ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The folder appears by one
# rename, so an interrupted run leaves nothing that a later one would trust.
set -euo pipefail
cd "$(dirname "$0")"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for hint in "$@"; do say "  hint: $hint"; done; exit 1; }

if [ -n "${ONEFOLD_MOTO:-}" ]; then
    [ -d "$ONEFOLD_MOTO/moto" ] ||
        die "ONEFOLD_MOTO=$ONEFOLD_MOTO holds no moto" "unset it to have moto installed"
    printf '%s\n' "$ONEFOLD_MOTO"
    exit 0
fi

command -v python3 >/dev/null || die "python3 is not on the PATH" "install python3 with pip"
python3 -m pip --version >/dev/null 2>&1 ||
    die "python3 has no pip, which installs moto" "install it (Debian: apt-get install python3-pip)"
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
home=$cache/moto-5.2.5-python$version
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi

mkdir -p "$cache"
# One installation at a time; the second finds the work done. The kernel drops the lock of a killed holder.
exec 9>"$cache/moto.lock"
flock 9
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi
rm -rf "$cache"/moto.partial.*
work=$(mktemp -d "$cache/moto.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT
say "installing moto 5.2.5 into $home (once; about 30 MB)"
# pip unpacks into TMPDIR first: into the same file system, so that its last step is a rename.
TMPDIR=$work python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
    --no-warn-conflicts --target "$work/packages" --requirement moto.txt 1>&2 ||
    die "pip could not install moto (its message is above)" "check the network and pip's index, then run this again"
mv "$work/packages" "$home"
printf '%s\n' "$home"
