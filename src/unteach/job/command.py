"""``unteach forget``, ``finish`` and ``plan``: what the commands do, and with which exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig
from unteach.errors import InputError, given_path, printable
from unteach.job.ending import ended, saying_how_to_go_on
from unteach.job.hub import check_hub
from unteach.job.receipts.signature import check_key
from unteach.job.run import run_forget
from unteach.job.run_folder import ForgetResult
from unteach.job.same_run import ended_already, saved_config
from unteach.job.trial import tried
from unteach.models.distributed import join
from unteach.planning import plan as planning
from unteach.writing import speaks

__all__ = ["finish", "forget", "plan"]

DONE, REFUSED, UNMET = 0, 2, 3
"""Exit status: the rule is met, it cannot be run here, or the rule is not met."""


def forget(config: ForgetConfig, others: dict[str, str]) -> int:
    """``unteach forget``: plan, run, and say how it ended; the exit status."""
    if not config.out and "--dry-run" not in others:
        raise InputError("out is missing: name the run folder to create, --out run/")
    if "--sign" in others:
        check_key(others["--sign"])
    limit = int(others.get("--max-steps") or 0) or None
    if "--resume" in others and (known := ended_already(Path(config.out), limit)):
        return _ended(known, Path(config.out), others)
    if config.resolved_device().type == "cuda":
        join()  # every rank looks at its own device
    if "--dry-run" in others:
        if speaks():
            return plan(config, others)
        return DONE
    if problems := planning.plan(config).problems():
        raise InputError(problems)
    if speaks() and (hub := others.get("--push-to-hub")):
        check_hub(hub)
    with saying_how_to_go_on(Path(config.out)):
        accept = "--accept-changes" in others
        result = run_forget(config, resume="--resume" in others, max_steps=limit, accept_changes=accept)
    return _written(result, Path(config.out), others)


def finish(options: Any, others: dict[str, str]) -> int:
    """``unteach finish``: make a result of a run as it is; the exit status."""
    run = given_path(options.run, "run")
    if content := ended_already(run, by_hand=True):
        return _ended(content, run, others)
    accept = "--accept-changes" in others
    config = saved_config(run, accept=accept)
    with saying_how_to_go_on(run):
        result = run_forget(config, finish=True, accept_changes=accept)
    return _written(result, run, others)


def _ended(content: dict[str, Any], run: Path, others: dict[str, str]) -> int:
    """Say of a run that it has ended, and do nothing; the exit status."""
    _show(content, [f"{run} has ended already: {content['stop']['reason']}"], others)
    return DONE if content["forgotten"] else UNMET


def _written(result: ForgetResult, run: Path, others: dict[str, str]) -> int:
    """Write the page of a run that has ended, say how it ended, and give back the exit status."""
    if not speaks():
        return DONE  # the first rank has the last word
    _show(*ended(result, run, others.get("--push-to-hub"), others.get("--sign")), others)
    return DONE if result.forgotten else UNMET


def plan(config: ForgetConfig, others: dict[str, str]) -> int:
    """``unteach plan``, and ``forget --dry-run``: say what a run would need and do; the exit status."""
    ranks = others.get("--ranks")
    if ranks is not None and not (ranks.isdecimal() and int(ranks) > 0):
        raise InputError(f"ranks is {ranks!r}: it must be a positive number of processes")
    content, lines = tried(config, int(ranks) if ranks else None, "--resume" in others)
    _show(content, lines, others)
    return DONE if content["fits"] else REFUSED


def _show(content: dict[str, Any], lines: Sequence[str], others: dict[str, str]) -> None:
    print(json.dumps(content, ensure_ascii=False) if "--json" in others else "\n".join(map(printable, lines)))
