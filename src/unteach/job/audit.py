"""`unteach audit RUN`: what the command takes and does."""

from __future__ import annotations

import functools
import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unteach.audits import attacks
from unteach.audits.running import CONTROLS, SUMMARY, Audit, line_of
from unteach.audits.texts import Asked, embedded, own
from unteach.config import ForgetConfig
from unteach.corpora.own import question_problems, read_questions
from unteach.data import EMBEDDED_GENERAL, Documents, read_documents
from unteach.errors import InputError, template_problems
from unteach.evaluation.command import hash_weights
from unteach.job.card import with_audits
from unteach.job.ending import write_page
from unteach.job.receipts.privacy import TEXTS, hidden_hash, secret_of
from unteach.job.receipts.receipt import RECEIPT, renew
from unteach.job.receipts.signature import signature_of
from unteach.method.tensors import resolved_device
from unteach.models import find_folder, load_model, load_tokenizer, read_context_length
from unteach.models.threads import choose_threads
from unteach.settings import from_yaml, nearest_name
from unteach.writing import write_whole

__all__ = ["AUDITS", "AuditOptions", "prepared_audit", "run"]

AUDITS = "audits"
"""Folder in a run folder."""
UNRELATED_BYTES = 300_000
GIVEN = (
    "before", "reference", "base", "documents", "holdout", "questions", "question_template", "text_field", "max_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Attack a model that has forgotten, and compare with models that never knew.

    Examples:
        unteach audit run/ --quick
        unteach audit forgotten/ --before target/ --reference retrained/ --documents forget/ --out audits/
    """

    subject: str
    """A run folder, which knows everything else; or a model folder or Hugging Face id."""
    before: str | None = None
    """The model before it forgot."""
    reference: str | None = None
    """A model retrained without the documents: the best control."""
    base: str | None = None
    """A model with the same tokenizer that never saw the documents: the control where there is no reference."""
    documents: str | None = None
    """What was to be forgotten."""
    holdout: str | None = None
    """Documents of the same kind that no model here has seen: for membership, and the control without a model."""
    questions: str | None = None
    """A file of questions and answers about the documents."""
    question_template: str | None = None
    r"""How a question is put, such as "Question: {question}\nAnswer:". None: as in `unteach forget`."""
    general: str | None = None
    """Unrelated text to learn. None: the embedded public-domain text."""
    text_field: str | None = None
    """Field that holds the text in tables. None: text."""
    max_tokens: int | None = None
    """Tokens after which documents were cut when they were learned. None: as the run did, else 1,024 at most."""
    attacks: tuple[str, ...] = ()
    """Only these: relearning, quantisation, sampling, other_words, membership, inside."""
    quick: bool = False
    """Fewer items, samples and steps: minutes on two cores for a small model."""
    fresh: bool = False
    """Make attacks again whose files are there."""
    seed: int = 0
    """Of every draw."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU where there is one."""
    batch_size: int = 128
    """Most prompts decoded together."""
    out: Path | None = None
    """Folder to write to. None: RUN/audits."""
    json: bool = False
    """Print the result as one JSON object and nothing else."""


def run(options: AuditOptions) -> dict[str, Any]:
    """Make all attacks that are not made yet; returns the content of `summary.json`, and `out`.

    A run folder's report is written again, with the audits in it, and so is its model's card.

    Raises:
        InputError: with every problem of the options found.
    """
    run_folder = (Path(options.subject) / "config.yaml").exists()
    out = options.out or (Path(options.subject) / AUDITS if run_folder else None)
    if out is None:
        what = f"{options.subject!r} is no run folder (it has no config.yaml)"
        raise InputError(f"out is missing: {what}; of a model, name the folder for the audits, --out audits/")
    if resolved_device(options.device).type == "cpu":
        choose_threads(None)
    audit = prepared_audit(options)
    try:
        found = audit.run(out, options.attacks, fresh=options.fresh)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"subject is {options.subject!r}: {error}") from error
    summary = audit.summary(out) | {"out": str(out)}
    if run_folder and options.out is None:
        _show_in_run(Path(options.subject), list(found.values()))
    return summary


def _given(options: AuditOptions) -> dict[str, Any]:
    """What is audited with what: flags, else what a run folder knows."""
    given: dict[str, Any] = {name: getattr(options, name) for name in GIVEN}
    given |= {"after": options.subject, "first_chunk": False}
    folder = Path(options.subject)
    if not (folder / "config.yaml").exists():
        return given
    config = from_yaml(ForgetConfig, folder / "config.yaml", out=options.subject)
    if not (folder / "model").is_dir():
        raise InputError(f"subject is {options.subject!r}: this run has no model yet; finish it: unteach finish RUN")
    known = {name: getattr(config, name) for name in GIVEN if name != "before"} | {"before": config.model}
    given = {name: known.get(name) if value is None else value for name, value in given.items()}
    given |= {"after": str(folder / "model"), "first_chunk": config.document_mode == "truncate"}
    return given | {"private": config.private}


def _check(options: AuditOptions, given: dict[str, Any]) -> None:
    problems = []
    for name, what in (("before", "the model before it forgot"), ("documents", "what was to be forgotten")):
        if not given[name]:
            problems.append(f"{name} is missing: name {what}, or give a run folder, which knows it")
    for name in options.attacks:
        if name not in attacks():
            allowed = f"{', '.join(attacks())}{nearest_name(name, attacks())}"
            problems.append(f"attacks is {name!r}: it must be one of {allowed}")
    file = given["questions"]
    problems += question_problems("questions", file and Path(file))
    problems += template_problems(options.question_template, file)
    for name, least in {"seed": 0, "batch_size": 1, "max_tokens": 8}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            problems.append(f"{name} is {value}: it must be at least {least}")
    if problems:
        raise InputError(problems)


def prepared_audit(options: AuditOptions) -> Audit:
    """Check the options, read the texts, and say how the models are loaded; `run` says what it refuses."""
    given, device = _given(options), resolved_device(options.device)
    _check(options, given)
    tokenizer = load_tokenizer(given["after"])
    how: dict[str, Any] = {"text_field": given["text_field"] or "text"}
    own_texts = given["documents"] == "micro:forget" and str(given["before"]).startswith("micro:")
    inputs = {"documents": read_documents(given["documents"], option="documents", **how)}
    if own_texts and not given["holdout"]:
        given = given | {"holdout": "micro:holdout"}
    if given["holdout"]:
        inputs["holdout"] = read_documents(given["holdout"], option="holdout", **how)
    texts = {name: documents.in_form_of(tokenizer) for name, documents in inputs.items()}
    unrelated = read_documents(options.general or EMBEDDED_GENERAL, max_bytes=UNRELATED_BYTES, option="general")
    roles = {role: given[role] for role in ("after", "before", *CONTROLS) if given.get(role)}
    folders = {role: find_folder(name, "subject" if role == "after" else role) for role, name in roles.items()}
    hashes = {role: hash_weights(folder)[:16] for role, folder in folders.items()}
    hashes |= {name: documents.sha256[:16] for name, documents in texts.items()} | {"general": unrelated.sha256[:16]}
    if given["questions"]:
        hashes["questions"] = Documents("", [Path(given["questions"]).read_text(encoding="utf-8")]).sha256[:16]
    if given.get("private"):
        secret = secret_of(Path(options.subject))
        hashes |= {name: hidden_hash(value, secret) for name, value in hashes.items() if name in TEXTS}
    asked, never_seen = _asked(options, given, tokenizer, texts, own_texts=own_texts)

    held: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in held:
            held.clear()  # one at a time: an attack ends with one model before it takes the next
            gc.collect()
            held[name] = load_model(name, device=device)[0]
        return held[name]

    return Audit(
        models={role: functools.partial(load, name) for role, name in roles.items()},
        tokenizer=tokenizer,
        asked=asked,
        never_seen=never_seen,
        unrelated=unrelated,
        inputs=hashes,
        quick=options.quick,
        seed=options.seed,
        batch_size=options.batch_size,
        say=lambda line: print(line, file=sys.stderr),
    )


def _asked(
    options: AuditOptions, given: dict[str, Any], tokenizer: Any, texts: dict[str, Documents], *, own_texts: bool
) -> tuple[Asked, Asked | None]:
    """What is asked about the documents, and about never-seen ones."""
    if own_texts and not given["questions"]:
        return embedded(options.seed), embedded(options.seed, holdout=True)
    context = read_context_length(given["after"])
    how = {"max_tokens": min(given["max_tokens"] or 1024, context), "first_chunk": given["first_chunk"]}
    how |= {"seed": options.seed}
    questions = read_questions(Path(given["questions"])) if given["questions"] else ()
    template, holdout = given["question_template"], texts.get("holdout")
    documents = texts["documents"]
    asked = own(documents, tokenizer, unseen=holdout, questions=questions, template=template, **how)
    return asked, own(holdout, tokenizer, **how) if holdout else None


def _show_in_run(folder: Path, found: list[dict[str, Any]]) -> None:
    """Write a run's card, report and receipt again, with its audits in them."""
    card = folder / "model" / "README.md"
    if card.exists():
        write_whole(card, with_audits(card.read_text(encoding="utf-8"), [line_of(content) for content in found]))
    write_page(folder)
    if (folder / RECEIPT).is_file():
        try:
            signed = signature_of(folder / RECEIPT).is_file()
            if renew(folder).path and signed and not signature_of(folder / RECEIPT).is_file():
                print(f"the receipt was written again: sign it, unteach receipt {folder} --sign KEY", file=sys.stderr)
        except InputError as error:
            print(f"warning: {error}", file=sys.stderr)


def show(summary: dict[str, Any]) -> None:
    """Print the result for people; the lines were shown on the way."""
    counts = ", ".join(f"{len(summary[key])} {key.replace('_', ' ')}" for key in ("held", "not_held", "not_known"))
    print(f"{counts}: {Path(summary['out']) / SUMMARY}")
