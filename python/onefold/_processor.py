"""Checks that the processor has the instructions for which the compiled module is built.

The compiled module checks this too, but it ends the process, because it cannot raise an exception while it is loaded.
So this module is imported first.
"""

import mmap
import re
from pathlib import Path

# The instructions of x86-64-v3, by the kernel's names.
_NEEDED = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}

# The error message in the compiled module. A module that was built for all x86-64 processors does not contain it.
_REFUSAL = re.compile(rb"error: (Onefold is compiled for processors[^\0]+?\n  hint: [^\0]+?)\n")


def check(cpuinfo: str = "/proc/cpuinfo") -> None:
    """Raises an ImportError if the processor lacks instructions."""
    try:
        with open(cpuinfo, encoding="utf-8") as lines:
            flags = next(line for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        return
    if set(flags.split()) >= _NEEDED:
        return
    for library in Path(__file__).parent.glob("_onefold*.so"):
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            refusal = _REFUSAL.search(content)
            if refusal is not None:
                raise ImportError(refusal[1].decode())
