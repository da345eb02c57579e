"""The command line: wiring only. Each command has a dataclass of options and a function elsewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unteach.errors import InputError, Interrupted

if TYPE_CHECKING:
    from unteach.config import ForgetConfig

__all__ = ["main"]

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
FIRST_RANK_SPEAKS = 10.0
"""Seconds that the other ranks leave the first one to say what is wrong, before they exit."""


@dataclass(frozen=True, slots=True)
class Command:
    """A verb of the command line."""

    run: Callable[[list[str]], None]
    summary: str
    usage: str
    examples: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 done, 2 wrong input, 130 interrupted, 1 anything else."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_overview(), flush=True)
            return DONE if arguments else WRONG_INPUT
        if arguments[0] == "--version":
            from unteach import __version__

            print(f"unteach {__version__}", flush=True)
            return DONE
        if arguments[0] not in COMMANDS:
            raise InputError(f"unknown command {arguments[0]!r}: choose one of {', '.join(COMMANDS)}")
        if _under_torchrun() and arguments[0] != "forget":
            raise InputError(f"{arguments[0]} runs on one process: start it without torchrun, which is for forget")
        COMMANDS[arguments[0]].run(arguments[1:])
        _finish()
    except InputError as error:
        name = "unteach"
        if not _speaks():
            time.sleep(FIRST_RANK_SPEAKS)  # torchrun ends all ranks as soon as one has: the first one's word is enough
            name = f"unteach, rank {os.environ['RANK']}"  # still here: the first one has nothing to say
        for problem in error.problems:
            print(f"{name}: {problem}", file=sys.stderr)
        return WRONG_INPUT
    except Interrupted as error:
        if _speaks():
            print(f"unteach: {error}; go on with: unteach forget --resume RUN", file=sys.stderr)
        _finish()
        return INTERRUPTED
    except KeyboardInterrupt:
        print("unteach: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if os.environ.get("UNTEACH_TRACEBACK"):
            traceback.print_exc()
        print(f"unteach: {type(error).__name__}: {error} (UNTEACH_TRACEBACK=1 shows where)", file=sys.stderr)
        return FAILED
    return DONE


def _under_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _finish() -> None:
    """Leave the process group that a command under ``torchrun`` has formed."""
    if _under_torchrun():
        from unteach.models.distributed import finish

        finish()


def _speaks() -> bool:
    """Whether this process prints what all ranks would say alike: the first of them does."""
    return not _under_torchrun() or os.environ.get("RANK", "0") == "0"


def _forget(arguments: list[str]) -> None:
    from unteach.config import ForgetConfig
    from unteach.settings import from_yaml

    _help(arguments, "forget", ForgetConfig, flatten=("method",))
    as_json, arguments = _take_switch(arguments, "--json")
    dry_run, arguments = _take_switch(arguments, "--dry-run")
    resume, arguments = _take_value(arguments, "--resume")
    if resume is not None:
        if arguments:
            raise InputError(f"{' '.join(arguments)}: a resumed run keeps its settings; give --resume RUN alone")
        config: ForgetConfig = from_yaml(ForgetConfig, Path(resume) / "config.yaml", out=resume)
    else:
        config = _forget_config(arguments)
        if not config.out and not dry_run:
            raise InputError("out is missing: name the run folder to create, --out run/")
    from unteach.models.distributed import join
    from unteach.planning.plan import plan

    if config.resolved_device().type == "cuda":
        join()  # every rank looks at its own device
    planned = plan(config)
    if dry_run:
        if _speaks():
            _show(planned.to_dict(), as_json, planned.lines())
        return
    if planned.problems():
        raise InputError(planned.problems())
    from unteach.evaluation import verdict
    from unteach.job import run_forget

    result = run_forget(config, resume=resume is not None)
    if not _speaks():
        return
    report = _written_report(Path(config.out))
    lines = [
        *_before_and_after(result.before, result.after),
        f"{'' if result.forgotten else 'NOT forgotten: '}{result.stop['reason']} (step {result.steps})",
        *verdict.lines(result.verdict),
        f"all scores: {Path(config.out) / 'result.json'}",
        f"model:      {Path(config.out) / 'model'}",
        f"report:     {report or 'needs matplotlib and jinja2; unteach report writes it where they are'}",
    ]
    _show(result.to_dict() | {"report": report and str(report)}, as_json, lines)


def _written_report(run: Path) -> Path | None:
    """The page of a run, where what draws it is installed."""
    if any(importlib.util.find_spec(needed) is None for needed in ("matplotlib", "jinja2")):
        return None
    from unteach.report import write_report

    return write_report([run], run / "report.html")


def _before_and_after(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """The scores that a person wants to see, a line each: those that the report explains."""
    from unteach.evaluation.metrics import METRICS

    shown = [name for name in METRICS if name in before and name in after]
    width = max(map(len, (METRICS[name].title for name in shown)), default=0)
    lines = []
    for name in shown:
        info = METRICS[name]
        values = f"{before[name]:.{info.decimals}f} -> {after[name]:.{info.decimals}f}"
        lines.append(f"  {info.title:{width}}  {values:16}  {name} {info.arrow}".rstrip())
    return lines


def _forget_config(arguments: list[str]) -> ForgetConfig:
    from unteach.config import ForgetConfig
    from unteach.settings import from_yaml, parse, read_settings

    path, arguments = _take_value(arguments, "--config")
    start = read_settings(path) if path is not None else None
    try:
        return parse(ForgetConfig, arguments, positional="model", flatten=("method",), start=start)
    except InputError:
        if path is not None:
            from_yaml(ForgetConfig, path)  # what is wrong with the file itself is reported with its name
        raise


def _plan(arguments: list[str]) -> None:
    from unteach.config import ForgetConfig

    _help(arguments, "plan", ForgetConfig, flatten=("method",))
    as_json, arguments = _take_switch(arguments, "--json")
    ranks, arguments = _take_value(arguments, "--ranks")
    if ranks is not None and not (ranks.isdecimal() and int(ranks) > 0):
        raise InputError(f"ranks is {ranks!r}: it must be a positive number of processes")
    from unteach.planning.plan import plan

    planned = plan(_forget_config(arguments), ranks=int(ranks) if ranks else None)
    _show(planned.to_dict(), as_json, planned.lines())


def _evaluate(arguments: list[str]) -> None:
    from unteach.evaluation.command import EvaluateOptions, as_table, run

    def show(result: dict[str, Any]) -> None:
        from rich.console import Console

        console = Console()
        console.print(as_table(result))
        for scores in result["results"]:
            for note in scores["notes"]:
                console.print(f"{scores['name']}: {note}", markup=False, highlight=False)

    _run_command(arguments, "evaluate", EvaluateOptions, "models", run, show)


def _report(arguments: list[str]) -> None:
    from unteach.report.page import ReportOptions, run

    def show(result: dict[str, Any]) -> None:
        print(f"{result['headline']}\nreport: {result['report']}")

    _run_command(arguments, "report", ReportOptions, "runs", run, show)


def _demo(arguments: list[str]) -> None:
    from unteach.experiments.demo import DemoOptions, run

    _run_command(arguments, "demo", DemoOptions, "out", run)


def _reproduce(arguments: list[str]) -> None:
    from unteach.experiments.reproduce import ReproduceOptions, run

    _run_command(arguments, "reproduce", ReproduceOptions, "name", run)


def _run_command(
    arguments: list[str],
    name: str,
    kind: type,
    positional: str,
    run: Callable[[Any], dict[str, Any]],
    show: Callable[[dict[str, Any]], None] = lambda result: None,
) -> None:
    """Read the options, run the command, and print its result as JSON or for people."""
    from unteach.settings import parse

    _help(arguments, name, kind)
    options = parse(kind, arguments, positional=positional)
    try:
        result = run(options)
    except InputError:
        raise
    except ValueError as error:  # commands name wrong input by ValueErrors, one line per problem
        raise InputError(str(error).splitlines()) from error
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        show(result)


COMMANDS = {
    "forget": Command(
        _forget,
        "Make a model forget documents: writes a run folder with the model, its scores and a report.",
        "unteach forget MODEL --documents DIR --out RUN [flags]   |   unteach forget --resume RUN",
        (
            "unteach forget micro:target --documents micro:forget --out run/ --dry-run",
            "unteach forget micro:target --documents micro:forget --out run/",
        ),
    ),
    "plan": Command(
        _plan,
        "Say what a forget run would need in memory, disk and steps, before anything is loaded.",
        "unteach plan MODEL --documents DIR [flags of forget] [--ranks N]",
        ("unteach plan micro:target --documents micro:forget",),
    ),
    "evaluate": Command(
        _evaluate,
        "Measure what models recite, know and leak.",
        "unteach evaluate MODEL... [flags]",
        ("unteach evaluate micro:target --limit 4 --out scores.json",),
    ),
    "report": Command(
        _report,
        "One page that compares runs and scores files.",
        "unteach report RUN... [flags]",
        ("unteach report run/ --out report.html",),
    ),
    "demo": Command(
        _demo,
        "See it work in minutes, offline: unlearn the embedded model with the paper's method and a baseline.",
        "unteach demo [OUT] [flags]",
        ("unteach demo demo/",),
    ),
    "reproduce": Command(
        _reproduce,
        "Run one of the paper's experiments.",
        "unteach reproduce NAME [flags]",
        ("unteach reproduce theorem --seeds 0 --out results", "unteach reproduce methods --list"),
    ),
}


def _overview() -> str:
    lines = [
        "Make a language model forget chosen documents and keep everything else.",
        "",
        "usage: unteach COMMAND ...",
        "",
    ]
    lines += [f"  {name:10} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "examples:", *(f"  {example}" for c in COMMANDS.values() for example in c.examples[:1])]
    return "\n".join([*lines, "", "unteach COMMAND --help shows the flags of a command."])


def _help(arguments: list[str], name: str, kind: type, flatten: Sequence[str] = ()) -> None:
    if "--help" in arguments or "-h" in arguments:
        from unteach.settings import help_text

        command = COMMANDS[name]
        text = help_text(
            kind, usage=command.usage, description=command.summary, examples=command.examples, flatten=flatten
        )
        if name in ("forget", "plan"):
            text += (
                "\n  --config PATH\n        A YAML file of these settings; flags override it."
                "\n  --json\n        Print the result as one JSON object on stdout and nothing else there."
            )
        if name == "forget":
            text += (
                "\n  --resume RUN\n        Go on with an interrupted run."
                "\n  --dry-run\n        Only say what the run would need, as unteach plan does."
            )
        if name == "plan":
            text += "\n  --ranks N\n        Plan for so many processes under torchrun; memory is then that of each."
        print(text)
        raise SystemExit(DONE)


def _take_switch(arguments: list[str], flag: str) -> tuple[bool, list[str]]:
    return flag in arguments, [a for a in arguments if a != flag]


def _take_value(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag that is not a setting, and the other arguments."""
    for place, word in enumerate(arguments):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2], arguments[:place] + arguments[place + 1 :]
        if word == flag:
            if place + 1 == len(arguments) or arguments[place + 1].startswith("--"):
                raise InputError(f"{flag} needs a value")
            return arguments[place + 1], arguments[:place] + arguments[place + 2 :]
    return None, arguments


def _show(content: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    if as_json:
        print(json.dumps(content, ensure_ascii=False, default=_plain))
    else:
        print("\n".join(lines))


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


if __name__ == "__main__":
    sys.exit(main())
