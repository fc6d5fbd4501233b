#!/usr/bin/env bash
# Runs mdBook 0.5.4, which renders the manual; installs it first where it is not there yet.
#
#   docs/mdbook.sh build docs --dest-dir "$PWD/target/book"
#
# Cargo compiles it into ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}, without its server. The
# folder appears by one rename, so an interrupted installation leaves nothing that a later one would trust.
set -euo pipefail
version=0.5.4
cache=${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/onefold}
home=$cache/mdbook-$version

if [ ! -x "$home/bin/mdbook" ]; then
    mkdir -p "$cache"
    # One installation at a time; the second finds the work done. The kernel drops the lock of a killed holder.
    exec 9>"$cache/mdbook.lock"
    flock 9
    if [ ! -x "$home/bin/mdbook" ]; then
        rm -rf "$cache"/mdbook.partial.*
        work=$(mktemp -d "$cache/mdbook.partial.XXXXXX")
        trap 'rm -rf "$work"' EXIT
        echo "installing mdBook $version into $home (once)" >&2
        # From another folder, so that the flags of this repository's .cargo/config.toml do not count.
        (cd "$work" && CARGO_TARGET_DIR=$work/target "${CARGO:-cargo}" install --locked --quiet --root "$work/root" \
            --no-default-features --features search --version "$version" mdbook 9>&-) ||
            { echo "error: mdBook could not be installed (Cargo's message is above)" >&2; exit 1; }
        mv "$work/root" "$home"
        rm -rf "$work"
        trap - EXIT
    fi
    exec 9>&-
fi
exec "$home/bin/mdbook" "$@"
