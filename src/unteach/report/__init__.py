"""The report: reads run folders and scores files, never a model.

    load.py ─▶ tables.py ─▶ examples.py, plots.py ─▶ page.py (template.html, style.css)
                                                 └▶ exports.py (Markdown, CSV)

`published.json` holds figures published by others, always shown apart from ours.
"""

from unteach.report.exports import write_tensorboard
from unteach.report.page import write_report

__all__ = ["write_report", "write_tensorboard"]
