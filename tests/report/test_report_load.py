from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from run_folders import TARGET, make_references, make_run, result, write_json

from unteach.report.load import clean, load, number


def test_run_folder_is_read_whole(tmp_path: Path) -> None:
    run = load([make_run(tmp_path / "run", steps=40, every=20)]).runs[0]
    assert (run.name, run.seed, run.last_step) == ("mt-nlul-kl", 0, 40)
    assert [evaluation.step for evaluation in run.evaluations] == [0, 20, 40]
    assert len(run.steps) == 40
    assert run.before is not None
    assert run.before.get("verbmem_f") == TARGET["verbmem_f"]
    assert run.config["forget"]["loss"] == "nlul"
    assert run.notes == ()


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "my-run", steps=4, every=4)
    for file in (folder / "result.json", folder / "config.yaml", *(folder / "evaluations").iterdir()):
        file.unlink()
    monkeypatch.chdir(folder)
    assert load([Path()]).runs[0].name == "my-run"


def test_kept_model_is_the_one_at_the_stop_rules_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=60, every=20)
    outcome = json.loads((folder / "result.json").read_text())
    write_json(folder / "result.json", outcome | {"stop": {"rule": "r", "reason": "crossed", "step": 40}})
    run = load([folder]).runs[0]
    assert run.after is not None
    assert run.after.step == run.last_step == 40


def test_scores_file_in_each_form(tmp_path: Path) -> None:
    one = write_json(tmp_path / "one.json", result("a", TARGET))
    several = write_json(tmp_path / "list.json", [result("b", TARGET), result("c", {"verbmem_f": 3.0})])
    inputs = load([one, several, make_references(tmp_path / "references.json"), one])
    assert [r.name for r in inputs.results] == ["a", "b", "c", "target", "retrained"]
    assert inputs.results[2].get("verbmem_f") == 3.0
    assert inputs.results[2].get("knowmem_f") is None


def test_nan_none_and_bare_numbers_are_values_or_gaps(tmp_path: Path) -> None:
    content = result("a", {"verbmem_f": math.nan, "knowmem_f": None})
    content["metrics"]["plain"] = 4
    content["metrics"]["huge"] = 10**400
    loaded = load([write_json(tmp_path / "s.json", content)]).results[0]
    assert loaded.get("verbmem_f") is None
    assert loaded.get("knowmem_f") is None
    assert loaded.get("plain") == 4.0
    assert loaded.get("huge") is None


def test_half_written_last_line_is_noted_not_fatal(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=10, every=10)
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text()[:-25])
    (folder / "result.json").unlink()
    run = load([folder]).runs[0]
    assert len(run.steps) == 9
    assert "half written" in run.notes[0]
    assert "no result.json" in run.notes[1]


def test_after_a_resume_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"step": 1, "nll_forget": 1.0}, {"step": 2, "nll_forget": 2.0}, {"step": 2, "nll_forget": 5.0}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [row["nll_forget"] for row in load([folder]).runs[0].steps] == [1.0, 5.0]


def test_what_the_stop_rule_saw_is_drawn_over_the_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=40, every=20)
    assert [step for step, _ in load([folder]).runs[0].over_steps("verbmem_f")] == [0, 20, 40]
    rows = [{"step": step, "verbmem_f": 90.0 - step} for step in (0, 5, 10)]
    (folder / "evaluations" / "stop.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = load([folder]).runs[0]
    assert run.over_steps("verbmem_f") == [(0, 90.0), (5, 85.0), (10, 80.0)]
    assert [step for step, _ in run.over_steps("knowmem_f")] == [0, 20, 40], "the rule did not ask"


def test_every_problem_is_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    nested = tmp_path / "nested"
    make_run(nested / "inner", steps=2, every=2)
    broken = make_run(tmp_path / "broken", steps=4, every=4)
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    (broken / "metrics.jsonl").write_text("\n".join([lines[0], "{oops", *lines[2:]]))
    (broken / "evaluations" / "step_000004.json").write_text('{"schema": "unteach.scores/1",\n "name": ')
    (broken / "config.yaml").write_text("a: 1\nb: [2\n")
    foreign = write_json(tmp_path / "foreign.json", {"schema": "other/7", "metrics": {}})
    wrong = write_json(tmp_path / "wrong.json", {"metrics": {"verbmem_f": "high"}})
    none = write_json(tmp_path / "none.json", {"results": []})
    with pytest.raises(ValueError, match="no such file") as error:
        load([tmp_path / "missing", empty, nested, broken, foreign, wrong, none])
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "missing: no such file or folder",
        "empty: not a run folder",
        "run folders inside it: inner",
        "metrics.jsonl, line 2: not valid JSON",
        "step_000004.json, line 2: not valid JSON",
        "config.yaml, line 3: not valid YAML",
        "schema is 'other/7', this version reads 'unteach.scores/1'",
        "metrics.verbmem_f is 'high', expected a number or an object",
        "none.json: holds no results",
    ):
        assert part in message


def test_no_runs_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one run folder"):
        load([])


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "3", True, [], 10**400])
def test_number_takes_finite_numbers_only(value: object) -> None:
    assert number(value) is None


def test_clean_removes_what_no_page_can_hold() -> None:
    dirty = {"a\x00": ["\x1b[31m", "\ud800", "naïve 日本 🙂\n\t"]}
    assert clean(dirty) == {"a�": ["�[31m", "�", "naïve 日本 🙂\n\t"]}
    assert "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace") != clean("\ud800")
