"""Where the console scripts of the installed package are."""

import sys
from pathlib import Path

import onefold

PACKAGE = Path(onefold.__file__).parent


def script(name):
    """The console script of the installed package: beside the packages, or where the environment has them."""
    places = [PACKAGE.parent / "bin", Path(sys.executable).parent]
    found = [place / name for place in places if (place / name).is_file()]
    assert found, f"there is no {name} in {places}"
    return found[0]
