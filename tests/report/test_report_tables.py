from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from run_folders import ENDS, RETRAINED, TARGET, make_references, make_run, result, write_json

from unteach.evaluation.formulas import Metric
from unteach.report.exports import csv_cell, csv_table
from unteach.report.load import load
from unteach.report.style import look
from unteach.report.tables import Section, aggregate, format_cell, format_interval, methods_of, role_of, sections_of
from unteach.writing import format_number


def one_section(*paths: Path) -> Section:
    (section,) = sections_of(methods_of(load(paths)))
    return section


def scores(file: Path, *results: dict[str, object]) -> Path:
    return write_json(file, {"results": list(results)})


def measured(value: float, low: float | None = None, high: float | None = None) -> Metric:
    return Metric(value, low, high, 1, None, "")


def test_mean_std_and_interval_by_hand() -> None:
    cell = aggregate([measured(10.0, 8.0, 12.0), measured(14.0, 11.0, 17.0)])
    assert (cell.mean, cell.seeds, cell.low, cell.high) == (12.0, 2, 9.5, 14.5)
    assert cell.std == pytest.approx(8**0.5)  # ((10-12)² + (14-12)²) / (2 - 1)
    assert format_cell(cell) == "12.0 (2.8)"
    assert format_interval(cell) == "[9.5, 14.5]"


def test_interval_only_where_every_seed_has_one() -> None:
    assert aggregate([measured(1.0, 0.5, 1.5), measured(2.0)]).low is None
    assert aggregate([]).mean is None
    assert aggregate([measured(3.0)]).std is None


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (-3.14, "−3.1"), (-0.01, "0.0"), (0.0, "0.0"), (12345678.0, "1.23e+07")]
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert format_number(value) == text


def test_seeds_of_one_method_are_one_row_and_references_come_first(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{name}{seed}", name, seed, steps=20, every=20)
        for name in ("mt-nlul-kl", "adamw-npo-kl")
        for seed in (0, 1, 2)
    ]
    section = one_section(*runs, make_references(tmp_path / "references.json"))
    assert [(m.label, m.role, len(m.members)) for m in section.methods] == [
        ("target", "target", 1),  # measured in six runs and the scores file, shown once
        ("retrained", "retrained", 1),
        ("mt-nlul-kl", "method", 3),
        ("adamw-npo-kl", "method", 3),
    ]
    values = [load([run]).runs[0].after for run in runs[:3]]
    mean = sum(v["verbmem_f"] for v in values if v) / 3
    assert section.cells("verbmem_f")["mt-nlul-kl"].mean == pytest.approx(mean)


def test_runs_with_other_settings_or_the_same_seed_are_not_averaged(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", steps=20, every=20)
    other = make_run(tmp_path / "other", seed=1, steps=20, every=20, config={"damping": 5.0})
    labels = [m.label for m in one_section(plain, other).trained]
    assert labels == ["mt-nlul-kl · damping 0.2", "mt-nlul-kl · damping 5.0"]
    again = make_run(tmp_path / "again", steps=20, every=20)
    labels = [m.label for m in one_section(plain, again).trained]
    assert labels == ["mt-nlul-kl · plain", "mt-nlul-kl · again"]


def test_labels_are_unique(tmp_path: Path) -> None:
    same = [make_run(tmp_path / parent / "run", steps=20, every=20) for parent in ("a", "b")]
    other = {"name": "muse-books", "counts": {}, "data_sha256": ""}
    books = make_run(tmp_path / "books", steps=20, every=20, benchmark=other)
    news = make_run(tmp_path / "own", steps=20, every=20)
    assert [m.label for m in one_section(*same).trained] == ["mt-nlul-kl · run · micro", "mt-nlul-kl · run · micro (2)"]
    labels = [m.label for m in methods_of(load([news, books])) if m.role == "method"]
    assert labels == ["mt-nlul-kl · micro", "mt-nlul-kl · muse-books"]


def test_a_reference_in_the_run_folder_is_a_row(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, every=20)
    write_json(folder / "evaluations" / "reference.json", result("some model", RETRAINED))
    retrained = one_section(folder).first("retrained")
    assert retrained is not None
    assert retrained.cell("verbmem_f").mean == RETRAINED["verbmem_f"]


def test_other_data_is_another_section(tmp_path: Path) -> None:
    other = {"name": "micro", "counts": {}, "data_sha256": "ff" * 32}
    sections = sections_of(
        methods_of(
            load(
                [
                    make_run(tmp_path / "a", steps=20, every=20),
                    make_run(tmp_path / "b", steps=20, every=20, benchmark=other),
                ]
            )
        )
    )
    assert [section.title for section in sections] == ["micro · data 6f1c6f1c", "micro · data ffffffff"]
    assert [len(section.trained) for section in sections] == [1, 1]


def test_best_is_marked_as_in_the_paper(tmp_path: Path) -> None:
    section = one_section(
        scores(
            tmp_path / "s.json",
            result("target", TARGET),
            result("retrained", RETRAINED),
            *(result(name, values) for name, values in ENDS.items()),
        )
    )

    def best(metric: str) -> list[str]:
        return [label for label, cell in section.cells(metric).items() if cell.best]

    assert best("verbmem_f") == []  # runs stop on it: lowest is not best
    assert best("knowmem_f") == ["mt-nlul-qkl"]
    assert best("knowmem_r") == ["mt-nlul-kl"]  # the retrained model is higher and no method
    assert best("privleak") == ["mt-nlul-qkl"]  # nearest to zero, on either side
    assert best("nll_general") == []


def test_without_privleak_the_raw_auc_takes_its_column(tmp_path: Path) -> None:
    section = one_section(make_run(tmp_path / "run", steps=20, every=20, drop=("privleak",)))
    assert section.privleak_missing
    assert section.columns[3] == "auc_forget_holdout_min_40"


def test_unknown_metrics_get_columns_of_their_own(tmp_path: Path) -> None:
    content = result("a", {"truth_ratio": 0.4, "forget_quality": 0.9})
    content["metrics"]["forget_quality"]["higher_is_better"] = True
    section = one_section(scores(tmp_path / "s.json", content))
    assert section.columns == ("truth_ratio", "forget_quality")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("target", "target"),
        ("micro:target", "target"),
        ("MUSE-news_retrain", "retrained"),
        ("models/retrained", "retrained"),
        ("mt-nlul-kl", "method"),
        ("targeted", "method"),
    ],
)
def test_roles_by_name(name: str, role: str) -> None:
    assert role_of(name) == role


def test_csv_reads_back(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"r{seed}", seed=seed, steps=20, every=20) for seed in (0, 1)]
    section = one_section(*runs)
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
def test_csv_never_holds_a_formula(tmp_path: Path, text: str) -> None:
    content = result("x", {"verbmem_f": -1.5}) | {"name": text}
    file = scores(tmp_path / "s.json", content)
    rows = list(csv.reader(io.StringIO(csv_table([one_section(file)]))))
    assert rows[1][2] == csv_cell(text) == "'" + text.replace("\t", " ").replace("\r", " ").replace("\n", " ")
    assert rows[1][7] == "-1.5"  # a number stays one


def test_thirty_methods_can_be_told_apart_by_points_and_by_lines() -> None:
    looks = [look("method", index) for index in range(30)]
    assert len({(one.colour, one.marker) for one in looks}) == 30
    assert len({(one.colour, str(one.dash)) for one in looks}) == 30
