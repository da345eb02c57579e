"""Progress bars on stderr."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unteach.evaluation.inference import Advance


class Bars:
    """Shows one bar per measurement while inside a `with` block.

    Args:
        show: whether to show anything; by default where stderr is a terminal.
    """

    def __init__(self, show: bool | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not (sys.stderr.isatty() if show is None else show),
        )

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, label: str, total: int) -> Advance:
        """Begin a bar.

        Args:
            label: what is measured.
            total: how many items.

        Returns:
            What to call with the number of items just finished.
        """
        task = self._progress.add_task(label, total=total)
        return lambda count: self._progress.advance(task, count)
