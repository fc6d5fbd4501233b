#!/usr/bin/env bash
# Cargo runs this in place of rustc for the crates of this workspace (`rustc-workspace-wrapper` in .cargo/config.toml).
# Tests are compiled with less optimisation than programs, because optimisation takes most of a crate's compile time.
# Libraries and programs, which tests also use, are compiled as the profile says. The script is not one of `sh`, which
# may remove variables with a hyphen from the environment (`CARGO_BIN_EXE_onefold-data`).
for argument; do
    [ "$argument" != --test ] || exec "$@" -C opt-level=1
done
exec "$@"
