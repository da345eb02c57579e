"""The command line: wiring only. Each command has a dataclass of options and a function elsewhere."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unteach import __version__
from unteach.errors import InputError, Interrupted, RanksParted, ending_on_signals, has_ended, printable, shown
from unteach.writing import speaks, under_torchrun, verbosity

__all__ = ["main"]

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
PATH_ERRORS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.EACCES, errno.EROFS)
"""What is wrong with a path that was given, whatever a command has tried with it."""
FIRST_RANK_SPEAKS = 10.0
"""Seconds that the other ranks leave the first one to say what is wrong, before they exit."""
OTHER_FLAGS = {
    "--config": ("PATH", "A YAML file of these settings; flags override it."),
    "--preset": ("NAME", "The settings of a published row, on any model; flags override them."),
    "--list-presets": ("", "Only name the presets."),
    "--json": ("", "Print the result as one JSON object on stdout and nothing else there."),
    "--resume": ("RUN", "Go on with an interrupted run; of its settings only --max-steps N may be given, to raise it."),
    "--accept-changes": ("", "Go on with a run though texts, model or settings were changed; it is recorded."),
    "--dry-run": ("", "Only read, check and time what the run would do, as unteach plan does."),
    "--ranks": ("N", "Plan for so many processes under torchrun; memory is then that of each."),
    "--push-to-hub": ("OWNER/NAME", "Also upload the model and its card there, privately, if the rule was met."),
    "--sign": ("KEY", "Sign the receipt with this SSH key (ssh-keygen)."),
    "--quiet": ("", "Say nothing on the way but warnings."),
    "--verbose": ("", "Say more: every step, and where an error arose."),
}
"""Flags that are no settings of a run: what they take, and their help."""
PRESET_FLAGS = ("--preset", "--list-presets")
EVERYWHERE = ("--quiet", "--verbose")
"""Those of every command."""


@dataclass(frozen=True, slots=True)
class Command:
    """A verb of the command line."""

    options: str
    """``module:class`` of its options, whose first field takes arguments without a flag; what it does is that module's
    ``run``, unless ``run`` is given."""
    summary: str
    usage: str
    examples: tuple[str, ...]
    run: str = ""
    """``module:function`` that takes the options, and what was given of ``other_flags``, and gives back the status."""
    other_flags: tuple[str, ...] = EVERYWHERE
    show: Callable[[dict[str, Any]], None] | None = None
    """Prints the result for people; without it the module's own ``show`` does, where it has one."""

    def kind(self) -> type:
        """The dataclass of the options."""
        return _named(self.options)

    def others(self) -> dict[str, tuple[str, str]]:
        """Its other flags as in ``OTHER_FLAGS``."""
        return {flag: OTHER_FLAGS[flag] for flag in self.other_flags}


def _named(place: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0 done, 3 ended without meeting its rule, 2 wrong input, 130
    interrupted, 1 anything else."""
    program, arguments = arguments is None, list(sys.argv[1:] if arguments is None else arguments)
    with ending_on_signals(program=program) as came:
        return _status(arguments, came)


def _status(arguments: list[str], came: Sequence[int]) -> int:
    """Run a command; all that it may raise becomes lines for people and an exit status, that of signals that came."""
    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(_overview(), flush=True)
            return DONE if arguments else WRONG_INPUT
        if arguments[0] == "--version":
            print(f"unteach {__version__}", flush=True)
            return DONE
        if arguments[0] not in COMMANDS:
            raise InputError(f"unknown command {arguments[0]!r}: choose one of {', '.join(COMMANDS)}")
        if under_torchrun() and arguments[0] not in ("forget", "finish"):
            raise InputError(f"{arguments[0]} runs on one process: start it without torchrun, which is for forget")
        with verbosity(arguments):
            status = _run(arguments[0], arguments[1:])
        _leave()
    except InputError as error:
        if came:
            return _interrupted()
        name = "unteach"
        if not speaks():
            time.sleep(FIRST_RANK_SPEAKS)  # torchrun ends all ranks as soon as one has: the first one's word is enough
            name = f"unteach, rank {os.environ['RANK']}"  # still here: the first one has nothing to say
        for problem in error.problems:
            print(f"{name}: {problem}", file=sys.stderr)
        return WRONG_INPUT
    except RanksParted as error:
        if error.line:
            print(f"unteach: {error.line}", file=sys.stderr)
        return error.status
    except Interrupted as error:
        if speaks():
            print(f"unteach: {error}", file=sys.stderr)
        _leave()
        return INTERRUPTED
    except KeyboardInterrupt:
        has_ended()
        return _interrupted()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if came:  # a library has made another error of it
            return _interrupted()
        if "--verbose" in arguments or os.environ.get("UNTEACH_TRACEBACK"):
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in PATH_ERRORS:
            print(f"unteach: {shown(str(error.filename))}: {error.strerror}: give another path", file=sys.stderr)
            return WRONG_INPUT
        said = printable(" ".join(str(error).split()), 1000)
        print(f"unteach: {type(error).__name__}: {said} (--verbose shows where)", file=sys.stderr)
        return FAILED
    return status


def _interrupted() -> int:
    if speaks():
        print("unteach: interrupted", file=sys.stderr)
    return INTERRUPTED


def _leave() -> None:
    """Leave the process group that a command under ``torchrun`` has formed."""
    if under_torchrun():
        from unteach.models.distributed import finish

        finish()


def _run(name: str, arguments: list[str]) -> int:
    """Read the options, run the command, and print its result as JSON or for people; the exit status."""
    from unteach.settings import from_yaml, help_text, parse, read_settings

    command = COMMANDS[name]
    kind = command.kind()
    if "--help" in arguments or "-h" in arguments:
        examples = "\n".join(f"  {example}" for example in command.examples)
        flags = help_text(kind, ("method",), command.others())
        print(f"usage: {command.usage}\n\n{command.summary}\n\nexamples:\n{examples}\n\n{flags}")
        return DONE
    others, arguments = take_flags(arguments, command.other_flags)
    if "--list-presets" in others:
        from unteach.job.presets import listing

        print(listing())
        return DONE
    if "--resume" in others:
        from unteach.job.same_run import config_to_resume

        options: Any = config_to_resume(others, arguments)
    elif "--accept-changes" in others and name != "finish":
        raise InputError("--accept-changes is for a run that goes on: give --resume RUN")
    else:
        if {"--preset", "--config"} <= set(others):
            raise InputError("--preset and --config are both given: give one of them; flags override either")
        start = read_settings(others["--config"]) if "--config" in others else None
        if "--preset" in others:
            from unteach.job.presets import preset

            start = preset(others["--preset"])
        try:
            options = parse(kind, arguments, flatten=("method",), start=start)
        except InputError:
            if "--config" in others:
                from_yaml(kind, others["--config"])  # what is wrong with the file itself is reported with its name
            raise
    if command.run:
        return _named(command.run)(options, others)
    module = sys.modules[kind.__module__]
    try:
        result = module.run(options)
    except ValueError as error:  # commands name wrong input by ValueErrors, one line per problem
        raise InputError(str(error).splitlines()) from error
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    elif show := command.show or getattr(module, "show", None):
        show(result)
    return result.get("status", DONE)


def take_flags(arguments: Sequence[str], flags: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What is given of these ``OTHER_FLAGS``, and the other arguments."""
    taken: dict[str, str] = {}
    left, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in flags:
            left.append(word)
            continue
        if equals and not OTHER_FLAGS[name][0]:
            raise InputError(f"{word}: {name} takes no value, leave it out or give {name}")
        if OTHER_FLAGS[name][0] and not equals:
            if not rest or rest[0].startswith("--"):
                raise InputError(f"{name} needs a value")
            value = rest.pop(0)
        taken[name] = value
    return taken, left


@dataclass(frozen=True, kw_only=True)
class FinishOptions:
    """What ``finish`` takes."""

    run: str
    """The folder of an interrupted run."""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """What ``unteach completion`` takes."""

    shell: Literal["bash", "zsh", "fish"]
    """The shell."""


def completion(options: CompletionOptions, others: dict[str, str]) -> int:
    """Print the script; the exit status."""
    from unteach.method.divergences import HOLDS
    from unteach.method.losses import LOSSES
    from unteach.method.optimizers import OPTIMIZERS
    from unteach.settings import completion_script, flag_values

    known = {"--loss": tuple(LOSSES), "--divergence": HOLDS, "--optimizer": tuple(OPTIMIZERS)}
    commands = {}
    for name, command in COMMANDS.items():
        flags = flag_values(command.kind(), ("method",), command.others())
        commands[name] = flags | {flag: values for flag, values in known.items() if flag in flags} | {"--help": ()}
    print(completion_script(options.shell, "unteach", commands))
    return DONE


_FORGET = "unteach forget micro:target --documents micro:forget --out run/"
COMMANDS = {
    "forget": Command(
        "unteach.config:ForgetConfig",
        "Make a model forget documents: writes a run folder with the model, its scores and a report.",
        "unteach forget MODEL --documents DIR --out RUN [flags]   |   unteach forget --resume RUN [--max-steps N]",
        (f"{_FORGET} --dry-run", _FORGET),
        run="unteach.job.command:forget",
        other_flags=(
            "--config",
            *PRESET_FLAGS,
            "--json",
            "--resume",
            "--accept-changes",
            "--dry-run",
            "--push-to-hub",
            "--sign",
            *EVERYWHERE,
        ),
    ),
    "finish": Command(
        "unteach.cli:FinishOptions",
        "Make a result of an interrupted run as it is: its best model so far, with report and card.",
        "unteach finish RUN [--json]",
        ("unteach finish run/",),
        run="unteach.job.command:finish",
        other_flags=("--json", "--accept-changes", "--sign", *EVERYWHERE),
    ),
    "plan": Command(
        "unteach.config:ForgetConfig",
        "Say what a forget run would need in memory, disk and time, and refuse what it would refuse.",
        "unteach plan MODEL --documents DIR [flags of forget] [--ranks N]",
        ("unteach plan micro:target --documents micro:forget",),
        run="unteach.job.command:plan",
        other_flags=("--config", *PRESET_FLAGS, "--json", "--ranks", *EVERYWHERE),
    ),
    "evaluate": Command(
        "unteach.evaluation.command:EvaluateOptions",
        "Measure what models recite, know and leak.",
        "unteach evaluate MODEL... [flags]",
        ("unteach evaluate micro:target --limit 4 --out scores.json",),
    ),
    "audit": Command(
        "unteach.job.audit:AuditOptions",
        "Attack a model that has forgotten: does it hold when the documents are asked for in another way?",
        "unteach audit RUN [flags]   |   unteach audit MODEL --before TARGET --documents DIR --out DIR [flags]",
        ("unteach audit run/ --quick",),
    ),
    "report": Command(
        "unteach.report.page:ReportOptions",
        "One page that compares runs and scores files.",
        "unteach report RUN... [flags]",
        ("unteach report run/ --out report.html",),
        show=lambda result: print(f"{result['headline']}\nreport: {result['report']}"),
    ),
    "receipt": Command(
        "unteach.job.receipts.command:ReceiptOptions",
        "Write a run's receipt again, with the audits made since, and sign it.",
        "unteach receipt RUN [--sign KEY]",
        ("unteach receipt run/",),
    ),
    "verify": Command(
        "unteach.job.receipts.verify:VerifyOptions",
        "Compute again what a receipt says, and tell line by line what agrees.",
        "unteach verify RECEIPT [--model M] [--documents D] [--salt F] [--measure]",
        ("unteach verify run/ --model run/model",),
    ),
    "prove": Command(
        "unteach.job.receipts.proof:ProveOptions",
        "Show that one document was in a request, without showing the others.",
        "unteach prove RECEIPT --document FILE [--salt F] [--out proof.json]",
        ("unteach prove run/ --document letter.txt",),
    ),
    "ledger": Command(
        "unteach.job.receipts.ledger:LedgerOptions",
        "The requests on one model in their order, and whether earlier ones still hold.",
        "unteach ledger FOLDER [--measure]",
        ("unteach ledger .",),
    ),
    "purge": Command(
        "unteach.job.receipts.purge:PurgeOptions",
        "Remove from a run folder all that holds text of the documents, or could give it back.",
        "unteach purge RUN",
        ("unteach purge run/",),
    ),
    "demo": Command(
        "unteach.experiments.demo:DemoOptions",
        "See it work in minutes, offline: unlearn the embedded model with the paper's method and a baseline.",
        "unteach demo [OUT] [flags]",
        ("unteach demo demo/",),
    ),
    "reproduce": Command(
        "unteach.experiments.reproduce:ReproduceOptions",
        "Run one of the paper's experiments.",
        "unteach reproduce NAME [flags]",
        ("unteach reproduce theorem --seeds 0 --out results", "unteach reproduce methods --list"),
    ),
    "completion": Command(
        "unteach.cli:CompletionOptions",
        "Print a script with which bash, zsh or fish completes commands, flags and values.",
        "unteach completion bash|zsh|fish",
        ("unteach completion bash > unteach.bash",),
        run="unteach.cli:completion",
    ),
}


def _overview() -> str:
    commands = [f"  {name:10} {command.summary}" for name, command in COMMANDS.items()]
    examples = [f"  {command.examples[0]}" for command in COMMANDS.values()]
    return f"""Make a language model forget chosen documents and keep everything else.

usage: unteach COMMAND ...

{chr(10).join(commands)}

examples:
{chr(10).join(examples)}

unteach COMMAND --help shows the flags of a command, unteach --version the version."""
