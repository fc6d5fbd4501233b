"""Runs a program, and ends when it ends. When the parent of this process ends, the program gets a SIGTERM.

`_trainer` runs this script: PARENT LIBRARIES PROGRAM ARGUMENT…. The script is a separate process with one thread,
because the kernel may signal the end of a process with several threads more than once, and a second SIGTERM ends the
program at once, without a checkpoint.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the program."""
    parent, libraries, program, *arguments = sys.argv[1:]
    own, told = os.getpid(), False
    child = os.fork()
    if child == 0:
        end_with(own, signal.SIGKILL)
        os.execve(program, [os.path.basename(program), *arguments], {**os.environ, "LD_LIBRARY_PATH": libraries})

    def tell(*_: object) -> None:
        nonlocal told
        if not told:
            told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, tell)
    end_with(int(parent), signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        # Ends in the same way as the program.
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(own, -code)
    sys.exit(code)


def end_with(parent: int, by: signal.Signals) -> None:
    """Makes the kernel send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    # The parent may have ended already.
    if os.getppid() != parent:
        os.kill(os.getpid(), by)


if __name__ == "__main__":
    main()
