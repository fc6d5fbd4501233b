"""Prints which libtorch the program `onefold-train` uses."""

import sys

from . import HINT, libtorch

try:
    found = libtorch()
except RuntimeError as error:
    sys.exit(f"error: {error}\n  hint: {HINT}")
print(f"libtorch {found.version} of {found.package}, in {found.libraries}")
