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
exec ../tests/python_packages.sh ONEFOLD_TORCHREC torchrec 1.6.1 TorchRec "2.3 GB" scripts/torchrec.txt \
    "Python 3.10 to 3.13"
