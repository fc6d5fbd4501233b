#!/usr/bin/env bash
# Prints a folder with TorchRec 1.6.1 and all that it imports, for `PYTHONPATH`; installs it first where it is not there yet.
#
#   PYTHONPATH=$(sharding/torchrec.sh) python3 sharding/scripts/load_torchrec_plan.py torchrec.json
#
# Tests alone need it: they load our plans with TorchRec's own classes. A ONEFOLD_TORCHREC that is already set wins.
# Otherwise the wheels of scripts/torchrec.txt (2.3 GB, 4.3 GB unpacked, of which most are CUDA's) go into
# ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The folder appears by one rename, so an interrupted run
# leaves nothing that a later one would trust.
set -euo pipefail
cd "$(dirname "$0")"

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for hint in "$@"; do say "  hint: $hint"; done; exit 1; }

if [ -n "${ONEFOLD_TORCHREC:-}" ]; then
    [ -d "$ONEFOLD_TORCHREC/torchrec" ] ||
        die "ONEFOLD_TORCHREC=$ONEFOLD_TORCHREC holds no torchrec" "unset it to have TorchRec installed"
    printf '%s\n' "$ONEFOLD_TORCHREC"
    exit 0
fi

command -v python3 >/dev/null || die "python3 is not on the PATH" "install python3 with pip"
python3 -m pip --version >/dev/null 2>&1 ||
    die "python3 has no pip, which installs TorchRec" "install it (Debian: apt-get install python3-pip)"
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
home=$cache/torchrec-1.6.1-python$version
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi

mkdir -p "$cache"
# One installation at a time; the second finds the work done. The kernel drops the lock of a killed holder.
exec 9>"$cache/torchrec.lock"
flock 9
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi
rm -rf "$cache"/torchrec.partial.*
work=$(mktemp -d "$cache/torchrec.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT
say "installing TorchRec 1.6.1 into $home (once; about 2.3 GB)"
# pip unpacks into TMPDIR first: into the same file system, so that its last step is a rename.
TMPDIR=$work python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
    --no-warn-conflicts --target "$work/packages" --requirement scripts/torchrec.txt 1>&2 ||
    die "pip could not install TorchRec (its message is above)" \
        "check the network and pip's index, then run this again; Python 3.10 to 3.13 have wheels"
mv "$work/packages" "$home"
printf '%s\n' "$home"
