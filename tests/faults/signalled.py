"""``unteach`` that sends itself a signal at a moment of its own: signalled.py NUMBER EVENT NAME WORDS ...

An event is one of Python's audit events, such as ``import`` or ``os.rename``, with the name of a module or file in it:
the same moment on every machine, however busy.
"""

import os
import sys

from unteach.__main__ import start

if __name__ == "__main__":
    number, event, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.argv[1:4] = []
    came = []

    def watch(happens, arguments):
        if not came and happens == event and any(os.path.basename(str(word)) == name for word in arguments):
            came.append(number)
            os.kill(os.getpid(), number)

    sys.addaudithook(watch)
    start()
