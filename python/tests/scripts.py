"""The location of the installed package's console scripts."""

import sys
from pathlib import Path

import onefold

PACKAGE = Path(onefold.__file__).parent


def script(name):
    """Returns the path of a console script: next to the packages, or in the environment's directory of scripts."""
    places = [PACKAGE.parent / "bin", Path(sys.executable).parent]
    found = [place / name for place in places if (place / name).is_file()]
    assert found, f"there is no {name} in {places}"
    return found[0]
