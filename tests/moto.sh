#!/usr/bin/env bash
# Prints a directory with moto 5.2.5 and the dependencies of its S3 server, for `PYTHONPATH`. Installs them first if
# they are missing.
#
# A test uses it to run against an S3 server that is not part of this project. If ONEFOLD_MOTO is set, it is used
# instead. Otherwise the wheels of moto.txt (30 MB) are installed into
# ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The directory is created by a rename, so an interrupted run
# leaves no partial installation behind.
set -euo pipefail
cd "$(dirname "$0")"
exec ./python_packages.sh ONEFOLD_MOTO moto 5.2.5 moto "30 MB" moto.txt
