"""The page: sound HTML whatever is missing or hostile in the runs, and the same in a real browser."""

import json
import re
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import Browser, find
from run_folders import (
    ENDS,
    HOSTILE,
    TARGET,
    changed,
    make_hostile,
    make_references,
    make_run,
    result,
    write_json,
    write_lines,
)  # fmt: skip

from unteach.evaluation.metrics import METRICS
from unteach.evaluation.verdict import Finding
from unteach.report import write_report, write_tensorboard
from unteach.report.load import load
from unteach.report.page import ReportOptions, bar_of, escape_markdown, headline, run
from unteach.report.tables import methods_of, sections_of

FEW = ("mmlu_val", "degenerate", "nll_general", "knowmem_f")
"""Metrics left out where fewer figures do."""
NEWS = {"name": "muse-news", "counts": {"verbmem_f": 100}, "data_sha256": "ab" * 32}


@pytest.fixture(scope="module")
def full_report(tmp_path_factory):
    """Two methods, one with two seeds, and both references."""
    folder = tmp_path_factory.mktemp("full")
    runs = [make_run(folder / f"mt{seed}", seed=seed, steps=40) for seed in (0, 1)]
    runs.append(make_run(folder / "adamw", "adamw-npo-kl", steps=60))
    return write_report([*runs, make_references(folder / "references.json")], folder / "out" / "report.html")


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory):
    """Markup in every text that a model, a document or a user gave."""
    folder = tmp_path_factory.mktemp("hostile")
    return write_report(make_hostile(folder), folder / "report.html")


def read(page):
    """How often each tag stands in the page, its ids, and its texts; every tag is closed where it should be."""
    closed = re.sub(r"<((?:meta|link|br|wbr)\b[^>]*)>", r"<\1/>", page.read_text(encoding="utf-8"))
    root = ElementTree.fromstring(closed)
    tags = Counter(element.tag for element in root.iter())
    attributes = [pair for element in root.iter() for pair in element.items()]
    ids = [value for name, value in attributes if name == "id"]
    links = {value[1:] for name, value in attributes if name == "href" and value.startswith("#")}
    assert not any(name.startswith("on") for name, _ in attributes)
    assert len(ids) == len(set(ids))
    assert links <= set(ids)
    assert not {"script", "iframe", "object", "img", "textarea", "form"} & set(tags)
    assert tags["h1"] == 1
    return tags, ids, list(root.itertext())


def test_everything_is_written_and_every_file_is_sound(full_report):
    tags, ids, texts = read(full_report)
    text = " ".join(texts)
    assert tags["svg"] > 9
    assert "2 methods: no longer recited" in text
    assert "Steps to the stop rule" in text
    assert "MUSE" not in text  # another benchmark's published figures have no place here
    assert not {"published", "published-h"} & set(ids)
    figures = full_report.with_name("report_figures")
    names = {path.stem for path in figures.iterdir()}
    assert {"tradeoff-verbmem_f", "tradeoff-knowmem_f", "tradeoff-privleak", "training-nll_forget"} <= names
    assert {"training-grad_norm", "steps-verbmem_f"} <= names
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
def test_same_runs_same_bytes(tmp_path):
    folder = make_run(tmp_path / "run", drop=FEW)
    for name in ("a", "b"):
        write_report([folder], tmp_path / name / "report.html")
    first, second = (sorted((tmp_path / name).rglob("*.*")) for name in ("a", "b"))
    assert [(path.name, path.read_bytes()) for path in first] == [(path.name, path.read_bytes()) for path in second]


def test_hostile_texts_are_shown_and_never_markup(hostile_report):
    assert sum(HOSTILE in part for part in read(hostile_report)[2]) > 10
    for file in hostile_report.with_name("report_figures").glob("*.svg"):
        assert not {"script", "img"} & {element.tag.split("}")[-1] for element in ElementTree.parse(file).iter()}
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
def test_markdown_shows_every_character_as_itself(text, escaped):
    assert escape_markdown(text) == escaped


@pytest.mark.slow
@pytest.mark.parametrize("beside", [False, True])
def test_published_points_stand_only_beside_their_own_benchmark(tmp_path, beside):
    options = {"drop": FEW, "benchmark": NEWS if beside else None}
    runs = [make_run(tmp_path / name, name, **options) for name in ("mt-nlul-kl", "adamw-npo-kl")]
    page = write_report(runs, tmp_path / "report.html").read_text()
    tradeoff = page[page.index('id="tradeoff"') : page.index('id="training"')]
    assert ("open-unlearning, reproduction page" in tradeoff) == beside
    assert ("other harnesses" in tradeoff) == beside
    assert ("QKL★, the paper, Table 1 (last epoch of the same runs as QKL)" in tradeoff) == beside
    assert ('id="published"' in page) == beside
    assert "SimNPO" not in page[page.index('id="scores"') : page.index('id="tradeoff"')]
    figures = page.partition('id="published"')[2]
    assert "<details open" not in figures
    assert ("QKL<small>step 400 of three runs" in figures) == beside
    assert ("QKL★<small>last epoch of the same runs" in figures) == beside


def test_why_privleak_is_missing_is_said(tmp_path):
    runs = [make_run(tmp_path / name, name, drop=(*FEW, "privleak")) for name in ("mt-nlul-kl", "adamw-npo-kl")]
    page = write_report(runs, tmp_path / "report.html").read_text()
    assert "PrivLeak is missing because" in page
    assert "privleak is not reported: no reference model was given" in page
    assert list(tmp_path.glob("report_figures/tradeoff-auc_*.svg"))


def only_metrics(folder):
    for file in (*(folder / "evaluations").iterdir(), folder / "result.json", folder / "config.yaml"):
        file.unlink()


def only_before(folder):
    (folder / "evaluations" / "step_000020.json").unlink()
    (folder / "result.json").unlink()


def only_config(folder):
    only_metrics(folder)
    (folder / "metrics.jsonl").unlink()
    (folder / "config.yaml").write_text("seed: 3\n")


def empty_metrics(folder):
    (folder / "metrics.jsonl").write_text("")


def gaps(folder):
    rows = [{"step": n, "nll_forget": float("nan"), "grad_norm": 0.0, "divergence": None} for n in range(1, 9)]
    with write_lines(folder / "metrics.jsonl", rows).open("a") as file:
        file.write('{"step": 9, "nll')
    metrics = {key: {"value": None} for key in TARGET} | {"knowmem_r": {"value": 4.0}}
    items = {"verbmem_f": [{"prompt": None}, {}, "x"], "knowmem_f": []}
    changed(folder / "evaluations" / "step_000020.json", metrics=metrics, items=items)


@pytest.mark.parametrize("spoil", [only_metrics, only_before, only_config, empty_metrics, gaps])
def test_missing_pieces_still_give_a_page(tmp_path, spoil):
    folder = make_run(tmp_path / "run", drop=FEW)
    spoil(folder)
    read(write_report([folder], tmp_path / "report.html"))


def test_a_scores_file_without_names_or_metrics_still_gives_a_page(tmp_path):
    unnamed = {"metrics": {"verbmem_f": 3.0, "knowmem_r": {"value": 40.0}}}
    for content in (unnamed, {"metrics": {}, "items": None, "notes": "x", "benchmark": None}):
        read(write_report([write_json(tmp_path / "s.json", content)], tmp_path / "report.html"))


@pytest.mark.slow
def test_two_benchmarks_are_one_sound_page(tmp_path):
    runs = [make_run(tmp_path / str(index), drop=FEW, benchmark=data) for index, data in enumerate((None, NEWS))]
    read(write_report(runs, tmp_path / "report.html"))


@pytest.mark.slow
def test_many_methods_and_long_curves_stay_small(tmp_path):
    rows = [{"step": s, "nll_forget": 0.5 + s / 999, "grad_norm": 1 + s % 7} for s in range(1, 3001)]
    runs = [write_lines(tmp_path / f"method {index}" / "metrics.jsonl", rows).parent for index in range(9)]
    assert write_report(runs, tmp_path / "report.html").stat().st_size < 400_000


def test_wrong_input_writes_nothing(tmp_path):
    folder = make_run(tmp_path / "run", steps=10, every=10)
    with pytest.raises(ValueError, match="no such file or folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="give a file such as report.html"):
        write_report([folder], tmp_path)
    assert not list(tmp_path.glob("report*"))


def test_the_command_and_the_first_screen(tmp_path):
    """What `--json` prints; and that the page begins with model, day, documents and the four answers."""
    folder = make_run(tmp_path / "run", drop=FEW)
    changed(folder / "result.json", forgotten=False)
    runs = (folder, make_references(tmp_path / "references.json"))
    answer = run(ReportOptions(runs=runs, out=tmp_path / "report.html"))
    assert json.loads(json.dumps(answer)) == answer
    assert answer["headline"].startswith("After 20 steps the documents are")
    assert [row["name"] for row in answer["rows"]] == ["target", "retrained", "mt-nlul-kl"]
    assert answer["rows"][2]["steps"] == 20
    assert all(Path(path).exists() for path in (answer["report"], answer["csv"], *answer["figures"]))
    page = Path(answer["report"]).read_text()
    first = page[page.index("<body>") : page.index("<nav")]
    for words in (
        "model <b>micro:target</b> · measured <b>2026-11-15</b> · documents to forget <b>80</b> · data",
        "mean teacher, NLUL loss, held by KL",
        "✗ ended without meeting its rule: verbmem_f",
        "no longer recited",
        "known</b>",
        "not measured: give --questions",
        "still detectable",
        "rest kept",
        "striped: long is bad",
        "plain: long is good",
        "membership AUC, before 0.006, the reference model 0.492",
    ):
        assert words in first, words
    assert page.index('id="examples"') < page.index('id="scores"')


def test_bars_tell_what_is_long_and_good_from_what_is_long_and_bad():
    recited = bar_of(
        Finding("no longer recited", True, "verbmem_f", 14.14, 12.0, 16.0, 99.9, 17.8, "the reference model")
    )
    assert (recited.kind, recited.left, recited.width) == ("less", 0.0, 14.1)
    assert (recited.before, recited.never_seen) == (99.9, 17.8)
    assert (recited.now, recited.interval) == ("14.1", "[12.0, 16.0]")
    assert recited.beside == "recital of forget documents, before 99.9, the reference model 17.8"
    assert bar_of(Finding("kept answers", True, "knowmem_r", 90.0)).kind == "more"
    overshot = bar_of(
        Finding("by its loss", False, "auc_forget_holdout_ppl", 0.7, before=0.0, never_seen=0.5, source="chance")
    )
    assert (overshot.kind, overshot.left, overshot.width) == ("less", 50.0, 20.0), "as far from chance as it is"
    assert overshot.beside.endswith("before 0.000, chance 0.500")
    loss = bar_of(Finding("general text", False, "nll_general", 6.0, before=3.0))
    assert (loss.kind, loss.left, loss.width, loss.before) == ("less", 45.5, 45.4, 45.5), "of a loss the rise is drawn"
    assert bar_of(Finding("general text", True, "nll_general", 3.0, before=6.0)).width == 0
    assert bar_of(Finding("no longer known", None, "knowmem_f")) is None


def test_chance_is_marked_and_numbers_are_short(full_report):
    page = full_report.read_text()
    scores = page[page.index('id="scores"') : page.index('id="tradeoff"')]
    assert "chance\u00a025.0" in scores
    assert "chance\u00a00.500" in scores
    shown = re.findall(r'<td[^>]*>([^<]*)<small>([^<]*)|class="(?:now|beside)">([^<]*)', page)
    numbers = [number for texts in shown for text in texts for number in re.findall(r"[\d.,]*\d", text)]
    assert len(numbers) > 100
    assert [number for number in numbers if len(re.sub(r"\D", "", number)) > 4] == []


def headline_of(path):
    inputs = load([path])
    return headline(sections_of(methods_of(inputs)), inputs.runs)


def test_the_headline_says_what_was_measured(tmp_path):
    assert "only models before or without unlearning" in headline_of(make_references(tmp_path / "references.json"))
    rows = [{"step": step, "nll_forget": 0.4 + step, "grad_norm": None} for step in (1, 2, 3)]
    assert headline_of(write_lines(tmp_path / "steps" / "metrics.jsonl", rows).parent) == (
        "steps: 3 steps, no evaluation of a trained model yet: the loss on the forget documents went from 1.40 "
        "to 3.40 nats per token."
    )
    folder = make_run(tmp_path / "run")
    assert "; not judged: known." in headline_of(folder)
    changed(folder / "result.json", base={"knowmem_f": 2.0, "knowmem_f_high": 5.0, "x": None})
    assert "still known" in headline_of(folder), "a page judges with what the run knew"


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as where it is not installed
    with pytest.raises(ValueError, match="pip install tensorboard"):
        write_tensorboard(tmp_path, tmp_path / "events")


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="the optional package tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = write_tensorboard(make_run(tmp_path / "run", steps=10, every=5), tmp_path / "events")
    assert folder.name == "mt-nlul-kl-seed0"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/nll_forget")] == list(range(1, 11))
    assert [event.step for event in events.Scalars("scores/verbmem_f")] == [0, 5, 10]
    with pytest.raises(ValueError, match="not a run folder"):
        write_tensorboard(make_references(tmp_path / "scores.json"), tmp_path / "events")


OPEN_ALL = "document.querySelectorAll('details').forEach(part => part.open = true)"
OVERFLOW = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.scroll, nav, svg, .skip') && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + '.' + e.className)"""
CLIPPED = """[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)
    .map(e => e.getAttribute('aria-label'))"""
CONTRAST = """(() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const light = colour => {
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
            .map(c => c / 255).map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const style = getComputedStyle(document.documentElement);
    const value = name => light(style.getPropertyValue(name));
    const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    return Math.min(...['--ink', '--muted', '--accent', '--foreign', '--good', '--bad'].flatMap(text =>
        ['--page', '--surface'].map(ground => ratio(value(text), value(ground)))));
})()"""
SMALLEST = "Math.min(...[...document.querySelectorAll('figure text')].map(t => t.getBoundingClientRect().height))"
UNFIT = "figure svg:not([role=img][aria-label]), th:not([scope]), .scroll:not([tabindex='0'][role=region][aria-label])"


@pytest.fixture(scope="module")
def browser():
    program = find()
    if program is None:
        pytest.skip("no Chromium or Chrome is installed (Debian: apt-get install chromium)")
    with Browser(program) as running:
        yield running


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1440, False)])
def test_page_fits_and_is_quiet(browser, full_report, width, dark):
    browser.open(full_report, width, dark=dark)
    assert browser.complaints() == []
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollHeight") <= 6000, "sections that can be closed are"
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOW) == []
    assert width < 600 or browser.evaluate(CLIPPED) == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 21)" if dark else "rgb(246, 247, 249)")
    assert browser.evaluate(CONTRAST) >= 4.5
    assert browser.evaluate(SMALLEST) >= 8, "text in figures must stay readable"
    assert browser.evaluate(f'document.querySelectorAll("{UNFIT}").length') == 0, "what a screen reader needs"
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.complaints() == []


def test_many_methods_fit(browser, tmp_path):
    """Twenty with every metric there is, some with long names: as many tables as they need, and closed on a phone."""
    values = ENDS["mt-nlul-kl"] | dict.fromkeys(METRICS, 0.5) | {"privleak": -98.7, "verbmem_f": 100.0}
    names = [
        f"{name}{' · learning rate 0.0003' * (place % 2)} {place}"
        for place in range(10)
        for name in ("mt-nlul-kl", "x")
    ]
    file = write_json(tmp_path / "s.json", [result(name, values) for name in names])
    browser.open(write_report([file, make_references(tmp_path / "r.json")], tmp_path / "report.html"), 1440)
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.querySelectorAll('.metrics').length") >= 4
    assert browser.evaluate(CLIPPED) == []
    browser.open(tmp_path / "report.html", 390)
    assert browser.evaluate("document.documentElement.scrollHeight") <= 6000


@pytest.mark.parametrize("policy", [True, False])
def test_hostile_text_is_shown_and_not_run(browser, hostile_report, policy):
    """Not even without the content policy, which has nothing to refuse."""
    width, page = (1440 if policy else 390), hostile_report
    if not policy:
        text = page.read_text(encoding="utf-8")
        page = page.with_name("bare.html")
        page.write_text(re.sub("<meta http-equiv[^>]*>", "", text, count=1), encoding="utf-8")
    browser.open(page, width)
    assert browser.evaluate("window.hacked") is None
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert HOSTILE in browser.evaluate("document.querySelector('.output p').innerText + document.body.innerText")
    assert browser.evaluate("document.querySelectorAll('script, img, textarea').length") == 0
