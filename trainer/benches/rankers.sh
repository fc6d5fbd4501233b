#!/usr/bin/env bash
# Prints the folders of FuxiCTR 2.3.10 and RecBole 1.2.1 with all that they import, for `PYTHONPATH`; installs them
# first where they are not there yet.
#
#   PYTHONPATH=$(trainer/benches/rankers.sh) python3 trainer/benches/against_rankers.py --help
#
# They are two folders with a colon between them: the wheels of rankers.txt (0.3 GB, 1.1 GB unpacked), and torch, which
# is that of sharding/torchrec.sh and is installed only once. A folder in ONEFOLD_RANKERS takes the place of the first,
# one in ONEFOLD_TORCHREC that of the second. Otherwise both are in
# ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The first comes first because it has the older NumPy that
# RecBole needs; torch 2.11 runs with either.
set -euo pipefail
cd "$(dirname "$0")"
torch=$(../../sharding/torchrec.sh)
rankers=$(../../tests/python_packages.sh ONEFOLD_RANKERS fuxictr 2.3.10 "FuxiCTR and RecBole" "0.3 GB" rankers.txt \
    "Python 3.11 and 3.12")
printf '%s:%s\n' "$rankers" "$torch"
