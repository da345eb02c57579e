"""The report: reads run folders and scores files, never a model.

    load.py ─▶ tables.py (CSV) ─▶ examples.py, plots.py ─▶ page.py (template.html, style.css; template.md)

`published.json` holds figures published by others, always shown apart from ours.
"""

from unteach.report.page import write_report, write_tensorboard

__all__ = ["write_report", "write_tensorboard"]
