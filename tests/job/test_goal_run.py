"""A whole job whose goal is measured on holdout documents: what is kept of it, resumed, and made again."""

import dataclasses
import json

import pytest
import yaml

from faults.small_run import make_inputs, paused_run, result_of, run, settings
from steps import FORGET, learned
from tiny_models import SENTENCES
from unteach.config import ForgetConfig, Method
from unteach.job import run_forget
from unteach.job.same_run import START, StartRecord
from unteach.models import load_model
from unteach.settings import from_yaml


def write(file, texts):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(file)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A target that has learned the documents, the base model, and documents to keep and never seen."""
    folder = make_inputs(tmp_path_factory.mktemp("inputs"))
    model, tokenizer = load_model(str(folder / "model"))
    learned(model, FORGET[:4])
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    others = [" ".join(reversed(sentence.split()[n % 4 :])) for n in range(24) for sentence in SENTENCES]
    write(folder / "keep.jsonl", [f"Kept {n}: {text}" for n, text in enumerate(others)])
    write(folder / "holdout.jsonl", [f"Unseen {n}: {text}" for n, text in enumerate(others)])
    return folder


def deep(inputs, **more):
    """What gives a run the goal never_seen."""
    given = {"model": str(inputs / "target"), "base": str(inputs / "model"), "method": Method(lr=1e-3)}
    return given | {name: str(inputs / f"{name}.jsonl") for name in ("keep", "holdout")} | more


def test_a_run_keeps_its_line_goes_on_and_can_be_made_again(inputs, tmp_path, monkeypatch):
    said = []
    run(inputs, tmp_path / "whole", said=said, **deep(inputs))
    (goal,) = [line for line in said if line.startswith("goal:")]
    saved = yaml.safe_load((tmp_path / "whole/config.yaml").read_text())["method"]
    assert (saved["goal"], saved["alpha_growth"], saved["loss_options"].pop("pull")) == ("never_seen", 0.02, "gate")
    line = "log-odds of {margin:.3g} + {slope:.3g} times".format(**saved["loss_options"])
    assert line in goal
    assert line in (tmp_path / "whole/run.log").read_text()

    measured = json.loads((tmp_path / "whole/start.json").read_text())["measured"]
    assert measured == ["method.loss_options.margin", "method.loss_options.slope", "method.alpha"]

    paused_run(inputs, tmp_path / "paused", monkeypatch, **deep(inputs))
    again = []
    run(inputs, tmp_path / "paused", resume=True, said=again, **deep(inputs))
    assert result_of(tmp_path / "paused") == result_of(tmp_path / "whole")
    (method,) = [words for words in again if words.startswith("method:")]
    assert line in method, "a run that goes on says its goal"

    config = dataclasses.replace(from_yaml(ForgetConfig, tmp_path / "whole/config.yaml"), out=str(tmp_path / "again"))
    run_forget(config, say=again.append, measurements=("nll_general",))
    assert result_of(tmp_path / "again") == result_of(tmp_path / "whole")


def test_what_an_earlier_version_began_goes_on(inputs, tmp_path, monkeypatch):
    """Settings that came later are not in its record; the run has what its own settings say."""
    given = deep(inputs, method=Method(optimizer="adamw", loss="match", lr=1e-3, warmup=0))
    run(inputs, tmp_path / "whole", **given)
    paused = paused_run(inputs, tmp_path / "paused", monkeypatch, **given)
    start = StartRecord.read(paused)
    earlier = {name: value for name, value in start.config["method"].items() if name != "goal"}
    dataclasses.replace(start, config=start.config | {"method": earlier}).write(paused)
    assert "goal" not in json.loads((paused / START).read_text())["config"]["method"]
    file = paused / "config.yaml"
    file.write_text("".join(part for part in file.read_text().splitlines(keepends=True) if "goal:" not in part))
    run(inputs, paused, resume=True, **given)
    assert result_of(paused) == result_of(tmp_path / "whole")


def test_the_goal_has_to_be_measurable(inputs):
    config = settings(inputs, "run", **deep(inputs)).chosen()
    assert (config.method.loss, config.method.goal) == ("match", "never_seen")
    assert settings(inputs, "run", **deep(inputs, holdout=None)).chosen().method.goal == "base"
