"""The section "Does it hold?": a line and a picture an attack, and a badge only where it held."""

import json
import re

import pytest
from run_folders import AUDITS, HOSTILE, changed, make_audits, make_references, make_run

from unteach.report import write_report
from unteach.report.load import load


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    run = make_audits(make_run(folder / "run"))
    changed(run / "audits" / "inside.json", note=f"{HOSTILE} 15.0", title=HOSTILE)
    return write_report([run, make_references(folder / "references.json")], folder / "report.html")


def test_a_badge_only_where_it_held(page):
    text = page.read_text(encoding="utf-8")
    section = re.search(r'<section id="audits".*?</section>', text, re.DOTALL)[0]
    parts = re.findall(r"<figure>.*?</figure>", section, re.DOTALL)
    assert len(parts) == len(AUDITS)
    held = {name: entry[-1] for name, entry in AUDITS.items()}
    for part, name in zip(parts, sorted(AUDITS), strict=True):
        assert ('<span class="badge">held</span>' in part) == (held[name] is True)
        assert {True: "✓", False: "✗", None: "–"}[held[name]] in part
        assert part.count("<svg") == 1
    assert "<script>" not in section
    assert 'href="#audits"' in text
    markdown = page.with_suffix(".md").read_text(encoding="utf-8")
    assert "✗ relearning: note on relearning" in markdown
    assert (page.with_name("report_figures") / "audit-0-0.svg").exists()


def test_no_audits_no_section(tmp_path):
    run = make_run(tmp_path / "run")
    text = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Does it hold?" not in text
    assert "an audit finds them out" not in text


def test_the_headline_says_what_an_audit_has_against_it(tmp_path):
    run, other = (make_audits(make_run(tmp_path / name)) for name in ("run", "other"))
    not_held = [name for name, entry in sorted(AUDITS.items()) if entry[-1] is False]
    assert not_held
    said = f"But an audit finds them out: {', '.join(not_held)}."
    text = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert said in text[: text.index("Does it hold?")]
    assert said in (tmp_path / "report.md").read_text(encoding="utf-8")
    for file in (other / "audits").glob("*.json"):
        changed(file, held=True)
    both = write_report([run, other], tmp_path / "both.html").read_text(encoding="utf-8")
    assert f": {', '.join(not_held)}." in both[: both.index("Does it hold?")]


def test_broken_audits_are_refused_by_name(tmp_path):
    run = make_audits(make_run(tmp_path / "run"))
    changed(run / "audits" / "inside.json", schema="unteach.audit/9")
    (run / "audits" / "relearning.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="inside.json: schema is 'unteach.audit/9'") as error:
        load([run])
    assert "relearning.json: expected an object" in str(error.value)


@pytest.mark.parametrize("after", [None, [], [3], [{"value": None, "at": 1}], [{"value": 3}]])
def test_missing_figures_leave_the_line(tmp_path, after):
    from unteach.report.audits import _picture
    from unteach.report.style import TARGET

    assert _picture({"after": after, "title": "x"}, TARGET, "x") is None
