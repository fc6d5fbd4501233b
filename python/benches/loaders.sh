#!/usr/bin/env bash
# Runs loaders.py with the loaders that it compares, which are installed first if they are missing.
#
#   python/benches/loaders.sh --work DIR DATASET…
#
# The package `onefold` is that of `python/test.sh`, in ${CARGO_TARGET_DIR:-target}/python-package. If ONEFOLD_LOADERS
# is set, it is the folder of the other packages. Otherwise the wheels of loaders.txt (3.5 GB unpacked) are installed into
# ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}, beside TorchRec's, which contain torch.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
packages=$("$here/../environment.sh")
torch=$("$here/../../sharding/torchrec.sh")
loaders=$(cd "$here" && ../../tests/python_packages.sh ONEFOLD_LOADERS streaming 0.14.2 "the other loaders" "3.5 GB unpacked" \
    loaders.txt "Python 3.11 to 3.13")
installed=$(realpath -m "${CARGO_TARGET_DIR:-$here/../../target}")/python-package
export PYTHONPATH=$installed:$packages:$torch:$loaders PYTHONDONTWRITEBYTECODE=1
exec python3 "$here/loaders.py" "$@"
