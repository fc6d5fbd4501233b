#!/usr/bin/env bash
# Builds the wheel, installs it into a folder of the target directory, and runs its tests; arguments go to pytest.
#
#   python/test.sh [--torch] [PYTEST ARGUMENTS]
#
# With --torch the tests that need torch, torchdata or TorchRec run, and nothing else. The tests call the commands of
# ${CARGO_TARGET_DIR:-target}/release, which `make build` makes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
torch=
marker="not torch"
if [ "${1:-}" = --torch ]; then
    shift
    torch=:$("$here/../sharding/torchrec.sh")
    marker=torch
fi
packages=$("$here/environment.sh")
target=$(realpath -m "${CARGO_TARGET_DIR:-$here/../target}")
wheel=$("$here/wheel.sh" "$target/wheels")
installed=$target/python-package
rm -rf "$installed"
python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-index --target "$installed" "$wheel" 1>&2
cd "$here"
export ONEFOLD_BINARIES=$target/release ONEFOLD_WHEELS=$target/wheels PYTHONPATH=$installed:$packages$torch PYTHONDONTWRITEBYTECODE=1
# Neither the tests nor the processes that they start take modules from this folder, whose `onefold` has no compiled half.
export PYTHONSAFEPATH=1
# `append` gives tests names by which a spawned process imports them.
exec python3 -m pytest -p no:cacheprovider -m "$marker" --import-mode=append "$@"
