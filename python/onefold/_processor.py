"""Refuses a processor that is older than those for which the compiled half is made.

The compiled half refuses it too, and ends the process, because it cannot raise an exception while it is loaded. So this
module is imported before.
"""

import mmap
import re
from pathlib import Path

# x86-64-v3, as the kernel names its instructions.
_NEEDED = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}

# The text with which the compiled half refuses: one that was compiled for all processors does not have it.
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
