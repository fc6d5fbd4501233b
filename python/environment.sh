#!/usr/bin/env bash
# Prints a directory with the packages that `python/` needs, for `PYTHONPATH`. Installs them first if they are
# missing.
#
#   PYTHONPATH=$(python/environment.sh) python3 -m pytest python/tests
#
# The package's tests and `make wheel` need them. If ONEFOLD_PYTHON is set, it is used instead. Otherwise the wheels
# of requirements.txt (230 MB) are installed into ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The directory
# is created by a rename, so an interrupted run leaves no partial installation behind.
set -euo pipefail
cd "$(dirname "$0")"
exec ../tests/python_packages.sh ONEFOLD_PYTHON pytest 9.2.0 "the packages of Python's tests" "230 MB" requirements.txt \
    "Python 3.11 to 3.14"
