"""``python -m unteach``."""

import sys

from unteach.cli import main

sys.exit(main())
