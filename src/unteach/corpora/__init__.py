"""What is measured on: a benchmark is plain data, found by its name in `catalog`, or cut from documents in `own`.

A `Benchmark` holds texts and questions, never a model. Any part may be empty: its metric is then not measured
and the result says so.
"""

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Probe:
    """A verbatim probe: does the model continue the prompt with the expected text, word for word?"""

    prompt: str
    expected: str
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's token ids. Given where a probe was cut at token positions: `prompt` is then only shown."""
    expected_ids: tuple[int, ...] | None = None
    """The continuation's token ids; their number is the number of tokens generated."""
    document: int | None = None
    exact: bool = False
    """Scored 1 where the words are the same, else 0: for a single name or number."""


@dataclass(frozen=True)
class Question:
    """A question with a short answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class ChoiceQuestion:
    """A multiple-choice question whose answer is one letter, given as the number of the right choice from 0."""

    prompt: str
    """The whole prompt with its worked examples, ending where ` A`, ` B`, ... would follow."""
    answer: int
    choices: int = 4
    subject: str = ""
    question: str = ""
    """The question alone, to be shown."""


@dataclass(frozen=True)
class TofuQuestion:
    """A question of TOFU with its right answer, a rewording of it, and wrong answers in the same form."""

    question: str
    answer: str
    paraphrased_answer: str
    """The right answer in other words; the answer itself where TOFU has none."""
    perturbed_answers: tuple[str, ...]


@dataclass(frozen=True)
class Tofu:
    """The four question sets of TOFU."""

    forget: tuple[TofuQuestion, ...]
    retain: tuple[TofuQuestion, ...]
    real_authors: tuple[TofuQuestion, ...]
    world_facts: tuple[TofuQuestion, ...]


@dataclass(frozen=True)
class MeasuringSettings:
    """How a benchmark is measured. The defaults are MUSE's.

    `verbatim_tokens`, `knowledge_tokens` and `tofu_tokens` are generated for an item; membership and general texts are
    scored up to so many.
    """

    verbatim_tokens: int = 128
    """The expected text is cut to as many ids, the begin-of-text id included; `expected_ids` go before this number."""
    knowledge_tokens: int = 32
    question_example: str = "Question: {question}\nAnswer: {answer}\n\n"
    """How a worked example is written before a question."""
    question_prompt: str = "Question: {question}\nAnswer: "
    chat_questions: bool = False
    """Ask in the tokenizer's chat template instead: a user turn, after the worked examples as earlier turns."""
    answer_ends: tuple[str, ...] = ("\n\n", "\nQuestion", "Question:")
    """An answer is cut before the first of these."""
    membership_tokens: int | None = None
    """None: as far as the context reaches."""
    general_tokens: int = 512
    tofu_tokens: int = 128
    tofu_prompt: str = "Question: {question}\nAnswer:"
    """The answer follows after a space."""
    tofu_scores_end: bool = True
    """Whether the end-of-text token counts as the answer's last token, as in TOFU's code."""
    long_prompts: Literal["cut", "error"] = "cut"
    """A prompt that does not fit the model's context: drop its oldest tokens and say so, or refuse."""
    words: Literal["latin", "unicode"] = "latin"
    """How ROUGE splits words: as MUSE (a-z and 0-9 only), or any script."""

    @property
    def asked_as(self) -> str:
        """The form of a question, for people."""
        return "user turns of the tokenizer's chat template" if self.chat_questions else repr(self.question_prompt)


@dataclass(frozen=True)
class Benchmark:
    """Everything one evaluation measures."""

    name: str
    verbatim_forget: tuple[Probe, ...] = ()
    verbatim_holdout: tuple[Probe, ...] = ()
    """Probes from documents the model never saw: what chance recites."""
    verbatim_retain: tuple[Probe, ...] = ()
    """Probes from documents to be kept."""
    knowledge_forget: tuple[Question, ...] = ()
    knowledge_forget_examples: tuple[Question, ...] = ()
    """Worked examples put before every forget question; never scored."""
    knowledge_retain: tuple[Question, ...] = ()
    knowledge_retain_examples: tuple[Question, ...] = ()
    membership_forget: tuple[str, ...] = ()
    membership_retain: tuple[str, ...] = ()
    membership_holdout: tuple[str, ...] = ()
    multiple_choice: tuple[ChoiceQuestion, ...] = ()
    general_texts: tuple[str, ...] = ()
    tofu: Tofu | None = None
    settings: MeasuringSettings = field(default_factory=MeasuringSettings)
    notes: tuple[str, ...] = ()
    """What a reader of the scores must know about this data."""

    @functools.cached_property
    def data_sha256(self) -> str:
        """Hash of all texts, questions and settings: equal for equal data, wherever it was read from."""
        content = dataclasses.asdict(self)
        del content["notes"]
        if not self.verbatim_retain:  # came later, as the next: hashes of benchmarks without it stay
            del content["verbatim_retain"]
        if not self.settings.chat_questions:
            del content["settings"]["chat_questions"]
        for probe in (probe for name in content if name.startswith("verbatim") for probe in content[name]):
            if not probe["exact"]:  # likewise
                del probe["exact"]
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def first(self, count: int) -> "Benchmark":
        """The same benchmark with at most `count` items of every kind; worked examples stay."""
        if count < 1:
            raise ValueError(f"count is {count}: at least 1 item of every kind must stay")
        parts: dict[str, Any] = {
            name: value[:count]
            for name, value in vars(self).items()
            if isinstance(value, tuple) and name != "notes" and not name.endswith("_examples")
        }
        if self.tofu is not None:
            parts["tofu"] = Tofu(**{name: asked[:count] for name, asked in vars(self.tofu).items()})
        notes = (*self.notes, f"only the first {count} items of every kind were measured")
        return dataclasses.replace(self, notes=notes, **parts)
