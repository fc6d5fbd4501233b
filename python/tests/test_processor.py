"""On an older processor, importing the package fails, and the process continues."""

import subprocess
import sys

import pytest

from onefold import _onefold, _processor

# With `-I`, modules are found as in this process.
IMPORT = """
import builtins, sys
sys.path[:0] = {path!r}
opened = builtins.open
builtins.open = lambda file, *given, **named: opened({cpuinfo!r} if file == "/proc/cpuinfo" else file, *given, **named)
try:
    import onefold
except ImportError as error:
    print(type(error).__name__, error)
print("onefold._onefold" in sys.modules)
"""


@pytest.mark.parametrize("lacks", ["avx2", "fma", None])
def test_an_older_processor_is_an_import_error(tmp_path, lacks):
    flags = " ".join(sorted(_processor._NEEDED - {lacks}))
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags} sse\n\nflags\t\t: fpu\n")
    code = IMPORT.format(path=sys.path, cpuinfo=str(tmp_path / "cpuinfo"))
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if lacks is None:
        assert done.stdout == "True\n"
    else:
        assert done.stdout.startswith("ImportError Onefold is compiled for processors with AVX2")
        assert "\n  hint: " in done.stdout and done.stdout.endswith("\nFalse\n")


def test_the_compiled_half_says_why_it_refuses_a_processor():
    # A compiled module for all processors would not contain the text.
    with open(_onefold.__file__, "rb") as library:
        assert _processor._REFUSAL.search(library.read())
