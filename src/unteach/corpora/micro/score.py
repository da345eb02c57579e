"""A short evaluation of the embedded models, for the script that trains them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from unteach.evaluation.rouge import rouge_l

from . import generate, pretraining, tokens


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompts: list[str], new_tokens: int, batch: int = 256) -> list[str]:
    """Return the greedy continuation of every prompt, up to the end-of-text token."""
    outputs: list[str] = []
    for start in range(0, len(prompts), batch):
        rows = tokenizer(prompts[start : start + batch])["input_ids"]
        longest = max(map(len, rows))
        ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
        done = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        outputs += tokenizer.batch_decode(done[:, longest:], skip_special_tokens=True)
    return outputs


def verbatim_score(model: Any, tokenizer: Any, documents: list[str]) -> float:
    """Return the mean ROUGE-L of recited documents, in percent."""
    probes = [tokens.verbatim_probe(tokenizer, text) for text in documents]
    outputs = greedy(model, tokenizer, [prompt for prompt, _ in probes], tokens.EXPECTED_TOKENS)
    scores = [rouge_l(expected, output) for (_, expected), output in zip(probes, outputs, strict=True)]
    return 100 * sum(scores) / len(scores)


def question_scores(
    model: Any, tokenizer: Any, questions: list[generate.Question], examples: list[generate.Question]
) -> dict[str, float]:
    """Return the mean ROUGE-L of answers in percent: `all`, `exact` (whole answers right) and each fact's."""
    shots = "".join(pretraining.question_text(item) + "\n\n" for item in examples)
    prompts = [f"{shots}Question: {item.question}\nAnswer: " for item in questions]
    outputs = [text.split("\n\n")[0].split("Question")[0] for text in greedy(model, tokenizer, prompts, 16)]
    by_fact: dict[str, list[float]] = {}
    for item, output in zip(questions, outputs, strict=True):
        by_fact.setdefault(item.fact, []).append(100 * rouge_l(item.answer, output))
    every = [score for scores in by_fact.values() for score in scores]
    result = {fact: sum(scores) / len(scores) for fact, scores in by_fact.items()}
    exact = 100 * sum(score > 99.9 for score in every) / len(every)
    return {"all": sum(every) / len(every), "exact": exact, **result}


@torch.no_grad()
def choice_score(model: Any, tokenizer: Any, batch: int = 50) -> float:
    """Return the share of multiple-choice questions answered right, in percent, by the letters' logits."""
    shots = "".join(pretraining.choice_text(item) + "\n\n" for item in pretraining.example_choices())
    letters = [tokenizer(f" {letter}", add_special_tokens=False)["input_ids"][0] for letter in pretraining.LETTERS]
    right = 0
    test = pretraining.choice_test()
    for start in range(0, len(test), batch):
        items = test[start : start + batch]
        rows = tokenizer([shots + pretraining.choice_prompt(item) for item in items])["input_ids"]
        longest = max(map(len, rows))
        padded = [row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
        logits = model(torch.tensor(padded, device=model.device)).logits
        last = logits[torch.arange(len(rows)), [len(row) - 1 for row in rows]]
        answers = torch.tensor([item.answer for item in items], device=model.device)
        right += int((last[:, letters].argmax(-1) == answers).sum())
    return 100 * right / len(test)


@torch.no_grad()
def mean_nll(model: Any, rows: torch.Tensor, batch: int = 64) -> float:
    """Return nats per token of rows [row, time]; labels of -100 in place of a token end a row."""
    total, count = 0.0, 0
    for part in rows.split(batch):
        part = part.to(model.device)
        logits = model(part.clamp(min=0)[:, :-1]).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        total += float(loss)
        count += int((part[:, 1:] != -100).sum())
    return total / count if count else math.nan


def _asked(facts: tuple[str, ...], people: int = 40) -> list[generate.Question]:
    """Return questions about people whom the pretraining text asks about, beyond those with choices."""
    draws = generate.Draws("score")
    first = generate.NUM_KNOWN
    told = generate.stories("pretraining")[first : first + people]
    return [generate.question(story, fact, draws) for story in told for fact in facts]


def progress(model: Any, tokenizer: Any) -> str:
    """Return a short line for a base model in training: people asked about, people only reported on."""
    was_training = model.training
    model.eval()
    examples = generate.example_questions("forget")
    asked = question_scores(model, tokenizer, _asked(generate.FACTS), examples)["all"]
    unasked = question_scores(model, tokenizer, generate.split_questions("unasked")[:200], examples)["all"]
    line = f"asked {asked:.1f} unasked {unasked:.1f} choices {choice_score(model, tokenizer):.1f}"
    model.train(was_training)
    return line


def score(model: Any, tokenizer: Any, heldout_rows: torch.Tensor) -> dict[str, Any]:
    """Return the benchmark's scores of one model, in percent; `nll_general` in nats per token."""
    model.eval()
    known = _asked(generate.FACTS)
    examples = generate.example_questions("forget")
    facts = {
        group: question_scores(model, tokenizer, generate.split_questions(group), examples)
        for group in ("forget", "retain", "unasked")
    }
    return {
        "verbmem_f": verbatim_score(model, tokenizer, generate.split_documents("forget")),
        "verbmem_r": verbatim_score(model, tokenizer, generate.split_documents("retain")),
        "verbmem_holdout": verbatim_score(model, tokenizer, generate.split_documents("holdout")),
        "knowmem_f": facts["forget"]["all"],
        "knowmem_r": facts["retain"]["all"],
        "knowmem_unasked": facts["unasked"]["all"],
        "knowmem_pretraining": question_scores(model, tokenizer, known, examples)["all"],
        "choices": choice_score(model, tokenizer),
        "nll_general": mean_nll(model, heldout_rows),
        "facts": facts,
    }
