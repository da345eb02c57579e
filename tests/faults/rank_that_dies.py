"""``unteach`` as one of several ranks, of which one is killed in a step: rank_that_dies.py RANK STEP WORDS ..."""

import os
import signal
import sys

from unteach.__main__ import start
from unteach.training import loop

if __name__ == "__main__":
    doomed, last = int(sys.argv[1]), int(sys.argv[2])
    sys.argv[1:3] = []
    train_step, steps = loop.train_step, []

    def train_step_or_die(*arguments, **named):
        steps.append(1)
        if int(os.environ["RANK"]) == doomed and len(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(*arguments, **named)

    loop.train_step = train_step_or_die
    start()
