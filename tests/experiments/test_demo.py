"""The demo: which runs it makes, and the rows that others read; the runs themselves are made up here."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from unteach.errors import InputError
from unteach.evaluation.formulas import Metric
from unteach.evaluation.scores import Scores
from unteach.experiments.demo import DemoOptions, run

METRICS = ("verbmem_f", "knowmem_f", "knowmem_r", "privleak", "nll_general", "degenerate")


@pytest.fixture
def runs(monkeypatch):
    """Stands for the forget job; returns the configs that it got and the names of what was measured."""
    configs: list = []
    measured: list = []

    def forget(config, *, shared):
        for name in ("stop before", "stop reference", "final step_000000", "final reference"):
            shared(name, lambda name=name: measured.append((Path(config.out).name, name)))
        configs.append(config)
        folder = Path(config.out) / "evaluations"
        folder.mkdir(parents=True)
        metrics = {name: Metric(float(place), None, None, 1, None, "percent") for place, name in enumerate(METRICS)}
        records = {"verbmem_f": [{"prompt": "p", "expected": "e", "output": "o", "score": 1.0}]}
        for file in ("step_000000", "reference", "step_000007"):
            Scores("micro", metrics, records).write(folder / f"{file}.json")
        return SimpleNamespace(steps=7, seconds=1.25)

    monkeypatch.setattr("unteach.job.run_forget", forget)
    monkeypatch.setattr("unteach.report.write_report", lambda folders, path: path)
    return configs, measured


def test_the_rows_of_the_demo(runs, tmp_path):
    configs, measured = runs
    result = run(DemoOptions(out=tmp_path / "demo", seed=3, json=True))
    assert [row["name"] for row in result["rows"]] == ["target", "retrained", "mt-nlul-kl", "adamw-npo-kl", "deep"]
    assert all(set(row) == {"name", "seed", *METRICS, "steps", "seconds"} for row in result["rows"])
    assert {row["seed"] for row in result["rows"]} == {3}
    assert [row["steps"] for row in result["rows"]] == [None, None, 7, 7, 7]
    assert result["report"] == str(tmp_path / "demo" / "report.html")
    assert json.dumps(result)
    deep = configs[-1].chosen()
    assert (deep.method.loss, deep.method.optimizer) == ("match", "adamw")
    assert (deep.keep, deep.base, deep.holdout) == ("micro:retain", "micro:base", "micro:holdout")
    assert all((config.keep, config.base) == (None, None) for config in configs[:-1])
    finals = [entry for entry in measured if entry[1].startswith("final")]
    assert [name for name, _ in finals] == ["mt-nlul-kl"] * 2  # the target and the retrained model are measured once
    assert ("deep", "stop before") in measured  # its rule looks at more than theirs


def test_all_methods_of_the_paper_can_be_shown(runs, tmp_path):
    run(DemoOptions(out=tmp_path / "demo", all=True, json=True))
    names = [Path(config.out).name for config in runs[0]]
    assert names[:2] == ["mt-nlul-kl", "adamw-npo-kl"]
    assert names[-1] == "deep"
    assert len(names) == 9
    assert {Path(c.out).name: c.base for c in runs[0] if c.base} == {"adamw-it-kl": "micro:small", "deep": "micro:base"}


def test_a_folder_that_is_used_is_refused(runs, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"):
        run(DemoOptions(out=tmp_path))
