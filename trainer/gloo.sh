#!/usr/bin/env bash
# Prints the folder of Gloo's headers, for `ONEFOLD_GLOO`; fetches them first where they are not there yet.
#
#   export ONEFOLD_GLOO=$(trainer/gloo.sh)
#
# libtorch contains Gloo, and PyPI's wheel has c10d's headers, but not those of Gloo that they include. Debian's
# `libgloo-dev` has them; apt downloads it without installing it. No code of these headers runs, so their version
# matters little. They are unpacked as libtorch.sh unpacks libtorch: into the cache, checked against their hash, by
# one rename.
set -euo pipefail

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $1"; shift; for hint in "$@"; do say "  hint: $hint"; done; exit 1; }

if [ -n "${ONEFOLD_GLOO:-}" ]; then
    [ -f "$ONEFOLD_GLOO/gloo/context.h" ] ||
        die "ONEFOLD_GLOO=$ONEFOLD_GLOO holds no gloo/context.h" "unset it to have the headers fetched"
    printf '%s\n' "$ONEFOLD_GLOO"
    exit 0
fi

cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
home=$cache/gloo-20220518
own="set ONEFOLD_GLOO to a folder that holds Gloo's headers as gloo/context.h (a distribution's libgloo-dev has them)"
if [ ! -d "$home" ]; then
    for tool in apt-get dpkg-deb; do
        command -v "$tool" >/dev/null || die "there is no $tool, which fetches the headers of Gloo" "$own"
    done
    mkdir -p "$cache"
    # One fetch at a time; the second finds the work done. The kernel drops the lock of a killed holder.
    exec 9>"$cache/gloo.lock"
    flock 9
fi
if [ -d "$home" ]; then
    printf '%s\n' "$home"
    exit 0
fi
rm -rf "$cache"/gloo.partial.*
work=$(mktemp -d "$cache/gloo.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT

say "fetching the headers of Gloo into $home (once; 50 kB)"
package=libgloo-dev=0.0~git20220518.5b14351-3
# Lists of our own where the system has none: refreshing the system's needs root.
fetch() { (cd "$work" && apt-get "${own_lists[@]}" --quiet --quiet download "$package" >apt.log 2>&1); }
own_lists=(-o "Dir::Cache=$work/apt-cache")
if ! fetch; then
    mkdir -p "$work/lists/partial" "$work/apt-cache/archives/partial"
    own_lists+=(-o "Dir::State::lists=$work/lists" -o APT::Sandbox::User=)
    apt-get "${own_lists[@]}" --quiet --quiet update >"$work/update.log" 2>&1 || cat "$work/update.log" >&2
    fetch || {
        cat "$work/apt.log" >&2
        die "apt could not fetch $package (its message is above)" "check the network" "$own"
    }
fi
echo "80529c9fd8af452faf489e686b94bf87075965c40673803810c4f41634b1e299  $(ls "$work"/libgloo-dev_*.deb)" |
    sha256sum --check --quiet >&2 || die "the package libgloo-dev is not the one whose hash is pinned here" "$own"
dpkg-deb -x "$work"/libgloo-dev_*.deb "$work/unpacked"
mkdir "$work/headers"
mv "$work/unpacked/usr/include/gloo" "$work/headers/gloo"
cp "$work"/unpacked/usr/share/doc/libgloo-dev/copyright "$work/headers/copyright"
sync "$work/headers"
mv "$work/headers" "$home"
printf '%s\n' "$home"
