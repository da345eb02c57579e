"""A new user's story: a few personal records that a model knows by heart are to be forgotten."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from personal_records import make
from unteach.corpora import micro
from unteach.evaluation.metrics import LOSS_AUC
from unteach.evaluation.verdict import TITLES

pytestmark = pytest.mark.slow  # a quarter of an hour in all
MARKS = {True: "✓", False: "✗", None: "?"}


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    assert make(folder) < 0.1, "the model does not know the records"
    return folder


def forget(model, documents, out, *flags):
    """What a user types; gives the result and its four answers, which stand in every place that tells them."""
    command = [sys.executable, "-m", "unteach", "forget", model, "--documents", documents, "--out", out]
    ended = subprocess.run([*map(str, command), *map(str, flags)], capture_output=True, text=True, timeout=1800)
    assert ended.returncode in (0, 3), ended.stderr
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert "so few show" in ended.stderr
    answers = {finding["question"]: finding["answer"] for finding in result["verdict"]}
    assert set(answers) == set(TITLES)
    assert result["forgotten"] == (ended.returncode == 0)
    assert not (result["forgotten"] and answers["no longer recited"] is False), "the rule is denied where it looks"
    card = (out / "model" / "README.md").read_text(encoding="utf-8")
    page = html.unescape(re.sub(r"<[^>]*>", " ", (out / "report.html").read_text(encoding="utf-8")))
    for question, answer in answers.items():
        titles = dict(zip((True, False, None), (question, *TITLES[question]), strict=True))
        for place in (card, page, ended.stdout):
            said = {each for each in titles if re.search(rf"{re.escape(MARKS[each])}\s+{titles[each]}\b", place)}
            assert said == {answer}, (question, place)
    return result, answers


class Measured:
    """A saved model looked at with nothing of ours: Transformers alone."""

    def __init__(self, model, data):
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        texts = {part: [f.read_text().strip() for f in sorted((data / part).iterdir())] for part in PARTS}
        self.recited = {part: float(np.mean([self.words_right(text) for text in texts[part]])) for part in PARTS}
        loss = {part: np.array([self.loss(text) for text in texts[part]]) for part in PARTS}
        self.auc = float(np.mean(loss["unseen"][:, None] < loss["records"][None, :]))
        self.general = float(np.mean([self.loss(text[:800]) for text in micro.documents("general")[:40]]))

    @torch.no_grad()
    def words_right(self, text):
        """Share of the next four words that are said in their places, after a third and two thirds of a text."""
        words, right = text.split(), []
        for cut in (len(words) // 3, 2 * len(words) // 3):
            ids = self.tokenizer(" ".join(words[:cut]), return_tensors="pt")["input_ids"]
            output = self.model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
            said = self.tokenizer.decode(output, skip_special_tokens=True).split()
            said += [""] * 4
            right += [word == other for word, other in zip(words[cut : cut + 4], said, strict=False)]
        return np.mean(right)

    @torch.no_grad()
    def loss(self, text):
        """Mean nats per token."""
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"][:, :256]
        return float(self.model(input_ids=ids, labels=ids).loss)


PARTS = ("records", "kept", "unseen")


def agree(answers, result, before, after):
    """The four answers against the independent measurement: what it sees clearly may not be denied."""
    chance = after.recited["unseen"]
    assert before.recited["records"] > 0.9
    if answers["no longer recited"]:
        assert after.recited["records"] <= chance + 0.25
    else:  # on the safe side: alone, records are compared with prose, and the form that all records share is no recital
        assert after.recited["records"] > chance - (0 if LOSS_AUC in result["after"] else 0.1)
    assert answers["no longer known"] is None, "no question was given"
    if LOSS_AUC in result["after"]:
        assert result["after"][LOSS_AUC] == pytest.approx(after.auc, abs=0.05)
        if answers["no longer detectable"]:
            assert abs(after.auc - 0.5) < 0.3
    else:
        assert answers["no longer detectable"] is None
    risen, fallen = after.general - before.general, before.recited["kept"] - after.recited["kept"]
    if answers["rest kept"]:
        assert risen < 0.15
        assert fallen < 0.2
    elif answers["rest kept"] is False:
        assert risen > 0.05 or fallen > 0.05


def test_twelve_records(taught, tmp_path):
    """With nothing but the records, and with records to keep and never-seen ones: every place says what is so."""
    before = Measured(taught / "model", taught)
    kept = ("--keep", taught / "kept", "--holdout", taught / "unseen")
    for name, flags in (("alone", ()), ("keep", kept)):
        result, answers = forget(taught / "model", taught / "records", tmp_path / name, *flags)
        after = Measured(tmp_path / name / "model", taught)
        print(name, answers, before.recited, after.recited, after.auc, before.general, after.general, result["stop"])
        agree(answers, result, before, after)
        assert (answers["no longer detectable"] is None) == (name == "alone")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_records_end_by_themselves(taught, tmp_path, count):
    for file in sorted((taught / "records").iterdir())[:count]:
        (tmp_path / "few").mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / "few")
    result, answers = forget(taught / "model", tmp_path / "few", tmp_path / "run")
    assert result["stop"]["rule"] != "max_steps"
    assert answers["no longer recited"] is not None
    assert result["after"]["verbmem_f"] < 0.5 * result["before"]["verbmem_f"]
