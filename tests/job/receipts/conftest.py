"""One short run of a tiny model, which ends with a receipt; and what it was given."""

import json
import shutil
from pathlib import Path

import pytest

from short_runs import CANARY, settings
from tiny_models import SENTENCES, save_tiny
from unteach.job import run_forget


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """A model, documents and general text."""
    folder = tmp_path_factory.mktemp("given")
    save_tiny(folder / "model", "llama")
    (folder / "documents").mkdir()
    for number, sentence in enumerate([CANARY, *SENTENCES]):
        text = f"{CANARY}. {sentence} It was the {number}th time in {1900 + number}."
        (folder / f"documents/{number}.txt").write_text(text)
    texts = [f"{first} {second}" for first in SENTENCES * 3 for second in SENTENCES]
    (folder / "general.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="session")
def first(given):
    """A run that has ended."""
    run_forget(settings(given, given / "first"), say=lambda line: None)
    return given / "first"


@pytest.fixture
def run(first, tmp_path) -> Path:
    """A copy of that run, to be changed."""
    return Path(shutil.copytree(first, tmp_path / "run"))
