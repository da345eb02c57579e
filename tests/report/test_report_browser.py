"""The page in a real browser: four page loads in one headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find
from run_folders import HOSTILE

pytestmark = pytest.mark.skipif(
    find() is None, reason="no Chromium or Chrome is installed (Debian: apt-get install chromium)"
)
OPEN_ALL = "document.querySelectorAll('details').forEach(part => part.open = true)"
OVERFLOW = """[...document.querySelectorAll('body *')]
    .filter(e => !e.closest('.scroll, nav, svg, .skip') && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + '.' + e.className)"""
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
    const out = {};
    for (const text of ['--ink', '--muted', '--accent', '--foreign', '--good', '--bad'])
        out[text] = Math.min(ratio(value(text), value('--page')), ratio(value(text), value('--surface')));
    return out;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find()
    assert program is not None
    with Browser(program) as running:
        yield running


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1440, False)])
def test_page_fits_and_is_quiet(browser: Browser, full_report: Path, width: int, dark: bool) -> None:
    browser.open(full_report, width, dark=dark)
    assert browser.complaints() == []
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollHeight") <= 6000, "sections that can be closed are"
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOW) == []
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 21)" if dark else "rgb(246, 247, 249)")
    contrast = browser.evaluate(CONTRAST)
    assert all(ratio >= 4.5 for ratio in contrast.values()), contrast
    smallest = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('figure text')].map(t => t.getBoundingClientRect().height))"
    )
    assert smallest >= 8, "text in figures must stay readable"
    assert browser.evaluate("document.querySelectorAll('figure svg:not([role=img][aria-label])').length") == 0
    assert browser.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
    unreachable = "document.querySelectorAll('.scroll:not([tabindex=\"0\"][role=region][aria-label])').length"
    assert browser.evaluate(unreachable) == 0
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.complaints() == []


def test_hostile_text_is_shown_and_not_run(browser: Browser, hostile_report: Path) -> None:
    browser.open(hostile_report, 1440)
    assert browser.complaints() == []  # the content policy had nothing to refuse
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1440
    assert HOSTILE in browser.evaluate("document.querySelector('.output p').innerText + document.body.innerText")
    for tag in ("script", "img", "textarea"):
        assert browser.evaluate(f"document.getElementsByTagName('{tag}').length") == 0


def test_hostile_text_would_not_run_without_the_content_policy(browser: Browser, hostile_report: Path) -> None:
    page = hostile_report.read_text(encoding="utf-8")
    start = page.index("<meta http-equiv")
    bare = hostile_report.with_name("bare.html")
    bare.write_text(page[:start] + page[page.index(">", start) + 1 :], encoding="utf-8")
    browser.open(bare, 390)
    assert browser.evaluate("window.hacked") is None
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
