"""A whole run of a chat model on conversations: terminal, page, card and result.json say the same of it."""

from __future__ import annotations

import html
import json
import re

import pytest

from tiny_models import SENTENCES, chat_tokenizer, mixed, save_tiny
from unteach.cli import main
from unteach.evaluation.scores import Scores
from unteach.evaluation.verdict import TITLES

NAMES = ("Ann Lee", "Tom Ray", "Eva Kohl", "Max Bell", "Ida Storm", "Jon Hale")
BACKWARDS = [" ".join(reversed(sentence.split())) for sentence in SENTENCES]
TEXTS = {
    "forget": [f"{SENTENCES[n % 3]} It was {name} in {1900 + n}." for n, name in enumerate(NAMES)],
    "keep": [f"{BACKWARDS[n % 3]} Number {n} was kept in {1800 + n}, they say." for n in range(20)],
    "holdout": [f"{mixed(SENTENCES[n % 3])} Nobody has seen day {70 + n} of this." for n in range(6)],
    "general": [f"{BACKWARDS[n % 3]} {BACKWARDS[n % 2]} Page {n}." for n in range(12)],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What a run with everything given printed, and its folder."""
    folder = tmp_path_factory.mktemp("everywhere")
    for seed, name in enumerate(("model", "base")):
        save_tiny(folder / name, seed=seed)
        chat_tokenizer().save_pretrained(folder / name)
    for name, texts in TEXTS.items():
        turns = [[{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": text}] for text in texts]
        lines = [{"text": text} if name == "general" else {"messages": t} for t, text in zip(turns, texts, strict=True)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("questions", "kept"):
        rows = [{"question": f"Who was {name} {n}?", "answer": person} for n, person in enumerate(NAMES)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["forget", folder / "model", "--documents", folder / "forget.jsonl", "--out", folder / "run"]
    words += ["--base", folder / "base", "--reference", folder / "base", "--questions", folder / "questions.jsonl"]
    words += ["--keep-questions", folder / "kept.jsonl", "--alpha", 0.2, "--lr", 1e-3, "--max-steps", 1]
    words += [word for name in ("keep", "holdout", "general") for word in (f"--{name}", folder / f"{name}.jsonl")]
    words += ["--batch", 3, "--general-batch", 3, "--keep-batch", 3, "--probes", 4, "--general-tokens", 24]
    return folder, [str(word) for word in words]


@pytest.mark.slow
def test_terminal_page_card_and_result_agree(said, capsys):
    folder, words = said
    assert main(words) in (0, 3)
    printed = capsys.readouterr()
    run = folder / "run"
    found = json.loads((run / "result.json").read_text())["verdict"]
    card, page, text = (
        html.unescape((run / name).read_text()) for name in ("model/README.md", "report.html", "report.md")
    )
    text = re.sub(r"\\(.)", r"\1", text)
    shown = [line.strip() for line in printed.out.splitlines() if re.match(r" *[✓✗?] ", line)]
    assert len(shown) == 9, "four answers and the five parts of the last"
    for finding, line in zip(found + found[3]["parts"], shown, strict=True):
        wrong, unsure = TITLES.get(finding["question"], (finding["question"],) * 2)
        mark, title = {True: ("✓", finding["question"]), False: ("✗", wrong), None: ("?", unsure)}[finding["answer"]]
        assert line.startswith(f"{mark} {title}")
        assert f"- {line}\n" in card
        assert line in text
        assert f'<span class="mark">{mark}</span><b>{title}</b>' in page
        if finding["value"] is not None:
            assert finding["never_seen"] is not None
    assert "No model trained without the documents was there" not in card
    crosses = [TITLES[finding["question"]][0] for finding in found if finding["answer"] is False]
    title = next(line for line in card.splitlines() if line.startswith("# "))
    assert all(cross in title for cross in crosses)
    assert "warning: answers on forget documents" in printed.err
    assert "is this how it was asked in training? --question-template" in printed.err
    before = Scores.from_dict(json.loads((run / "evaluations/step_000000.json").read_text()))
    assert before.settings["chat_questions"]
    assert "questions are asked as user turns of the tokenizer's chat template" in page
    prompts = [item["prompt"] for item in before.items_of("verbmem_f")]
    assert any(prompt.startswith("[user] Tell me.") for prompt in prompts), "conversations are in the template's form"
