#!/usr/bin/env bash
# Prints a directory with a Python package and its dependencies, for `PYTHONPATH`. Installs them first if they are
# missing.
#
#   tests/python_packages.sh VARIABLE PACKAGE VERSION NAME SIZE REQUIREMENTS [PYTHONS]
#
# The scripts that install packages for tests call it. If the environment variable VARIABLE is set, it must name a
# directory that contains PACKAGE, and that directory is used instead. Otherwise the wheels in the file REQUIREMENTS
# are installed into ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The directory is created by a rename, so
# an interrupted run leaves no partial installation behind. NAME, SIZE and PYTHONS (the Python versions for which
# wheels exist) are for messages.
set -euo pipefail
variable=$1 package=$2 release=$3 name=$4 size=$5 requirements=$6 pythons=${7:-}

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for hint in "$@"; do say "  hint: $hint"; done; exit 1; }

given=${!variable:-}
if [ -n "$given" ]; then
    [ -d "$given/$package" ] || die "$variable=$given holds no $package" "unset it to have $name installed"
    printf '%s\n' "$given"
    exit 0
fi

command -v python3 >/dev/null || die "python3 is not on the PATH" "install python3 with pip"
python3 -m pip --version >/dev/null 2>&1 ||
    die "python3 has no pip, which installs $name" "install it (Debian: apt-get install python3-pip)"
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
# Different requirements are installed into a different directory.
digest=$(sha256sum "$requirements" | cut -c 1-8)
home=$cache/$package-$release-$digest-python$version
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi

mkdir -p "$cache"
# Only one installation runs at a time; a second one finds the result of the first. The kernel releases the lock when
# its holder is killed.
exec 9>"$cache/$package.lock"
flock 9
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi
rm -rf "$cache/$package".partial.*
work=$(mktemp -d "$cache/$package.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT
say "installing $name into $home (once; about $size)"
# pip unpacks into TMPDIR first. It is on the same file system, so that pip's last step is a rename.
TMPDIR=$work python3 -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-deps \
    --no-warn-conflicts --target "$work/packages" --requirement "$requirements" 1>&2 ||
    die "pip could not install $name (its message is above)" \
        "check the network and pip's index, then run this again${pythons:+; $pythons have wheels}"
mv "$work/packages" "$home"
printf '%s\n' "$home"
