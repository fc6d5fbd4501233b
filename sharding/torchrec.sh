#!/usr/bin/env bash
# Prints a directory with TorchRec 1.6.1 and its dependencies, for `PYTHONPATH`. Installs them first if they are
# missing.
#
#   PYTHONPATH=$(sharding/torchrec.sh) python3 sharding/scripts/load_torchrec_plan.py torchrec.json
#
# Only tests need it: they load Onefold's plans with TorchRec's own classes. If ONEFOLD_TORCHREC is set, it is used
# instead. Otherwise the wheels of scripts/torchrec.txt (2.3 GB, 4.3 GB unpacked, mostly CUDA) are installed into
# ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The directory is created by a rename, so an interrupted run
# leaves no partial installation behind.
set -euo pipefail
cd "$(dirname "$0")"
exec ../tests/python_packages.sh ONEFOLD_TORCHREC torchrec 1.6.1 TorchRec "2.3 GB" scripts/torchrec.txt \
    "Python 3.10 to 3.13"
