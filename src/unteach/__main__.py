"""``python -m unteach``."""

import os
import sys

from unteach.cli import main

if __name__ == "__main__":  # worker processes import this module, too
    status = main()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # threads of a process group that is gone may abort an ordinary exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
