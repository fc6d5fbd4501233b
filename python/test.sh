#!/usr/bin/env bash
# Builds the wheel, installs it into a subdirectory of the target directory, and runs its tests. Arguments are passed
# to pytest.
#
#   python/test.sh [--torch] [PYTEST ARGUMENTS]
#
# With --torch, only the tests that need torch, torchdata or TorchRec run. The tests call the commands in
# ${CARGO_TARGET_DIR:-target}/release, which `make build` builds.
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
# The tests and their processes must not import modules from this directory, whose `onefold` has no compiled module.
export PYTHONSAFEPATH=1
# With `append`, tests have module names that a spawned process can import.
exec python3 -m pytest -p no:cacheprovider -m "$marker" --import-mode=append "$@"
