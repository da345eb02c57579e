"""The section "Requests on this model": the chain of receipts that a run carries, in order."""

import re

import pytest
from run_folders import HOSTILE, changed, make_run, write_json

from unteach.report import write_report
from unteach.report.load import load
from unteach.report.requests import requests_of


def make_ledger(run, *weights, **changes):
    """What a run with earlier requests keeps: one for each of these weights."""
    rows = []
    for number, name in enumerate(weights, 1):
        is_last = number == len(weights)
        row = {"number": number, "written": f"2026-11-0{number}T08:00:00+00:00", "documents": 1200 * number}
        row |= {"model": "m", "weights": name, "ended": "stop" if is_last else "max_steps", "sound": True}
        row |= {"verdict": [True, False, None, True], "link": f"after {number - 1}" if number > 1 else "the first"}
        now = {"holds": None, "says": "the last: see its verdict", "now": None}
        if not is_last:
            now = {"holds": False, "says": "still recited after request 2 (✗✗?✓)", "now": [False, False, None, True]}
        rows.append(row | now | {"sha256": "ab"})
    write_json(run / "ledger.json", {"schema": "unteach.ledger/1", "requests": rows, "problems": []} | changes)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    return [make_run(folder / f"run-{number}", seed=number) for number in range(4)]


def test_every_request_has_a_row_in_order(runs, monkeypatch):
    for kind in ("tradeoff", "evaluation", "training"):
        monkeypatch.setattr(f"unteach.report.page.{kind}_figures", lambda *given: [])
    run = make_ledger(runs[1], "first", "second", problems=[f"0001.json {HOSTILE}"])
    page = write_report([run], run / "report.html")
    text = page.read_text(encoding="utf-8")
    section = re.search(r'<section id="requests".*?</section>', text, re.DOTALL)[0]
    rows = [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    ]
    recited = "✗ still recited after request 2 (✗✗?✓)"
    assert rows[1] == [
        "1", "2026-11-01", "1,200", "not met: too many steps", "✓✗?✓", "✗✗?✓", recited, "the first",
    ]  # fmt: skip
    assert rows[2][3:] == ["met", "✓✗?✓", "–", "? the last: see its verdict", "after 1"]
    assert "<script>" not in section
    assert 'href="#requests"' in text
    markdown = page.with_suffix(".md").read_text(encoding="utf-8")
    assert "## Requests on this model" in markdown
    assert "still recited after request 2" in markdown


def test_a_longer_chain_has_the_shorter_one_in_it(runs):
    for run, weights in zip(runs[1:], (("a", "b"), ("a", "b", "c"), ("a", "d")), strict=True):
        make_ledger(run, *weights)
    found = requests_of(load(runs).runs)
    assert [(chain.run.path, len(chain.rows)) for chain in found] == [(runs[2], 3), (runs[3], 2)]


def test_the_first_request_has_no_section(runs):
    assert requests_of(load(runs[:1]).runs) == []


def test_a_foreign_ledger_is_refused_and_a_broken_row_is_left_out(runs):
    make_ledger(runs[3], "a", "b", requests=[3, {}, {"verdict": 1, "holds": "yes", "documents": "many"}])
    (chain,) = requests_of(load(runs[3:]).runs)
    assert [row[1:4] for row in chain.rows] == [("–", "–", "–")] * 2
    changed(runs[3] / "ledger.json", schema="unteach.ledger/9")
    with pytest.raises(ValueError, match="ledger.json: schema is 'unteach.ledger/9'"):
        load(runs[3:])
