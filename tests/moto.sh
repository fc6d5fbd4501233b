#!/usr/bin/env bash
# Prints a folder with moto 5.2.5 and all that its S3 server imports, for `PYTHONPATH`; installs it first where it is not
# there yet.
#
# A test calls it, to try an S3 server that other people wrote. A ONEFOLD_MOTO that is already set wins. Otherwise the
# wheels of moto.txt (30 MB) go into ${ONEFOLD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/onefold}. The folder appears by one
# rename, so an interrupted run leaves nothing that a later one would trust.
set -euo pipefail
cd "$(dirname "$0")"
exec ./python_packages.sh ONEFOLD_MOTO moto 5.2.5 moto "30 MB" moto.txt
