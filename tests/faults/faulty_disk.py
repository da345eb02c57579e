"""A disk that fails: every operation below a folder that changes it is counted, and from the n-th on something happens.

What happens: ``killed``, nothing more is written, of a write half is; ``power``, the same, and what was not synced is
gone; ``full``, nothing more can be opened, written or synced, but renamed and removed; ``once``, one operation fails.
"""

import builtins
import contextlib
import errno
import io
import os
import shutil
from pathlib import Path
from unittest import mock

MODES = ("killed", "power", "full", "once")


class Killed(BaseException):
    """The process is gone: nothing catches it."""


class FaultyDisk:
    """Inside the block, operations below ``folder`` are counted, and fail from number ``fault`` on."""

    def __init__(self, folder, mode="killed", fault=None):
        self.folder, self.mode, self.fault = Path(folder), mode, fault
        self.operations = []
        self.unsynced_renames = []
        """Files that got their name before they were on the disk."""
        self._synced = {}
        """Files that were written since they were synced last, with their length then."""
        self._patches = contextlib.ExitStack()
        self.dead = False

    def _is_below(self, path):
        with contextlib.suppress(TypeError):
            return Path(os.path.abspath(os.fsdecode(path))).is_relative_to(self.folder)
        return False

    def _happens(self, kind, path):
        """Count an operation; whether the fault is here."""
        if self.dead:
            raise Killed
        self.operations.append((kind, Path(os.fsdecode(path)).name))
        number = len(self.operations) - 1
        if self.fault is None or number < self.fault or (self.mode == "once" and number > self.fault):
            return False
        if self.mode in ("killed", "power"):
            self.dead = True
            return True
        return self.mode == "once" or kind in ("open", "write", "sync", "mkdir")

    def _fail(self):
        if self.dead:
            raise Killed
        raise OSError(errno.EIO if self.mode == "once" else errno.ENOSPC, "the disk fails")

    def _wrapped(self, kind, function, which=0):
        def call(*arguments, **named):
            if self._is_below(arguments[which]) and self._happens(kind, arguments[which]):
                self._fail()
            if kind == "rename" and str(Path(os.path.abspath(arguments[0]))) in self._synced:
                self.unsynced_renames.append(Path(arguments[0]).name)
            return function(*arguments, **named)

        return call

    def _open(self, function):
        def call(file, mode="r", *arguments, **named):
            if set(mode) <= set("rbt") or not self._is_below(file):
                return function(file, mode, *arguments, **named)
            if self._happens("open", file):
                self._fail()
            path = os.path.abspath(os.fsdecode(file))
            if "+" not in mode:
                kept = os.path.getsize(path) if "a" in mode and os.path.exists(path) else 0
                self._synced.setdefault(path, kept)
            return _File(function(file, mode, *arguments, **named), path, self)

        return call

    def _sync(self, function):
        def call(descriptor):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self._is_below(path):
                if self._happens("sync", path):
                    self._fail()
                self._synced.pop(path, None)
            return function(descriptor)

        return call

    def __enter__(self):
        replaced = {
            (builtins, "open"): self._open(builtins.open),
            (io, "open"): self._open(io.open),
            (os, "fsync"): self._sync(os.fsync),
            (os, "replace"): self._wrapped("rename", os.replace, 1),
            (os, "rename"): self._wrapped("rename", os.rename, 1),
            (os, "mkdir"): self._wrapped("mkdir", os.mkdir),
            (os, "unlink"): self._wrapped("unlink", os.unlink),
            (shutil, "rmtree"): self._wrapped("rmtree", shutil.rmtree),
        }
        import unteach.models.save as saving

        replaced[saving, "save_file"] = self._wrapped("write", saving.save_file, 1)
        for (owner, name), function in replaced.items():
            self._patches.enter_context(mock.patch.object(owner, name, function))
        return self

    def __exit__(self, *error):
        self._patches.close()
        if self.mode == "power" and self.dead:
            for path, length in self._synced.items():
                if os.path.exists(path):
                    os.truncate(path, min(length, os.path.getsize(path)))


class _File:
    """An open file whose writes are counted."""

    def __init__(self, file, path, disk):
        self._file, self._path, self._disk = file, path, disk

    def write(self, content):
        if self._disk._happens("write", self._path):
            with contextlib.suppress(ValueError):
                self._file.write(content[: len(content) // 2])
                self._file.flush()
            self._disk._fail()
        return self._file.write(content)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def __iter__(self):
        return iter(self._file)

    def __getattr__(self, name):
        return getattr(self._file, name)
