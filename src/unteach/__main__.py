"""``python -m unteach``, and what the command ``unteach`` calls."""

import os
import signal
import sys
from types import FrameType

__all__ = ["start"]


def start() -> None:
    """Run the command line and end the process; a signal that comes while modules are imported ends it, too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from unteach.cli import INTERRUPTED, main

    status = main()
    if status == INTERRUPTED or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Python would end by the signal, not with the status; threads of a process group that is gone may abort an exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"unteach: interrupted\n")
    os._exit(130)


if __name__ == "__main__":  # worker processes import this module, too
    start()
