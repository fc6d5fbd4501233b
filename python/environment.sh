#!/usr/bin/env bash
# Prints a folder with what `python/` needs, for `PYTHONPATH`; installs it first where it is not there yet.
#
#   PYTHONPATH=$(python/environment.sh) python3 -m pytest python/tests
#
# The package's tests and `make wheel` need it. A ONEFOLD_PYTHON that is already set wins. Otherwise the wheels of
# requirements.txt (190 MB) go into ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The folder appears by one
# rename, so an interrupted run leaves nothing that a later one would trust.
set -euo pipefail
cd "$(dirname "$0")"
exec ../tests/python_packages.sh ONEFOLD_PYTHON pytest 9.2.0 "the packages of Python's tests" "190 MB" requirements.txt \
    "Python 3.11 to 3.14"
