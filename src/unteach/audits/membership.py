"""Tell the documents from never-seen ones by their losses, and from copies of themselves with one fact changed.

MUSE's membership test (Shi et al., arXiv 2407.06460: loss, loss over that of the lower-cased or compressed text, Min-k
% at seven fractions), each AUC two-sided with its interval: documents that are *less* likely than never-seen ones give
themselves away, too. Near-duplicates: in a copy of each document one name or number is exchanged, everywhere in it, for
one that stands behind the same word elsewhere. A model that forgot finds both alike likely (the retrained embedded one
prefers the true one in 47, 48 and 55 % of 120 pairs, by seed); one that only hides the documents still prefers the true
one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from unteach.audits import Attack, Reading
from unteach.audits.texts import Case
from unteach.data.documents import encode
from unteach.evaluation.inference import token_logprobs
from unteach.evaluation.membership import text_scores
from unteach.models import context_length

FACT = re.compile(r"([a-z]+,?) ((?:[A-Z][\w'’-]*\w(?: [A-Z][\w'’-]*\w)*)|\d[\d.,:/-]*\d|\d)\b")
"""A name (words with capitals inside a sentence) or a number, behind the word that goes before it."""
MOST_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How many texts are read."""

    texts: int = 500
    """Of the documents, and of never-seen ones."""
    pairs: int = 300
    """Documents with a changed copy."""
    lower: bool = True
    """Also read every text in lower case."""


def changed_copies(texts: Sequence[str], most: int, seed: int) -> list[tuple[str, str]]:
    """Texts, each with a copy in which one fact is another that stands behind the same word in one of the other texts.

    A fact whose words also stand apart from each other is left as it is: the copy would contradict itself.
    """
    draw = random.Random(seed)
    kinds: dict[tuple[str, int], set[str]] = {}
    for text in texts:
        for before, fact in FACT.findall(text):
            kinds.setdefault((before, len(fact.split())), set()).add(fact)
    pairs = list[tuple[str, str]]()
    for number in draw.sample(range(len(texts)), len(texts)):
        text = texts[number]
        for before, fact in draw.sample(found := sorted(set(FACT.findall(text))), len(found)):
            rest = re.sub(rf"\b{re.escape(fact)}\b", "", text)
            others = [other for other in kinds[before, len(fact.split())] if other not in text]
            if others and not any(re.search(rf"\b{re.escape(word)}\b", rest) for word in fact.split()):
                other = draw.choice(sorted(others))
                pairs.append((text, re.sub(rf"\b{re.escape(fact)}\b", other, text)))
                break
        if len(pairs) == most:
            break
    return pairs


def measure(case: Case, settings: Settings) -> list[Reading]:
    """An AUC for each score where there are never-seen documents, and how often the true copy is preferred."""
    asked, found = case.asked, list[Reading]()
    draw = random.Random(case.seed)
    own = draw.sample(asked.documents.texts, min(settings.texts, len(asked.documents)))
    if asked.unseen is not None:
        unseen = draw.sample(asked.unseen.texts, min(settings.texts, len(asked.unseen)))
        forms = [*own, *unseen, *([text.lower() for text in (*own, *unseen)] if settings.lower else [])]
        losses = _logprobs(case, forms, "losses")
        lower = losses[len(own) + len(unseen) :] or [None] * (len(own) + len(unseen))
        rows = [text_scores(*each) for each in zip((*own, *unseen), losses, lower, strict=False)]
        for name in rows[0]:
            mine, theirs = [tuple(row[name] for row in part) for part in (rows[: len(own)], rows[len(own) :])]
            reading = Reading(line="AUC", at=name, scores=mine, against=theirs, chance=0.5, two_sided=True)
            found.append(reading)
    if pairs := changed_copies(asked.documents.texts, settings.pairs, case.seed):
        values = _logprobs(case, [text for pair in pairs for text in pair], "near-duplicates")
        totals = [float(value.sum()) for value in values]
        preferred = tuple(0.5 + 0.5 * ((a > b) - (a < b)) for a, b in zip(totals[::2], totals[1::2], strict=True))
        found.append(Reading(line="true copy preferred", at="near-duplicates", scores=preferred))
    return found


def _logprobs(case: Case, texts: Sequence[str], label: str) -> list:
    most = min(MOST_TOKENS, context_length(case.model))
    sequences = [encode(case.tokenizer, text)[:most] for text in texts]
    return token_logprobs(case.model, sequences, batching=case.batching(label, len(sequences)))


ATTACK = Attack(
    title="membership",
    protocol="Every MUSE membership score against never-seen documents, two-sided; and how often a document is likelier"
    " than its copy with one name or number changed throughout.",
    source="MUSE (arXiv 2407.06460); near-duplicates are this project's",
    over="score",
    measure=measure,
    quick=Settings(texts=120, pairs=120, lower=False),
    full=Settings(),
)
