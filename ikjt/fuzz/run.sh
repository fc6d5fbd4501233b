#!/usr/bin/env bash
# Fuzzes the parsers of data from disk and from the network: `run.sh [SECONDS]` runs each target for 60 seconds by
# default. Fails if a target finds an input that panics, takes too long or takes too much memory. The input is then
# kept in the target's artifacts.
set -euo pipefail
seconds="${1:-60}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
target="${CARGO_TARGET_DIR:-$here/../../target}"
export ONEFOLD_FUZZ_DATASET="$here/../../tests/data/v6"
export CARGO_TARGET_DIR="$target/fuzz" TMPDIR="$target/fuzz/tmp" RUST_BACKTRACE=0
mkdir -p "$TMPDIR"

if ! cargo fuzz --version >/dev/null 2>&1; then
    echo "installing cargo-fuzz (once)" >&2
    cargo install --locked --quiet cargo-fuzz --version 0.13.2
fi

cd "$here"
# Without a sanitizer the stable toolchain suffices. There is no unsafe code for a sanitizer to check.
options=(--fuzz-dir "$here" --sanitizer none --release)
for name in folded snapshot folded_file packed; do
    cargo fuzz build "${options[@]}" "$name"
    corpus="$target/fuzz/corpus/$name"
    mkdir -p "$corpus" "$target/fuzz/artifacts/$name"
    case "$name" in
        snapshot) cp "$here"/../../tests/data/v*/snapshots/0*.json --target-directory "$corpus" --backup=numbered 2>/dev/null || true ;;
        folded_file) find "$ONEFOLD_FUZZ_DATASET" -name '*.parquet' -exec cp {} "$corpus/" \; ;;
    esac
    echo "fuzzing $name for $seconds seconds" >&2
    cargo fuzz run "${options[@]}" "$name" "$corpus" -- \
        -max_total_time="$seconds" -artifact_prefix="$target/fuzz/artifacts/$name/" -max_len=65536 -timeout=20 \
        -rss_limit_mb=2048 -print_final_stats=1 2>&1 | tail -n 30
done
