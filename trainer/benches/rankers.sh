#!/usr/bin/env bash
# Prints the folders of FuxiCTR 2.3.10 and RecBole 1.2.1 with all their dependencies, for `PYTHONPATH`; installs them first
# if they do not exist.
#
#   PYTHONPATH=$(trainer/benches/rankers.sh) python3 trainer/benches/against_rankers.py --help
#
# The output is two folders with a colon between them: the wheels of rankers.txt (0.3 GB, 1.1 GB unpacked), and torch, which
# sharding/torchrec.sh also uses and which is installed only once. ONEFOLD_RANKERS may name another first folder,
# ONEFOLD_TORCHREC another second one. By default, both are in
# ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The order matters, because the first folder has the older NumPy that
# RecBole needs; torch 2.11 runs with both.
set -euo pipefail
cd "$(dirname "$0")"
torch=$(../../sharding/torchrec.sh)
rankers=$(../../tests/python_packages.sh ONEFOLD_RANKERS fuxictr 2.3.10 "FuxiCTR and RecBole" "0.3 GB" rankers.txt \
    "Python 3.11 and 3.12")
printf '%s:%s\n' "$rankers" "$torch"
