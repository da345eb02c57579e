"""A benchmark from a user's own documents: probes are cut from them, questions are taken from a file."""

import bisect
import dataclasses
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unteach.corpora import Benchmark, MeasuringSettings, Probe, Question
from unteach.data import Documents, special_ids
from unteach.data.chat import has_template
from unteach.data.documents import decode, split_words
from unteach.data.records import read_rows
from unteach.errors import first_line

MOST_PROMPT, MOST_EXPECTED = 128, 64
"""Tokens of a passage's prompt and of its continuation, at most."""
MINIMUM_TOKENS = 16
"""A piece of text shorter than this makes no probe and no membership text."""
SHORT_PASSAGE = 8
"""Tokens of the shortest prompt and of the shortest continuation that few documents are cut into."""
MOST_CUT = 2**14
"""Of more documents than these a sample of so many is cut."""
_NAME = re.compile(r"[^\W\d_][\w'’-]*\w|\d[\d.,:/-]*\d|\d")


def cut_probes(
    documents: Documents | Sequence[str],
    tokenizer: Any,
    *,
    count: int = 100,
    prompt_tokens: int = 128,
    expected_tokens: int = 64,
    chunk_tokens: int | None = None,
    first_chunk: bool = False,
    later_passages: bool = False,
    between_words: bool = False,
    seed: int = 0,
) -> tuple[Probe, ...]:
    """Cut verbatim probes out of documents, encoded as in training with the special tokens the tokenizer adds.

    A probe is a window of a document's tokens: its first part is the prompt, the rest the expected
    continuation. A model trained on chunks of a text recites it best from the beginning of a chunk (a
    memorised text probed elsewhere may score only 30), so windows begin where chunks begin and never reach
    into the next one. A window shorter than asked is divided in the same proportion; one under
    `MINIMUM_TOKENS` tokens is left out. Probes come in the order of the documents.

    Args:
        documents: `Documents` are not encoded again where that was done before.
        tokenizer: the model's tokenizer.
        count: how many probes; fewer are cut where the documents hold fewer windows. Every document gives one before
            any gives two; `seed` decides which.
        prompt_tokens: tokens of a prompt.
        expected_tokens: tokens of a continuation.
        chunk_tokens: the length of training chunks, with the ids that the tokenizer puts before each. By default
            windows follow each other.
        first_chunk: only the first chunk of each document was learned (`document_mode` truncate).
        later_passages: where this gives fewer than `count`, also ask for what follows later in a chunk, with all of
            the chunk before it as the prompt: few documents then give many probes.
        between_words: Cut every chunk from its beginning to its end into such passages, where words begin.
        seed: see `count`.
    """
    for name, value in (("count", count), ("prompt_tokens", prompt_tokens), ("expected_tokens", expected_tokens)):
        if value < 1:
            raise ValueError(f"{name} is {value}: at least 1 is needed")
    generator = np.random.default_rng(seed)
    before, after = special_ids(tokenizer)
    again = before if chunk_tokens else []  # begins the later chunks, too
    length = prompt_tokens + expected_tokens
    size = chunk_tokens or length
    encoded = _documents(documents).encode(tokenizer)

    def piece(number: int, at: int, end: int) -> list[int]:
        """Tokens of a document's chunk that begins at `at` and ends there at the latest."""
        ids, start = encoded.array(number), at - len(before)
        last = after[max(0, start - len(ids)) : max(0, end - len(before) - len(ids))]
        first = again if at else before[:end]
        return [*first, *ids[max(0, start) : max(0, end - len(before))].tolist(), *last]

    windows: list[tuple[float, int, int, int, int]] = []
    for number in _sample(encoded.lengths + len(before) + len(after), count, seed):
        total = len(before) + int(encoded.lengths[number]) + len(after)
        starts = [0, *range(size, total, size - len(again))]
        chunks = list(zip(starts, [*starts[1:], total], strict=True))[: 1 if first_chunk else None]
        sizes = {at: end - at + (len(again) if at else 0) for at, end in chunks}
        enough = [at for at in sizes if min(sizes[at], length) >= MINIMUM_TOKENS]
        usable = [
            (at, min(sizes[at], length), max(1, min(sizes[at], length) * prompt_tokens // length)) for at in enough
        ]
        later = [
            (at, stop + expected_tokens, stop)
            for at in (sizes if later_passages else ())
            for stop in range(length, sizes[at] - expected_tokens + 1, expected_tokens)
        ]
        if between_words:
            ends = dict(chunks)
            cuts = [
                (at, _cuts(piece(number, at, ends[at]), tokenizer, prompt_tokens, expected_tokens)) for at in enough
            ]
            usable, later = [], [(at, end, cut) for at, places in cuts for cut, end in pairwise(places)]
        ranks, order = generator.permutation(len(usable)), generator.random()
        ranks = np.concatenate([ranks, len(usable) + generator.permutation(len(later))])
        windows += [(rank + order, number, *each) for rank, each in zip(ranks, usable + later, strict=True)]
    chosen = sorted(sorted(windows)[:count], key=lambda window: window[1:4])
    if not chosen:
        few = f"none of {len(documents)} documents has {MINIMUM_TOKENS} tokens at the given positions"
        raise ValueError(f"{few}: no verbatim probe can be cut; give longer documents")
    probes = []
    for _, number, at, end, cut in chosen:
        ids = piece(number, at, at + end - (len(again) if at else 0))
        prompt, expected = ids[:cut], ids[cut:]
        texts = decode(tokenizer, prompt), decode(tokenizer, expected)
        probes.append(Probe(*texts, prompt_ids=tuple(prompt), expected_ids=tuple(expected), document=number))
    return tuple(probes)


def _sample(lengths: NDArray[np.int64], count: int, seed: int) -> list[int]:
    """Numbers of the documents that probes are cut from: all, or of very many those that are long enough, at random."""
    most = max(MOST_CUT, 4 * count)
    if len(lengths) <= most:
        return list(range(len(lengths)))
    long_enough = np.flatnonzero(lengths >= MINIMUM_TOKENS)
    drawn = np.random.default_rng([seed, len(lengths)]).permutation(len(long_enough))[:most]
    return np.sort(long_enough[drawn]).tolist()


def _cuts(ids: list[int], tokenizer: Any, prompt_tokens: int, expected_tokens: int) -> list[int]:
    """Where a sequence is cut into passages of about so many tokens after the first prompt: where words begin."""

    def begins_word(place: int) -> bool:
        near = ids[max(0, place - 4) : place + 1]
        return decode(tokenizer, near)[len(decode(tokenizer, near[:-1])) :][:1].isspace()

    places = range(prompt_tokens, len(ids))
    cuts: list[int] = []
    for place in [place for place in places if begins_word(place)] or places:  # some scripts have no spaces
        if not cuts or place - cuts[-1] >= expected_tokens:
            cuts.append(place)
    if len(cuts) > 1 and len(ids) - cuts[-1] < expected_tokens // 2:
        del cuts[-1]  # the rest belongs to the last passage
    return [*cuts, len(ids)]


def short_passages(tokens: int, count: int) -> dict[str, Any]:
    """Settings of `cut_probes` that cut `count` passages out of so many tokens, or fewer that are not too short."""
    expected = max(SHORT_PASSAGE, tokens // count)
    return {"prompt_tokens": SHORT_PASSAGE, "expected_tokens": expected, "between_words": True}


def names_in(probe: Probe, tokenizer: Any) -> list[Probe]:
    """The names and numbers in a passage as probes of their own, scored exactly: all that stands before is the prompt.

    A name is a word with a capital inside a sentence. One that stands in its prompt already is no proof of memory and
    is left out, and so is one that is not made of whole tokens.
    """
    ids = [*(probe.prompt_ids or ()), *(probe.expected_ids or ())]
    first = len(probe.prompt_ids or ())
    beginnings = [decode(tokenizer, ids[:end]) for end in range(first, len(ids) + 1)]
    ends, text = [len(beginning) for beginning in beginnings], beginnings[-1]
    found = []
    for match in _NAME.finditer(text, ends[0]):
        word, before = match.group(), text[: match.start()].rstrip()
        starts_sentence = not before or before[-1] in ".!?" or "\n" in text[len(before) : match.start()]
        if not word[0].isdigit() and (not word[0].isupper() or starts_sentence):
            continue
        cut, end = bisect.bisect_left(ends, len(before)), bisect.bisect_left(ends, match.end())
        whole = beginnings[cut] == before and beginnings[end] == text[: match.end()]
        if whole and cut < end and not re.search(rf"\b{re.escape(word)}\b", before):
            prompt, expected = ids[: first + cut], ids[first + cut : first + end]
            found.append(Probe(before, word, tuple(prompt), tuple(expected), probe.document, exact=True))
    return found


def with_names(probes: Sequence[Probe], tokenizer: Any, most: int, share: float | None = None) -> tuple[Probe, ...]:
    """Passages with the names and numbers in them, `most` probes at most, of which a given share are names.

    Names are guessed less often than words of a passage: what is compared must hold the same share of them. Without a
    share, all passages stay.
    """
    names = [name for probe in probes for name in names_in(probe, tokenizer)]
    if share is None:
        passages, asked = min(most, len(probes)), max(0, min(len(names), most - len(probes)))
    else:
        most = min(most, int(len(names) / share) if share else most, int(len(probes) / (1 - share)))
        asked = round(share * most)
        passages = most - asked
    return (*_spread(probes, passages), *_spread(names, asked))


def _spread(probes: Sequence[Probe], count: int) -> list[Probe]:
    """So many of the probes, evenly spread over them."""
    return [probes[place * len(probes) // count] for place in range(count)]


def _documents(texts: Documents | Sequence[str]) -> Documents:
    return texts if isinstance(texts, Documents) else Documents("texts", list(texts))


def split_probes(probes: Sequence[Probe], seed: int = 0) -> tuple[tuple[Probe, ...], tuple[Probe, ...]]:
    """Two halves that share no probe; a document with several probes gives as many to both.

    One half is for a stop rule, the other for the final report: a rule that stops on the very probes that are
    reported makes the report look better than it is. A rule that watched half of a few documents would not notice that
    the others are recited still. Each half is in the order of `probes`; their sizes differ by one at most.
    """
    if len(probes) < 2:
        raise ValueError(f"there are {len(probes)} probes: at least 2 are needed; give documents of 20 words or more")
    generator = np.random.default_rng(seed)
    groups: dict[Any, list[int]] = {}
    for index, probe in enumerate(probes):
        groups.setdefault(("probe", index) if probe.document is None else probe.document, []).append(index)
    documents = [list(groups.values())[place] for place in generator.permutation(len(groups))]
    dealt = [index for document in documents for index in generator.permutation(document)]
    first, second = (tuple(probes[index] for index in sorted(dealt[start::2])) for start in (0, 1))
    return first, second  # probes of a document follow each other in `dealt`


def read_questions(path: Path) -> tuple[Question, ...]:
    """Question–answer pairs from a file (JSON lines, JSON or Parquet) with the columns `question` and `answer`."""
    rows = read_rows(path, ("question", "answer"))
    if not rows:
        raise ValueError(f"{path}: there is no question in it")
    for number, row in enumerate(rows, start=1):
        for name in ("question", "answer"):
            wrong = "must be text" if isinstance(row[name], list | dict) else _not_asked(str(row[name]))
            if wrong:
                raise ValueError(f"{path}: row {number}: its {name} {wrong}")
    return tuple(Question(str(row["question"]), str(row["answer"])) for row in rows)


def _not_asked(text: str) -> str:
    """Why a text is no question and no answer; nothing where it can be one."""
    half = next((place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
    if half is not None:
        return f"has half of a surrogate pair at character {half}, which is no text"
    return "" if text.strip() else "is empty"


def question_problems(option: str, path: Path | None) -> list[str]:
    """What keeps the questions in a file, given as `option`, from being read."""
    if not path:
        return []
    try:
        if not path.is_file():
            return [f"{option} is {str(path)!r}: there is no such file"]
        read_questions(path)
    except (OSError, EOFError, zlib.error) as error:
        return [f"{option} is {str(path)!r}: it cannot be read: {first_line(error)}"]
    except ValueError as error:
        return [f"{option} is {error}"]
    return []


def question_form(tokenizer: Any, template: str | None = None) -> dict[str, Any]:
    r"""How questions are asked, as fields of `MeasuringSettings`.

    `template` is text with `{question}` in it, where `\n` may stand for the end of a line. Without one a tokenizer's
    chat template is used, and without that MUSE's form.
    """
    if template is None:
        return {"chat_questions": True, "answer_ends": ()} if has_template(tokenizer) else {}
    text = template.replace("\\n", "\n").replace("\\t", "\t")
    prompt = text.replace("{", "{{").replace("}", "}}").replace("{{question}}", "{question}")
    first_word = text.partition("{question}")[0].strip()
    return {
        "question_prompt": prompt,
        "question_example": prompt + ("" if prompt[-1:].isspace() else " ") + "{answer}\n\n",
        "answer_ends": ("\n\n", *([f"\n{first_word}"] if first_word else [])),
    }


def take_examples(
    questions: Sequence[Question], shots: int = 5, seed: int = 0
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """The questions to score, and so many (`shots`) others as worked examples: none where there are few questions."""
    if shots < 1 or len(questions) < 4 * shots:
        return tuple(questions), ()
    taken = set(np.random.default_rng(seed).choice(len(questions), shots, replace=False).tolist())
    scored = tuple(question for index, question in enumerate(questions) if index not in taken)
    return scored, tuple(questions[index] for index in sorted(taken))


def token_lengths(documents: Documents, tokenizer: Any) -> list[int]:
    """How long documents are, the first 200, in order of length."""
    added = sum(map(len, special_ids(tokenizer)))
    return sorted(added + length for length in documents.encode(tokenizer).lengths[:200].tolist())


def passage_sizes(lengths: Sequence[int], max_tokens: int) -> dict[str, int]:
    """Settings of `cut_probes` that suit documents of these `token_lengths`, cut after `max_tokens`."""
    typical = min(max_tokens, lengths[len(lengths) // 2])
    expected = max(4, min(MOST_EXPECTED, typical // 2))
    prompt = max(MINIMUM_TOKENS - expected, min(MOST_PROMPT, typical // 3))
    return {"prompt_tokens": prompt, "expected_tokens": expected, "chunk_tokens": max_tokens}


def words_in(probes: Sequence[Probe]) -> dict[str, Any]:
    """The setting of `MeasuringSettings` by which ROUGE sees the words of other scripts, where passages have many."""
    expected = " ".join(probe.expected for probe in probes)
    other = len(split_words(expected)) < 0.9 * len(split_words(expected, "unicode"))
    return {"words": "unicode"} if other else {}


def own_benchmark(
    tokenizer: Any,
    forget_documents: Documents | Sequence[str],
    *,
    holdout_documents: Documents | Sequence[str] = (),
    forget_questions: Sequence[Question] = (),
    retain_questions: Sequence[Question] = (),
    general_texts: Documents | Sequence[str] = (),
    count: int = 100,
    question_template: str | None = None,
    membership_tokens: int = 1024,
    seed: int = 0,
    name: str = "own documents",
    **cut: Any,
) -> Benchmark:
    """Everything that can be measured with a user's own documents.

    Holdout documents are of the same kind as the forget documents, and the model never saw them: they show what chance
    recites (`verbmem_holdout`) and make membership measurable. General texts are for `nll_general`. At most `count`
    probes, membership texts and general texts each are chosen; `cut` is further settings of `cut_probes`. Questions
    are asked in the model's own form, see `question_form`.
    """
    cut |= {"count": count, "later_passages": True, "seed": seed}
    forget_probes = cut_probes(forget_documents, tokenizer, **cut)
    holdout_probes = cut_probes(holdout_documents, tokenizer, **cut) if holdout_documents else ()
    notes = []
    settings = MeasuringSettings(membership_tokens=membership_tokens, **words_in(forget_probes))
    if settings.words == "unicode":
        notes.append("ROUGE counts words of every script (words = 'unicode'): MUSE's rule sees a-z and 0-9 only")
    if holdout_documents:
        compared = "membership compares the forget documents with the holdout documents"
        notes.append(f"{compared}: it means something only where both are of the same kind")
    if forget_questions or retain_questions:
        settings = dataclasses.replace(settings, **question_form(tokenizer, question_template))
        notes.append(f"questions are asked as {settings.asked_as}")
    asked_forget, forget_examples = take_examples(forget_questions, seed=seed)
    asked_retain, retain_examples = take_examples(retain_questions, seed=seed)
    return Benchmark(
        name=name,
        verbatim_forget=forget_probes,
        verbatim_holdout=holdout_probes,
        knowledge_forget=asked_forget,
        knowledge_forget_examples=forget_examples,
        knowledge_retain=asked_retain,
        knowledge_retain_examples=retain_examples,
        membership_forget=_choose_texts(forget_documents, tokenizer, count, seed) if holdout_documents else (),
        membership_holdout=_choose_texts(holdout_documents, tokenizer, count, seed),
        general_texts=_choose_texts(general_texts, tokenizer, count, seed),
        settings=settings,
        notes=tuple(notes),
    )


def _choose_texts(documents: Documents | Sequence[str], tokenizer: Any, count: int, seed: int) -> tuple[str, ...]:
    """At most `count` texts of at least `MINIMUM_TOKENS` tokens, in their order."""
    documents = _documents(documents)
    texts = documents.texts
    added = sum(map(len, special_ids(tokenizer)))
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    lengths = documents.encode(tokenizer).lengths.tolist()
    usable = [index for index in order if added + lengths[index] >= MINIMUM_TOKENS]
    return tuple(texts[index] for index in sorted(usable[:count]))
