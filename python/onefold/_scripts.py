"""The console scripts: the programs themselves, with their arguments, exit statuses and signals."""

import signal
import sys

from . import _onefold


def _main(program):
    # Ctrl-C ends the process at once, as it ends the binary. A program that is killed leaves nothing half-written.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_onefold.run_program(program, [program, *sys.argv[1:]]))


def data():
    """`onefold-data`."""
    _main("onefold-data")


def ingest():
    """`onefold-ingest`."""
    _main("onefold-ingest")


def read():
    """`onefold-read`."""
    _main("onefold-read")


def shard():
    """`onefold-shard`."""
    _main("onefold-shard")
