"""From run folders and scores files to rows, examples and CSV."""

import csv
import io
import json
import math
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from run_folders import (
    AUC,
    ENDS,
    RETRAINED,
    TARGET,
    changed,
    make_references,
    make_run,
    result,
    write_json,
    write_lines,
)

from unteach.evaluation.formulas import Metric, longest_common_subsequence
from unteach.report.examples import choose, common_subsequence, recited, shorten
from unteach.report.load import clean, load, number, published, published_points
from unteach.report.plots import evaluation_figures
from unteach.report.style import look
from unteach.report.tables import aggregate, csv_cell, csv_table, methods_of, role_of, sections_of
from unteach.writing import format_number


def sections(*paths):
    return sections_of(methods_of(load(paths)))


def one_section(*paths):
    (section,) = sections(*paths)
    return section


def trained_labels(*paths):
    return [method.label for method in methods_of(load(paths)) if method.role == "method"]


def test_run_folder_is_read_whole(tmp_path):
    run = load([make_run(tmp_path / "run", steps=40)]).runs[0]
    assert (run.name, run.seed, run.last_step, run.notes) == ("mt-nlul-kl", 0, 40, ())
    assert [evaluation.step for evaluation in run.evaluations] == [0, 20, 40]
    assert len(run.steps) == 40
    assert run.before["verbmem_f"] == TARGET["verbmem_f"]
    assert run.config["forget"]["loss"] == "nlul"


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    write_lines(tmp_path / "my-run" / "metrics.jsonl", [{"step": 1}])
    monkeypatch.chdir(tmp_path / "my-run")
    assert load([Path()]).runs[0].name == "my-run"


def test_kept_model_is_the_one_at_the_stop_rules_step(tmp_path):
    folder = make_run(tmp_path / "run", steps=60)
    changed(folder / "result.json", stop={"rule": "r", "reason": "crossed", "step": 40})
    run = load([folder]).runs[0]
    assert run.after.step == run.last_step == 40


def test_scores_file_in_each_form(tmp_path):
    one = write_json(tmp_path / "one.json", result("a", TARGET))
    several = write_json(tmp_path / "list.json", [result("b", TARGET), result("c", {"verbmem_f": 3.0})])
    results = load([one, several, make_references(tmp_path / "references.json"), one]).results
    assert [r.name for r in results] == ["a", "b", "c", "target", "retrained"]
    assert dict(results[2]) == {"verbmem_f": 3.0}


def test_nan_none_and_bare_numbers_are_values_or_gaps(tmp_path):
    content = result("a", {"verbmem_f": math.nan, "knowmem_f": None})
    content["metrics"] |= {"plain": 4, "huge": 10**400}
    assert dict(load([write_json(tmp_path / "s.json", content)]).results[0]) == {"plain": 4.0}


def test_half_written_last_line_is_noted_not_fatal(tmp_path):
    folder = make_run(tmp_path / "run", steps=10, every=10)
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text()[:-25])
    (folder / "result.json").unlink()
    run = load([folder]).runs[0]
    assert len(run.steps) == 9
    assert "half written" in run.notes[0]
    assert "no result.json" in run.notes[1]


def test_after_a_resume_the_later_line_of_a_step_counts(tmp_path):
    rows = [{"step": 1, "nll_forget": 1.0}, {"step": 2, "nll_forget": 2.0}, {"step": 2, "nll_forget": 5.0}]
    folder = write_lines(tmp_path / "run" / "metrics.jsonl", rows).parent
    assert [row["nll_forget"] for row in load([folder]).runs[0].steps] == [1.0, 5.0]


def test_what_the_stop_rule_saw_is_drawn_over_the_steps(tmp_path):
    folder = make_run(tmp_path / "run", steps=40)
    assert [step for step, _ in load([folder]).runs[0].over_steps("verbmem_f")] == [0, 20, 40]
    rows = [{"step": step, "verbmem_f": 90.0 - step} for step in (0, 5, 10)]
    write_lines(folder / "evaluations" / "stop.jsonl", rows)
    run = load([folder]).runs[0]
    assert run.over_steps("verbmem_f") == [(0, 90.0), (5, 85.0), (10, 80.0)]
    assert [step for step, _ in run.over_steps("knowmem_f")] == [0, 20, 40], "the rule did not ask"


def test_the_stop_rules_scores_are_drawn_with_what_they_had_to_reach(tmp_path):
    folder = make_run(tmp_path / "run")
    assert evaluation_figures(one_section(folder)) == [], "before and after alone are no curve"
    seen = {"nll_retain": 0.1, "distance": 2.0}
    rows = [{"step": step, "verbmem_f": 90.0 - step, AUC: step / 20, **seen} for step in (0, 5, 10)]
    write_lines(folder / "evaluations" / "stop.jsonl", rows)
    text = f"{AUC} >= 0.4488 and not beyond 0.55 (never-seen text) and verbmem_f <= 18.2 (its own) was not met"
    text += f"; not met: {AUC} 0.3 (wanted: >= 0.4488 and not beyond 0.55)"
    changed(folder / "result.json", stop={"rule": "max_steps", "reason": text, "step": 20})
    assert load([folder]).runs[0].goals == {AUC: 0.4488, "verbmem_f": 18.2}
    lines = {
        figure.name: [word for word in ("retrained", "chance", "stop rule") if f">{word}<" in figure.svg]
        for figure in evaluation_figures(one_section(folder, make_references(tmp_path / "references.json")))
    }
    assert lines == {
        "steps-verbmem_f": ["retrained", "stop rule"],
        "steps-nll_retain": [],
        f"steps-{AUC}": ["retrained", "chance", "stop rule"],
        "steps-distance": [],
    }


def test_every_problem_is_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "nested" / "inner", steps=2, every=2)
    broken = make_run(tmp_path / "broken", steps=4, every=4)
    (broken / "metrics.jsonl").write_text('{"step": 1}\n{oops\n{"step": 3}')
    (broken / "evaluations" / "step_000004.json").write_text('{"schema": "unteach.scores/1",\n "name": ')
    (broken / "config.yaml").write_text("a: 1\nb: [2\n")
    (broken / "result.json").write_text("[1]")
    write_json(tmp_path / "foreign.json", {"schema": "other/7", "metrics": {}})
    write_json(tmp_path / "wrong.json", {"metrics": {"verbmem_f": "high"}})
    write_json(tmp_path / "none.json", {"results": []})
    (tmp_path / "deep.json").write_text("[" * 100_000)
    names = ("missing", "empty", "nested", "broken", "foreign.json", "wrong.json", "none.json", "deep.json")
    with pytest.raises(ValueError, match="no such file") as error:
        load([tmp_path / name for name in names])
    message = str(error.value)
    assert "\n" not in message
    for part in (
        "missing: no such file or folder",
        "empty: not a run folder",
        "run folders inside it: inner",
        "metrics.jsonl, line 2: not valid JSON",
        "step_000004.json, line 2: not valid JSON",
        "config.yaml, line 3: not valid YAML",
        "result.json: expected an object, found list",
        "schema is 'other/7', this version reads 'unteach.scores/1'",
        "metrics.verbmem_f is 'high', expected a number or an object",
        "none.json: holds no results",
        "deep.json: not readable",
    ):
        assert part in message
    with pytest.raises(ValueError, match="at least one run folder"):
        load([])


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "3", True, [], 10**400])
def test_number_takes_finite_numbers_only(value):
    assert number(value) is None


def test_clean_removes_what_no_page_can_hold():
    dirty = {"a\x00": ["\x1b[31m", "\ud800", "naïve 日本 🙂\n\t"]}
    assert clean(dirty) == {"a�": ["�[31m", "�", "naïve 日本 🙂\n\t"]}


def measured(value, low=None, high=None):
    return Metric(value, low, high, 1, None, "")


def test_mean_std_and_interval_by_hand():
    cell = aggregate([measured(10.0, 8.0, 12.0), measured(14.0, 11.0, 17.0)])
    assert (cell.mean, cell.low, cell.high) == (12.0, 9.5, 14.5)
    assert cell.std == pytest.approx(8**0.5)  # ((10-12)² + (14-12)²) / (2 - 1)
    assert (cell.text(), cell.interval()) == ("12.0 (2.8)", "[9.5, 14.5]")
    assert aggregate([measured(1.0, 0.5, 1.5), measured(2.0)]).low is None, "only where every seed has one"
    assert aggregate([]).mean is None
    assert aggregate([measured(3.0)]).std is None


def test_numbers_for_people():
    given = {None: "–", -3.14: "−3.1", -0.01: "0.0", 0.0: "0.0", 12345678.0: "1.23e+07", -100.04: "−100.0"}
    assert [format_number(value) for value in given] == list(given.values())
    given = {0.0004: "0.000", 3.4567: "3.457", 10.2345: "10.23", 9.9999: "10.00", 123.456: "123.5", 12345.6: "12,346"}
    assert [format_number(value, 3) for value in given] == list(given.values()), "at most four digits"


def test_seeds_of_one_method_are_one_row_and_references_come_first(tmp_path):
    names = [(name, seed) for name in ("mt-nlul-kl", "adamw-npo-kl") for seed in (0, 1, 2)]
    runs = [make_run(tmp_path / f"{name}{seed}", name, seed) for name, seed in names]
    section = one_section(*runs, make_references(tmp_path / "references.json"))
    assert [(m.label, m.role, len(m.members)) for m in section.methods] == [
        ("target", "target", 1),  # measured in six runs and the scores file, shown once
        ("retrained", "retrained", 1),
        ("mt-nlul-kl", "method", 3),
        ("adamw-npo-kl", "method", 3),
    ]
    mean = statistics.fmean(run.after["verbmem_f"] for run in load(runs[:3]).runs)
    assert section.cells("verbmem_f")["mt-nlul-kl"].mean == pytest.approx(mean)


def test_what_is_no_seed_of_one_method_has_a_label_of_its_own(tmp_path):
    plain, again = make_run(tmp_path / "plain"), make_run(tmp_path / "again")
    other = make_run(tmp_path / "other", seed=1, config={"damping": 5.0})
    books = make_run(tmp_path / "books", benchmark={"name": "muse-books"})
    same = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    name = "mt-nlul-kl"
    assert trained_labels(plain, other) == [f"{name} · damping 0.2", f"{name} · damping 5.0"]
    assert trained_labels(plain, again) == [f"{name} · plain", f"{name} · again"]
    assert trained_labels(*same) == [f"{name} · run · micro", f"{name} · run · micro (2)"]
    assert trained_labels(plain, books) == [f"{name} · micro", f"{name} · muse-books"]


def test_what_was_measured_for_each_seed_tells_no_methods_apart(tmp_path):
    """The mean teacher measures its step sizes with each seed anew: given, they would be other settings."""
    runs = [make_run(tmp_path / f"run{seed}", seed=seed, config={"damping": 0.2 + seed / 100}) for seed in (0, 1, 2)]
    assert len(one_section(*runs).methods) == 1 + 3
    for run in runs:
        (run / "start.json").write_text(json.dumps({"measured": ["damping"]}), encoding="utf-8")
    (row,) = [method for method in one_section(*runs).methods if method.role == "method"]
    assert (row.label, len(row.members)) == ("mt-nlul-kl", 3)


def test_a_reference_measured_twice_is_one_row_with_all_that_is_known(tmp_path):
    """Without a hash of the weights a model is known by what was measured of it, up to rounding."""
    fewer = {key: value * (1 + 1e-7) for key, value in TARGET.items() if key != "privleak"}
    results = [result("target", values, seed=None, model_sha256=None) for values in (fewer, TARGET)]
    rows = methods_of(load([write_json(tmp_path / "s.json", results)]))
    assert [(row.title, row.cell("privleak").mean) for row in rows] == [("before", TARGET["privleak"])]
    results[0]["metrics"]["verbmem_f"]["value"] = 50.0
    rows = methods_of(load([write_json(tmp_path / "s.json", results)]))
    assert len(rows) == 2, "another model"


def test_a_reference_in_the_run_folder_is_a_row(tmp_path):
    folder = make_run(tmp_path / "run")
    write_json(folder / "evaluations" / "reference.json", result("some model", RETRAINED))
    assert one_section(folder).first("retrained").cell("verbmem_f").mean == RETRAINED["verbmem_f"]


def test_other_data_is_another_section(tmp_path):
    other = {"name": "micro", "counts": {}, "data_sha256": "ff" * 32}
    found = sections(make_run(tmp_path / "a"), make_run(tmp_path / "b", benchmark=other))
    assert [(s.title, len(s.trained)) for s in found] == [("micro · data 6f1c6f1c", 1), ("micro · data ffffffff", 1)]


def test_best_is_marked_as_in_the_paper(tmp_path):
    named = {"target": TARGET, "retrained": RETRAINED} | ENDS
    section = one_section(write_json(tmp_path / "s.json", [result(name, values) for name, values in named.items()]))
    for metric, expected in {
        "verbmem_f": [],  # runs stop on it: lowest is not best
        "knowmem_f": ["mt-nlul-qkl"],
        "knowmem_r": ["mt-nlul-kl"],  # the retrained model is higher and no method
        "privleak": ["mt-nlul-qkl"],  # nearest to zero, on either side
        "nll_general": [],
    }.items():
        assert [label for label, cell in section.cells(metric).items() if cell.best] == expected, metric


def test_columns_where_privleak_is_missing_and_of_unknown_metrics(tmp_path):
    section = one_section(make_run(tmp_path / "run", drop=("privleak",)))
    assert section.privleak_missing
    assert section.columns[3] == "auc_forget_holdout_min_40"
    content = result("a", {"truth_ratio": 0.4, "forget_quality": 0.9})
    content["metrics"]["forget_quality"]["higher_is_better"] = True
    section = one_section(write_json(tmp_path / "s.json", content))
    assert section.columns == ("truth_ratio", "forget_quality")
    assert [section.info(column).arrow for column in section.columns] == ["↓", "↑"]


def test_roles_by_name():
    for role, names in {
        "target": ("target", "micro:target"),
        "retrained": ("MUSE-news_retrain", "models/retrained"),
        "method": ("mt-nlul-kl", "targeted"),
    }.items():
        assert {role_of(name) for name in names} == {role}


def test_csv_reads_back(tmp_path):
    section = one_section(*(make_run(tmp_path / f"r{seed}", seed=seed) for seed in (0, 1)))
    rows = list(csv.DictReader(io.StringIO(csv_table([section]))))
    assert [(row["method"], row["seed"], row["seeds"]) for row in rows] == [
        ("target", "all", "1"),
        ("mt-nlul-kl", "all", "2"),
        ("mt-nlul-kl", "0", "1"),
        ("mt-nlul-kl", "1", "1"),
    ]
    assert float(rows[1]["verbmem_f"]) == section.cells("verbmem_f")["mt-nlul-kl"].mean
    assert float(rows[1]["privleak_low"]) < float(rows[1]["privleak"])
    assert rows[0]["verbmem_f_std"] == ""


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-2", "@sum", "\t=1", "\r=1", " =HYPERLINK(1)", "\n=1"])
def test_csv_never_holds_a_formula(tmp_path, text):
    file = write_json(tmp_path / "s.json", result("x", {"verbmem_f": -1.5}) | {"name": text})
    rows = list(csv.reader(io.StringIO(csv_table([one_section(file)]))))
    assert rows[1][2] == csv_cell(text) == "'" + text.replace("\t", " ").replace("\r", " ").replace("\n", " ")
    assert rows[1][7] == "-1.5"  # a number stays one


def test_thirty_methods_can_be_told_apart_by_points_and_by_lines():
    looks = [look("method", index) for index in range(30)]
    assert len({(one.colour, one.marker) for one in looks}) == 30
    assert len({(one.colour, str(one.dash)) for one in looks}) == 30


def test_common_subsequence_is_longest_and_in_order():
    rng = random.Random(0)
    for _ in range(200):
        one, other = ("".join(rng.choices("abc", k=rng.randrange(8))) for _ in range(2))
        pairs = common_subsequence(one, other)
        assert len(pairs) == longest_common_subsequence(one, other), "the L of ROUGE-L"
        assert all(one[i] == other[j] for i, j in pairs)
        assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


def test_passages_and_single_words_are_marked():
    pieces = recited("The old bridge was closed on Monday.", "the OLD bridge, was it open on Tuesday?")
    assert pieces == (("the OLD bridge, was", "passage"), (" it open ", ""), ("on", "word"), (" Tuesday?", ""))


@pytest.mark.parametrize("output", ["", "   ", "no word matches", "<b>the</b> old\nbridge", "日本 old 🙂"])
def test_pieces_join_to_the_output(output):
    assert "".join(piece.text for piece in recited("the old bridge", output)) == output


def test_long_texts_are_cut_at_words():
    text = " ".join(f"w{i}" for i in range(10))
    assert shorten(text, 3) == "w0 w1 w2 …"
    assert shorten(text, 3, keep="end") == "… w7 w8 w9"
    assert shorten(text, 10) == text


IN_WORDS = ("mean teacher, NLUL loss, held by KL", "AdamW, NPO loss, held by KL")


def test_a_method_has_a_name_in_words(tmp_path):
    titles = [method.title for method in methods_of(load([make_run(tmp_path / "run")]))]
    assert titles == ["before", IN_WORDS[0]]
    other = make_run(tmp_path / "other", seed=1, config={"damping": 5.0})
    titles = [method.title for method in methods_of(load([tmp_path / "run", other]))]
    assert titles[1:] == [f"{IN_WORDS[0]} · damping 0.2", f"{IN_WORDS[0]} · damping 5.0"]
    file = write_json(tmp_path / "s.json", result("my own", TARGET))
    assert methods_of(load([file]))[0].title == "my own", "a name that is made otherwise stays"


def test_examples_compare_the_same_prompts(tmp_path):
    runs = [make_run(tmp_path / name, name) for name in ("mt-nlul-kl", "adamw-npo-kl")]
    recital, forgotten, retained = choose(one_section(*runs, make_references(tmp_path / "references.json")))
    assert (recital.metric, forgotten.metric, retained.metric) == ("verbmem_f", "knowmem_f", "knowmem_r")
    assert (recital.available, len(recital.examples)) == (5, 4)
    before = [example.answers[0].score for example in recital.examples]
    assert before == sorted(before, reverse=True)
    for example in recital.examples:
        assert [a.label for a in example.answers] == ["before", "retrained", *IN_WORDS]
    assert forgotten.examples[0].prompt.startswith("Question: ")
    assert "shown first" not in forgotten.examples[0].prompt  # few-shot examples are left out


LOGGED = {  # rows of Table 1 whose three runs are all among the published logs, by the name of the logs
    "MT + NLUL + KL": "news/mt/mt-kl",
    "MT + NLUL + QKL★": "news/mt/mt-qkl",  # the star row's figures are those of the logs with the plain name
    "AdamW + IT + KL": "news/baselines/adamw-it-kl",
    "AdamW + LL + KL": "news/baselines/adamw-ll-kl",
    "AdamW + NLUL + KL": "news/baselines/adamw-nlul-kl",
}


@pytest.mark.parametrize("name", LOGGED)
def test_table_one_is_the_mean_and_standard_error_of_the_logs(name):
    (row,) = (r for r in published()["paper"]["rows"] if (r["benchmark"], r["name"]) == ("muse-news", name))
    runs = [r["metrics"] for r in published()["paper_runs"]["runs"] if r["log"].rsplit("/", 1)[0] == LOGGED[name]]
    assert len(runs) == 3
    for metric in ("verbmem_f", "knowmem_f", "knowmem_r", "mmlu_val"):
        values = [metrics[metric] for metrics in runs]
        assert row["metrics"][metric]["value"] == pytest.approx(statistics.fmean(values), abs=0.06)
        assert row["metrics"][metric]["spread"] == pytest.approx(statistics.pstdev(values) / 3**0.5, abs=0.06)


def test_the_rows_of_one_set_of_runs_say_so_where_they_are_shown():
    """Table 1's QKL and QKL★ are the same three runs, at step 400 and at their ends, wherever a row or point stands."""
    noted = {r["name"]: r["note"] for r in published()["paper"]["rows"] if "note" in r}
    assert noted == {
        "MT + NLUL + QKL": "step 400 of three runs",
        "MT + NLUL + QKL★": "last epoch of the same runs as QKL",
    }
    points = [point for name in ("muse-news", "muse-books") for point in published_points(name) if point.note]
    assert {point.name: point.note for point in points} == noted
    assert len(points) == 2, "not the row of that name on MUSE-Books"


def test_published_curves_are_whole_and_points_belong_to_exactly_named_benchmarks():
    for run in published()["paper_runs"]["runs"]:
        assert len({len(values) for values in run["curve"].values()}) == 1, run["log"]
        assert run["curve"]["step"] == sorted(run["curve"]["step"])
    assert [p.number for p in published_points("muse-news") if p.number] == list(range(1, 17))
    assert published_points("muse-books")
    assert published_points("micro") == published_points("muse-news-text") == []
