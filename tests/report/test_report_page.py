from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from run_folders import HOSTILE, TARGET, make_references, make_run, result, write_json

from unteach.report import write_report
from unteach.report.exports import escape
from unteach.report.load import load
from unteach.report.page import ReportOptions, headline, run
from unteach.report.tables import methods_of, sections_of

FEW = ("mmlu_val", "degenerate", "nll_general", "knowmem_f")
"""Metrics left out where fewer figures do."""
VOID = {"meta", "link", "br", "wbr", "img"}


class Reader(HTMLParser):
    """Counts tags and ids, and checks that every tag is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        values = dict(attrs)
        assert not any(name.startswith("on") for name in values), (tag, values)
        self.ids += [values["id"] or ""] if "id" in values else []
        link = values.get("href") or ""
        self.targets += [link[1:]] if link.startswith("#") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    assert set(reader.targets) <= set(reader.ids)
    assert not {"script", "iframe", "object", "img", "textarea", "form"} & set(reader.tags)
    return reader


def test_everything_is_written_and_every_file_is_sound(full_report: Path) -> None:
    reader = read(full_report)
    assert reader.tags["h1"] == 1
    assert reader.tags["svg"] > 9
    text = " ".join(reader.text)
    assert "2 methods: no longer recited" in text
    assert "Steps to the stop rule" in text
    assert "MUSE" not in text  # another benchmark's published figures have no place here
    assert not {"published", "published-h"} & set(reader.ids)
    figures = full_report.with_name("report_figures")
    names = {path.stem for path in figures.iterdir()}
    assert {"tradeoff-verbmem_f", "tradeoff-knowmem_f", "tradeoff-privleak", "training-nll_forget"} <= names
    assert {"training-grad_norm", "steps-verbmem_f"} <= names
    assert not any(name.startswith("published") for name in names)
    for name in names:
        ElementTree.parse(figures / f"{name}.svg")
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    markdown = full_report.with_suffix(".md").read_text()
    links = re.findall(r"\]\((report_figures/[^)]+)\)", markdown)
    assert len(links) > 5
    assert all((full_report.parent / link).exists() for link in links)
    assert "\n| mt-nlul-kl " in markdown
    assert full_report.stat().st_size < 1_000_000


@pytest.mark.slow
def test_same_runs_same_bytes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, every=20, drop=FEW)
    for name in ("a", "b"):
        write_report([folder], tmp_path / name / "report.html")
    first, second = (sorted((tmp_path / name).rglob("*.*")) for name in ("a", "b"))
    assert [path.name for path in first] == [path.name for path in second]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_hostile_texts_are_shown_and_never_markup(hostile_report: Path) -> None:
    reader = read(hostile_report)
    assert sum(HOSTILE in part for part in reader.text) > 10
    for file in hostile_report.with_name("report_figures").glob("*.svg"):
        tags = {element.tag.split("}")[-1] for element in ElementTree.parse(file).iter()}
        assert "script" not in tags
        assert "img" not in tags
    markdown = hostile_report.with_suffix(".md").read_text()
    assert "<" not in re.sub(r"^> ", "", markdown, flags=re.MULTILINE)
    assert "&lt;script&gt;" in markdown


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a|b\n*c* [d](e) <f> `g` #h $i$", r"a\|b \*c\* \[d\](e) &lt;f&gt; \`g\` \#h \$i\$"),
        ("https://a.b and www.c.d", r"https\://a.b and www\.c.d"),
        ("- x", r"\- x"),
        ("1. x", r"1\. x"),
        ("12) x", r"12\) x"),
        ("kept 97 % (90.4, was 93.1).", "kept 97 % (90.4, was 93.1)."),
        ("&amp; \\", r"&amp;amp; \\"),
    ],
)
def test_markdown_shows_every_character_as_itself(text: str, escaped: str) -> None:
    assert escape(text) == escaped


@pytest.mark.slow
def test_published_points_stand_only_beside_their_own_benchmark(tmp_path: Path) -> None:
    news = {"name": "muse-news", "counts": {"verbmem_f": 100}, "data_sha256": "ab" * 32}
    own = make_run(tmp_path / "own", steps=20, every=20, drop=FEW)
    muse = make_run(tmp_path / "muse", steps=20, every=20, drop=FEW, benchmark=news)
    marker = "open-unlearning, reproduction page"
    for folder, beside in ((own, False), (muse, True)):
        page = write_report([folder], tmp_path / f"{folder.name}.html").read_text()
        tradeoff = page[page.index('id="tradeoff"') : page.index('id="training"')]
        assert (marker in tradeoff) == beside
        assert ("other harnesses" in tradeoff) == beside
        assert ('id="published"' in page) == beside
        scores = page[page.index('id="scores"') : page.index('id="tradeoff"')]
        assert "SimNPO" not in scores
        assert "<details open" not in page.partition('id="published"')[2]


def test_why_privleak_is_missing_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, every=20, drop=(*FEW, "privleak"))
    out = write_report([folder], tmp_path / "report.html")
    page = out.read_text()
    assert "PrivLeak is missing because" in page
    assert "privleak is not reported: no reference model was given" in page
    assert (tmp_path / "report_figures" / "tradeoff-auc_forget_holdout_min_40.svg").exists()


def only_metrics(folder: Path) -> list[Path]:
    run_folder = make_run(folder / "run", steps=30, every=30)
    for file in (*(run_folder / "evaluations").iterdir(), run_folder / "result.json", run_folder / "config.yaml"):
        file.unlink()
    return [run_folder]


def only_before(folder: Path) -> list[Path]:
    run_folder = make_run(folder / "run", steps=30, every=30)
    (run_folder / "evaluations" / "step_000030.json").unlink()
    (run_folder / "result.json").unlink()
    return [run_folder]


def only_config(folder: Path) -> list[Path]:
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("seed: 3\n")
    return [folder / "run"]


def empty_metrics(folder: Path) -> list[Path]:
    run_folder = make_run(folder / "run", steps=10, every=10, drop=FEW)
    (run_folder / "metrics.jsonl").write_text("")
    return [run_folder]


def gaps(folder: Path) -> list[Path]:
    run_folder = make_run(folder / "run", steps=30, every=30)
    rows = [{"step": n, "nll_forget": float("nan"), "grad_norm": 0.0, "divergence": None} for n in range(1, 9)]
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 9, "nll')
    content = json.loads((run_folder / "evaluations" / "step_000030.json").read_text())
    content["metrics"] = {key: {"value": None} for key in content["metrics"]} | {"knowmem_r": {"value": 4.0}}
    content["items"] = {"verbmem_f": [{"prompt": None}, {}, "x"], "knowmem_f": []}
    write_json(run_folder / "evaluations" / "step_000030.json", content)
    return [run_folder]


def no_names(folder: Path) -> list[Path]:
    return [write_json(folder / "s.json", {"metrics": {"verbmem_f": 3.0, "knowmem_r": {"value": 40.0}}})]


def no_metrics(folder: Path) -> list[Path]:
    return [write_json(folder / "s.json", {"metrics": {}, "items": None, "notes": "x", "benchmark": None})]


def two_benchmarks(folder: Path) -> list[Path]:
    other = {"name": "muse-books", "counts": {}, "data_sha256": ""}
    runs = {"a": None, "b": other}
    return [make_run(folder / name, steps=10, every=10, drop=FEW, benchmark=data) for name, data in runs.items()]


@pytest.mark.parametrize(
    "build",
    [
        only_metrics,
        only_before,
        only_config,
        empty_metrics,
        gaps,
        no_names,
        no_metrics,
        pytest.param(two_benchmarks, marks=pytest.mark.slow),
    ],
    ids=lambda build: build.__name__,
)
def test_missing_pieces_still_give_a_page(tmp_path: Path, build) -> None:
    reader = read(write_report(build(tmp_path), tmp_path / "report.html"))
    assert reader.tags["h1"] == 1


@pytest.mark.slow
def test_many_methods_and_long_curves_stay_small(tmp_path: Path) -> None:
    runs = []
    for index in range(9):
        folder = tmp_path / f"method {index}"
        folder.mkdir()
        rows = [{"step": s, "nll_forget": 0.5 + s / 999, "grad_norm": 1 + s % 7} for s in range(1, 3001)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        runs.append(folder)
    assert write_report(runs, tmp_path / "report.html").stat().st_size < 400_000


def test_command_returns_what_json_prints(tmp_path: Path) -> None:
    runs = (make_run(tmp_path / "run", steps=20, every=20, drop=FEW), make_references(tmp_path / "references.json"))
    answer = run(ReportOptions(runs=runs, out=tmp_path / "report.html"))
    assert json.loads(json.dumps(answer)) == answer
    assert answer["headline"].startswith("After 20 steps the documents are")
    assert [row["name"] for row in answer["rows"]] == ["target", "retrained", "mt-nlul-kl"]
    assert answer["rows"][2]["steps"] == 20
    assert all(Path(path).exists() for path in (answer["report"], answer["csv"], *answer["figures"]))


def test_wrong_input_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        run(ReportOptions(runs=(tmp_path / "nowhere",), out=tmp_path / "report.html"))
    folder = make_run(tmp_path / "run", steps=10, every=10)
    with pytest.raises(ValueError, match="give a file such as report.html"):
        write_report([folder], tmp_path)
    assert not list(tmp_path.glob("report*"))


def headline_of(*paths: Path) -> str:
    inputs = load(paths)
    return headline(sections_of(methods_of(inputs)), inputs.runs)


def test_the_first_screen_says_model_day_documents_and_four_answers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, every=20, drop=FEW)
    outcome = json.loads((folder / "result.json").read_text())
    write_json(folder / "result.json", outcome | {"forgotten": False})
    page = write_report([folder, make_references(tmp_path / "references.json")], tmp_path / "report.html").read_text()
    first = page[page.index("<body>") : page.index("<nav")]
    for words in (
        "micro:target · 2026-11-15 · 80 documents",
        "mean teacher, NLUL loss, held by KL",
        "✗ mt-nlul-kl, seed 0: ended without meeting its rule: verbmem_f",
        "no longer recited",
        "known</b>",
        "not measured: give --questions",
        "still detectable",
        "rest kept",
    ):
        assert words in first, words
    assert page.index('id="examples"') < page.index('id="scores"')


def test_only_references_or_only_steps(tmp_path: Path) -> None:
    sentence = headline_of(write_json(tmp_path / "s.json", result("target", TARGET)))
    assert "only models before or without unlearning" in sentence
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"step": step, "nll_forget": 0.4 + step, "grad_norm": None} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert headline_of(folder) == (
        "run: 3 steps, no evaluation of a trained model yet: the loss on the forget documents went from 1.40 "
        "to 3.40 nats per token."
    )


def test_a_page_judges_with_what_the_run_knew(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, every=20)
    assert "; not judged: known." in headline_of(folder)
    outcome = json.loads((folder / "result.json").read_text())
    write_json(folder / "result.json", outcome | {"base": {"knowmem_f": 2.0, "knowmem_f_high": 5.0, "x": None}})
    assert "still known" in headline_of(folder)
