"""``unteach purge RUN``: remove from a run folder all that holds text of the documents, or could give it back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.data import Documents, read_documents
from unteach.data.documents import split_words
from unteach.errors import InputError
from unteach.evaluation.scores import write_json
from unteach.job.ending import write_page
from unteach.job.inputs import PIPED
from unteach.job.receipts.chain import LEDGER
from unteach.job.receipts.privacy import SALT, hidden_inputs, secret_of, without_text
from unteach.job.receipts.receipt import RECEIPT, renew
from unteach.job.same_run import START, StartRecord
from unteach.settings import read_settings

__all__ = ["PurgeOptions", "run", "show"]

PASSAGE = 8
"""Words in a row that count as an excerpt."""
TOKENS = (".safetensors",)
"""Files that hold no text."""
ITEMS = ("items", "records", "samples", "examples", "outputs", "prompts")
"""Under these names an audit's file may hold texts."""
MEANING = {
    SALT: "the secret of the receipt's salts; keep it with the documents, apart from the receipt: with both, a short"
    " record could be guessed",
    RECEIPT: "hashes and numbers",
    LEDGER: "the requests before this one, in numbers",
    "model": "the unlearned model, its card and receipt",
    "config.yaml": "settings; it names paths",
    "result.json": "scores and verdict",
    START: "what the run was given, in hashes",
    "metrics.jsonl": "numbers of every step",
    "run.log": "what the terminal showed; it may name files",
    "evaluations": "scores; nothing of single items",
    "audits": "scores of the attacks",
    "report": "the page, its tables and figures",
}
"""What is left, in words."""


@dataclass(frozen=True, kw_only=True)
class PurgeOptions:
    """What ``unteach purge`` takes."""

    run: str = ""
    """The folder of a run that has ended."""
    documents: str | None = None
    """The documents, to look for passages of them in what is left. None: those that the run's settings name, where they
    can be read."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: PurgeOptions) -> dict[str, Any]:
    """Remove and clean; ``removed``, ``cleaned``, ``left``, and ``found``: files in which a passage stands still."""
    folder = Path(options.run)
    if not options.run or not (folder / "config.yaml").is_file():
        raise InputError(f"run is {options.run!r}: not a run folder (it has no config.yaml)")
    if not (folder / "result.json").is_file():
        raise InputError(f"run is {options.run!r}: it has not ended, and could not go on: unteach finish it first")
    settings = read_settings(folder / "config.yaml")
    documents = _documents(options.documents, settings)
    cleaned = _cleaned(folder)
    removed = _removed(folder)
    cleaned += _page(folder)
    if (folder / RECEIPT).is_file() and (folder / "audits").is_dir() and renew(folder).content:
        cleaned += [RECEIPT] if any(name.startswith("audits/") for name in cleaned) else []
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    found = [] if documents is None else [str(file.relative_to(folder)) for file in _with_passages(files, documents)]
    left = {entry.name: _meaning(entry.name) for entry in sorted(folder.iterdir())}
    looked = 0 if documents is None else len(documents)
    content = {"removed": removed, "cleaned": cleaned, "left": left, "looked_for": looked, "found": found}
    return {"run": str(folder), **content, "status": int(bool(found))}


def show(result: dict[str, Any]) -> None:
    """Print what was done, and what is left."""
    for what in ("removed", "cleaned"):
        print(f"{what}: {', '.join(result[what]) or 'nothing'}")
    print("left:\n" + "\n".join(f"  {name:18} {meaning}" for name, meaning in result["left"].items()))
    if result["found"]:
        print(f"✗ passages of the documents stand still in: {', '.join(result['found'])}")
    elif result["looked_for"]:
        print(f"✓ no passage of {PASSAGE} words of the {result['looked_for']:,} documents stands in what is left")
    else:
        print("– what is left was not searched: the documents are not here (--documents DIR)")
    print("Not looked at: the model before the run, the documents themselves, copies and caches elsewhere, backups.")


def _documents(given: str | None, settings: dict[str, Any]) -> Documents | None:
    """The documents, as far as they can be read without asking anybody."""
    source = given or settings.get("documents") or "-"
    if given is None and not (source.startswith("micro:") or Path(source).expanduser().exists()):
        return None
    return read_documents(source, text_field=settings.get("text_field", "text"), skip_unreadable=True)


def _cleaned(folder: Path) -> list[str]:
    """Take the texts out of scores and audits, and hashes by which they could be guessed out of all else."""
    done = []
    for file in [*sorted((folder / "evaluations").glob("*.json")), *sorted((folder / "audits").glob("*.json"))]:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            continue
        if file.parent.name == "audits":
            new = hidden_inputs(
                {name: value for name, value in content.items() if name not in ITEMS}, secret_of(folder)
            )
        else:
            emptied = content | {"items": {}} if "items" in content else content
            new = without_text(emptied, secret_of(folder))
        if new != content:
            write_json(file, new)
            done.append(str(file.relative_to(folder)))
    try:
        start = StartRecord.read(folder)
    except ValueError:  # damaged
        (folder / START).unlink()
        return [*done, f"{START} (removed)"]
    if start is not None and (hidden := start.in_private(secret_of(folder))) != start:
        hidden.write(folder)
        done.append(START)
    return done


def _removed(folder: Path) -> list[str]:
    """Remove checkpoints (early weights recite the documents), piped documents, and what was half written."""
    half = [*folder.rglob("*.part"), *folder.glob(".model.*")]
    audits = [entry for entry in (folder / "audits").glob("*") if entry.suffix != ".json"]
    done = []
    for entry in [folder / "checkpoints", folder / PIPED, *half, *audits]:
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.exists():
            entry.unlink()
        else:
            continue
        done.append(str(entry.relative_to(folder)))
    return done


def _page(folder: Path) -> list[str]:
    """Write the page again from what is left, or remove it where nothing here can write it."""
    pages = [folder / f"report{ending}" for ending in (".html", ".md")]
    there = [page for page in pages if page.exists()]
    if not there:
        return []
    if write_page(folder):
        return [page.name for page in there]
    for page in there:
        page.unlink()
    return [f"{page.name} (removed)" for page in there]


def _passages(text: str) -> set[int]:
    words = split_words(text, "unicode")
    return {hash(tuple(words[start : start + PASSAGE])) for start in range(len(words) - PASSAGE + 1)}


def _with_passages(files: Iterable[Path], documents: Documents) -> list[Path]:
    """The files in which a passage of the documents stands."""
    wanted = set[int]().union(*map(_passages, documents.texts))
    found = []
    for file in files:
        if file.suffix not in TOKENS:
            text = file.read_bytes().decode(errors="replace").replace("\\n", " ").replace('\\"', '"')
            if wanted & _passages(text):
                found.append(file)
    return found


def _meaning(name: str) -> str:
    known = next((says for key, says in MEANING.items() if name.startswith(key)), "")
    return known or (
        "the page and its tables" if name.startswith("report") else "not looked into: numbers, or your own"
    )
