"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file through another beside it: who reads sees the old content or the new, whenever a process dies.

    Args:
        path: The file; its folder is made.
        content: Text is written as UTF-8.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)
