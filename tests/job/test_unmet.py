"""A run whose stop rule is never met keeps the model nearest to it, or the last one, and says which."""

import io
import json
import shlex
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tiny_models import SENTENCES, save_tiny
from unteach.cli import main
from unteach.report.load import load

NUMBERS = (
    "--batch 4 --general-batch 4 --general-tokens 24 --evaluate-every 2 --probes 4 --alpha 5 --lr 0.5 --damping 0.1 "
    "--teacher-rate 1 --stop.plateau 0 --stop.utility-floor inf --stop.metric 'nll_general >= 9'"
)
"""General text costs less at every look, so that the first is nearest to this rule, which asks that it cost more."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Of three runs, without plan and page: status, JSON, lines on the terminal, weights, and what a report reads."""
    folder = tmp_path_factory.mktemp("unmet")
    save_tiny(folder / "model")
    backwards = [" ".join(reversed(sentence.split())) for sentence in SENTENCES]
    texts = {
        "documents": [f"{sentence} It was number {n} in {1900 + n}." for n, sentence in enumerate(SENTENCES * 3)],
        "general": [f"{first} {second}" for first in backwards * 3 for second in backwards],
    }
    for name, lines in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))

    def run(name, *words):
        start = ["forget", folder / "model", "--documents", folder / "documents.jsonl", "--out", folder / name]
        given = [*map(str, start), "--general", str(folder / "general.jsonl"), *shlex.split(NUMBERS), *words, "--json"]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = main(given)
        assert status in (0, 3), err.getvalue()
        weights = load_file(folder / name / "model/model.safetensors")
        return status, json.loads(out.getvalue()), err.getvalue(), weights, load([folder / name]).runs[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unteach.job.command.planning.plan", lambda config: SimpleNamespace(problems=list))
        patch.setattr("unteach.report.write_report", lambda runs, out: out)
        return {
            "nearest": run("nearest", "--max-steps", "6"),
            "last": run("last", "--max-steps", "6", "--stop.unmet", "last"),
            "two steps": run("short", "--max-steps", "2"),
        }


@pytest.mark.parametrize(("name", "step"), [("nearest", 2), ("last", 6)])
def test_which_model_is_kept_is_said_everywhere(kept, name, step):
    status, result, said, _, read = kept[name]
    looks = dict(read.over_steps("nll_general"))
    assert looks[2] > looks[4] > looks[6]
    assert (status, result["forgotten"]) == (3, False)
    assert (result["steps"], result["stop"]["step"], result["stop"]["rule"]) == (step, step, "max_steps")
    assert read.last_step == step
    nearer = "step 2 was nearest to it" if step == 2 else "the last model, of step 6, is kept, though step 2 was nearer"
    for text in (said, read.failure):
        assert "the stop rule nll_general >= 9 was not met" in text
        assert nearer in text
        assert f"not met: nll_general {looks[step]:.4g} (wanted: >= 9)" in text
    assert f"stopped after {step} steps: " in said


def test_a_receipt_of_a_run_without_a_floor_is_written(kept):
    receipt = json.loads((kept["last"][4].path / "receipt.json").read_text())
    assert receipt["settings"]["stop"] | {"utility_floor": "Infinity", "unmet": "last"} == receipt["settings"]["stop"]


def test_the_weights_are_those_of_that_step(kept):
    nearest, last, short = (kept[name][3] for name in ("nearest", "last", "two steps"))
    assert all(torch.equal(weight, short[name]) for name, weight in nearest.items())
    assert any(not torch.equal(weight, nearest[name]) for name, weight in last.items())
