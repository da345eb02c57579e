"""Take the pictures of docs/guide.md: `python tests/report/screenshots.py docs/images [report.html]`.

Without a page, one is made from invented runs, and says so.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import Browser, find
from PIL import Image
from run_folders import ENDS, make_references, make_run

from unteach.report import write_report


def invented(folder: Path) -> Path:
    """A report on runs that never were."""
    data = {"name": "invented example", "counts": {"verbmem_f": 100}, "data_sha256": "00" * 32}
    runs = [
        make_run(folder / f"{name}{seed}", name, seed, steps=140 + 20 * seed, benchmark=data)
        for name in ENDS
        for seed in range(3)
    ]
    return write_report([*runs, make_references(folder / "both.json", benchmark=data)], folder / "report.html")


def wide(browser: Browser, page: Path, file: Path) -> None:
    """The upper part of the page on a desk."""
    browser.open(page, 1280, 1500)
    Image.open(browser.screenshot(file, full=False)).convert("RGB").quantize(256).save(file, optimize=True)


def phone(browser: Browser, page: Path, file: Path) -> None:
    """Three views of the page on a phone at night, side by side."""
    sheet = Image.new("RGB", (3 * 390 + 2 * 24, 844), "#808890")
    for index, place in enumerate(("body", "#tradeoff", "#examples")):
        browser.open(page, 390, 844, dark=True)
        browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        browser.evaluate(f"document.querySelector('{place}').scrollIntoView()")
        sheet.paste(Image.open(browser.screenshot(file, full=False)).convert("RGB"), (index * 414, 0))
    sheet.save(file, optimize=True)


if __name__ == "__main__":
    program = find()
    if program is None:
        sys.exit("no Chromium or Chrome is installed (Debian: apt-get install chromium)")
    images = Path(sys.argv[1])
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser(program) as running:
        page = Path(sys.argv[2]) if len(sys.argv) > 2 else invented(Path(folder))
        wide(running, page, images / "report-wide.png")
        phone(running, page, images / "report-phone.png")
