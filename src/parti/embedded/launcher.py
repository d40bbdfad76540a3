"""Run as a script: ask the kernel to end this process with its parent, then become the given command.

Arguments: the parent's process id, then the command. A script instead of `preexec_fn`, because code between fork and
exec can deadlock when the parent has threads. The request survives exec, the process id too.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and replace it by the command; exits when the parent is already gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A parent that died before the request was made sends no signal any more.
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent process is gone")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
