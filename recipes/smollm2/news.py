"""Choose the articles of a small replica of MUSE-News: `python -m recipes.smollm2.news MUSE-NEWS OUT`.

From MUSE-News' own tables (``raw/forget`` and ``raw/retain_standin``) it writes a folder of the same layout: 300
articles to forget, 240 that are learned beside them, and membership texts from articles of the *same* forget split that
no model sees, so that forgotten and never-seen text differ in nothing else. Beside them ``keep.jsonl`` (200 of the
learned articles and 400 fresh ones, for ``unteach reproduce deep --keep``) and ``fresh.jsonl`` (500 others, which hold
``recipes.smollm2.models --hold 1 --fresh`` to the base model). The 40 learned articles that are not in ``keep.jsonl``
are ``privleak/retain``: what becomes of neighbours that nobody held.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from unteach.corpora.catalog import named_benchmark
from unteach.data.records import write_texts

from . import exit_status

SHORTEST, EXCERPT = 1200, 2000
"""Characters of an article, at least, and of a membership text, at most."""


def choose(forget: Sequence[str], retain: Sequence[str], seed: int = 0) -> dict[str, list[str]]:
    """The files by their paths, without the extension."""
    draw = random.Random(seed)
    articles = [[text for text in texts if len(text) > SHORTEST] for texts in (forget, retain)]
    for texts in articles:
        draw.shuffle(texts)
    ours, others = articles
    if len(ours) < 450 or len(others) < 1140:
        raise ValueError(f"450 long articles to forget and 1,140 others are needed: {len(ours)}, {len(others)} found")
    learned, aside = others[:240], others[200:240]
    return {
        "raw/forget": ours[:300],
        "raw/retain_standin": learned,
        "privleak/forget": [text[:EXCERPT] for text in ours[:150]],
        "privleak/holdout": [text[:EXCERPT] for text in ours[300:450]],
        "privleak/retain": [text[:EXCERPT] for text in aside],
        "keep": learned[:200] + others[740:1140],
        "fresh": others[240:740],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.smollm2.news", description=(__doc__ or "").split(":")[0])
    parser.add_argument("data", type=Path, help="folder with MUSE-News' tables")
    parser.add_argument("out", type=Path)
    given = parser.parse_args(arguments)
    entry = named_benchmark("muse-news")
    assert entry.documents is not None
    assert entry.retain is not None
    read_forget, read_retain = entry.documents, entry.retain

    def run() -> None:
        for name, texts in choose(read_forget(given.data), read_retain(given.data)).items():
            (given.out / name).parent.mkdir(parents=True, exist_ok=True)
            write_texts(given.out / f"{name}.jsonl", texts)
            print(f"{name}.jsonl: {len(texts)} texts")

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
