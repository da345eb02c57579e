"""The report: reads run folders and scores files, never a model.

    load.py ─▶ tables.py ─▶ verdict.py, examples.py, plots.py ─▶ page.py (template.html, style.css)
                                                              └▶ exports.py (Markdown, CSV)

`published.json` holds figures published by others; `published.py` keeps them apart from ours.
"""

from unteach.report.page import write_report
from unteach.report.tensorboard import write_tensorboard

__all__ = ["write_report", "write_tensorboard"]
