"""A resumed run is the same run: what it was given, recorded at its start and compared when it goes on."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig
from unteach.data import Documents
from unteach.errors import InputError, given_path
from unteach.job.inputs import PIPED, Inputs
from unteach.job.lock import clear_litter, holding
from unteach.job.receipts.privacy import hidden_hash, secret_of
from unteach.job.run_folder import STOP_SCORES, RunFolder, going_on, rewind
from unteach.models.distributed import from_first_rank, is_first_rank
from unteach.settings import from_values, from_yaml, read_settings, to_yaml
from unteach.training.checkpoint import Checkpoints
from unteach.writing import file_sha256, json_sha256, sealed, unsealed, write_whole

__all__ = [
    "START",
    "StartRecord",
    "accepted_changes",
    "begun",
    "checkpoints_of",
    "config_to_resume",
    "ended_already",
    "going_on_with",
    "saved_config",
]

START = "start.json"
"""What a run was given: its config, and the SHA-256 of every text and model."""
FORMAT = "unteach.start/1"
TEXTS = ("texts ", "file ")
"""What hashes of texts begin with."""
_MAY_DIFFER = ("out",)
"""A run folder may be moved."""
_ACCEPT = "undo that, start anew with another --out, or go on all the same with --accept-changes, which is recorded"
_WHAT = {
    "weights": "the weights of {0}", "files": "the configuration or tokenizer of {0}", "file": "the lines of {0}",
    "texts": "the texts of {0}",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class StartRecord:
    """What a run was given when it began."""

    config: dict[str, Any]
    inputs: dict[str, str]
    """SHA-256 by what it is of, such as ``texts documents`` and ``weights model``."""
    changes: tuple[dict[str, Any], ...] = ()
    """What was other when the run went on, and was accepted: ``when`` and ``what``."""
    run: str = ""
    """SHA-256 of what it began with, which every checkpoint of the run has, too; empty where that is not known."""
    measured: tuple[str, ...] = ()
    """Names of settings that were not given but measured, so that they differ from seed to seed."""

    @classmethod
    def of(cls, config: ForgetConfig, inputs: Inputs, run: Path) -> StartRecord:
        """What a run is given now; in private no hash of a text can be computed without the run's secret."""
        found = dict(inputs.hashes) | {f"texts {name}": source.sha256 for name, source in inputs.texts.items()}
        for option in ("questions", "keep_questions"):
            if file := getattr(config, option):
                found[f"file {option}"] = file_sha256(Path(file))
        record = cls(_plain(config), found)
        record = record.in_private(secret_of(run)) if config.private else record
        return dataclasses.replace(record, run=json_sha256([record.config | {"out": ""}, record.inputs]))

    def in_private(self, secret: bytes) -> StartRecord:
        """The same with hashes of texts that need the secret."""
        hidden = {name: hidden_hash(value, secret) for name, value in self.inputs.items() if name.startswith(TEXTS)}
        return dataclasses.replace(self, inputs=self.inputs | hidden)

    @classmethod
    def read(cls, run: Path) -> StartRecord | None:
        """That of a run folder; None: it has none, as those of earlier versions. A ``ValueError``: it is damaged."""
        try:
            content = unsealed((run / START).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}")
        kinds = {"config": dict, "inputs": dict, "changes": list}
        if wrong := [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]:
            raise ValueError(f"it has no {' and no '.join(wrong)}")
        known = str(content.get("run", "")), tuple(content.get("measured", ()))
        return cls(content["config"], content["inputs"], tuple(content["changes"]), *known)

    def write(self, run: Path) -> None:
        """Write it into a run folder, all or nothing."""
        write_whole(run / START, sealed({"format": FORMAT} | json.loads(json.dumps(dataclasses.asdict(self)))))

    def differences(self, now: StartRecord) -> list[str]:
        """A line for all that is other now; a larger ``max_steps`` is not."""
        said = []
        before, after = _flat(self.config), _flat(now.config)
        came_later = _flat(_plain(ForgetConfig())).keys() - before.keys()
        for name in dict.fromkeys((*before, *after)):
            if name in came_later:  # with a later version: such a setting leaves what was as it was
                continue
            then, given = before.get(name), after.get(name)
            raised = name == "max_steps" and isinstance(given, int) and isinstance(then, int) and given > then
            if then != given and name not in _MAY_DIFFER and not raised and not _moved(name, then, given):
                said.append(f"{name} was {then!r} and is {given!r}")
        for name in dict.fromkeys((*self.inputs, *now.inputs)):
            if self.inputs.get(name) != now.inputs.get(name):
                kind, _, option = name.partition(" ")
                said.append(f"{_WHAT[kind].format(option)} are not those that the run began with")
        return said


def saved_config(run: Path, max_steps: int | None = None, *, accept: bool = False) -> ForgetConfig:
    """The settings of a run folder, with more steps where wished; refused where they are not those it began with."""
    try:
        start, wrong = StartRecord.read(run), ""
    except ValueError as error:
        start, wrong = None, str(error)
    if wrong and not accept:
        raise InputError(f"{run / START} is damaged: {wrong}: it says what the run began with; {_ACCEPT}")
    if start is not None and not _is_readable(run / "config.yaml"):
        config = from_values(ForgetConfig, start.config | {"out": str(run)})  # the copy
    else:
        config = from_yaml(ForgetConfig, run / "config.yaml", out=str(run))
    if Path(config.documents).name == PIPED and (run / PIPED).is_file():  # the folder may be moved
        config = dataclasses.replace(config, documents=str(run / PIPED))
    if max_steps is not None and max_steps < config.max_steps:
        raise InputError(f"max_steps is {max_steps}: it was {config.max_steps}, and a resume may only raise it")
    config = dataclasses.replace(config, max_steps=max_steps or config.max_steps)
    if start and not accept and (said := start.differences(StartRecord(_plain(config), start.inputs))):
        raise InputError(f"{run} cannot go on as the same run: {'; '.join(said)}: {_ACCEPT}")
    return config


def config_to_resume(flags: dict[str, str], arguments: Sequence[str]) -> ForgetConfig:
    """The settings of the run that ``--resume`` names, where nothing else is given but ``--max-steps``, which is put
    among the flags."""
    flag, _, limit = " ".join(arguments).replace("=", " ").partition(" ")
    others = sorted({"--config", "--preset"} & flags.keys())
    if others or (arguments and flag != "--max-steps") or "--" in limit:
        kept = "a resumed run keeps its settings; only --max-steps can be given with --resume RUN"
        raise InputError(f"{' '.join([*others, *arguments])}: {kept}")
    if arguments and not (limit.isdecimal() and len(limit) < 10 and int(limit) > 0):
        raise InputError(f"max_steps is {limit!r}: it must be a whole number of steps, at least 1")
    flags["--max-steps"] = limit
    run = given_path(flags["--resume"], "resume")
    return saved_config(run, int(limit or 0) or None, accept="--accept-changes" in flags)


def _is_readable(config: Path) -> bool:
    try:
        return bool(read_settings(config))
    except InputError:
        return False


def ended_already(run: Path, max_steps: int | None = None, *, by_hand: bool = False) -> dict[str, Any] | None:
    """``result.json`` of a run that has ended and cannot go on; one that ended at a limit of steps that is raised can,
    and one that ended by hand, unless that counts as the end."""
    try:
        content = json.loads((run / "result.json").read_text(encoding="utf-8"))
        rule, _, _ = content["stop"]["rule"], content["stop"]["reason"], content["forgotten"]
        limit = read_settings(run / "config.yaml").get("max_steps", 0)
        goes_on = (rule == "finished" and not by_hand) or (
            rule == "max_steps" and max_steps is not None and max_steps > limit
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return None if goes_on else content


@contextmanager
def going_on_with(run: Path, max_steps: int | None, finish: bool, accept: bool) -> Iterator[ForgetConfig]:
    """The settings of a run that goes on, or is finished by hand; other processes are kept out of it meanwhile."""
    config = saved_config(run, max_steps, accept=accept)
    with holding(run):
        clear_litter(run)
        if ended := ended_already(run, max_steps, by_hand=finish):
            raise InputError(f"run is {str(run)!r}: it has ended already, {ended['stop']['reason']}")
        if finish and not (run / "metrics.jsonl").exists():
            raise InputError(f"run is {str(run)!r}: it has made no step yet; go on with: {going_on(run)}")
        yield config


def begun(
    folder: RunFolder, config: ForgetConfig, inputs: Inputs, asked: Documents, unmeasured: ForgetConfig
) -> ForgetConfig:
    """Write what a run is given and its settings: from here on it is there, and goes on. The config as it is written.

    ``unmeasured`` is the config before its numbers were measured, ``asked`` are the documents as they were read, before
    a chat template. A run that goes on has no result yet, and what a kill has left of a line is taken out of its log.
    """
    folder.begin()
    piped = config.documents == "-" and not config.private
    if is_first_rank() and folder.resume:
        if not _is_readable(folder.path / "config.yaml"):
            folder.say(f"warning: {folder.path / 'config.yaml'} is damaged and is written again, as {START} has it")
        (folder.path / "result.json").unlink(missing_ok=True)
        rewind(folder.path / STOP_SCORES, sys.maxsize)
    elif is_first_rank():
        named = dataclasses.replace(config, documents=str(folder.path / PIPED)) if piped else config
        now, then = (_flat(_plain(each)) for each in (config, unmeasured))
        measured = tuple(name for name in now if now[name] != then.get(name))
        record = StartRecord.of(named, inputs, folder.path)
        dataclasses.replace(record, measured=measured).write(folder.path)
    config = folder.with_documents(config, asked)
    folder.write("config.yaml", to_yaml(config))
    return config


def checkpoints_of(run: Path, keep: int) -> Checkpoints:
    """The checkpoints of a run that has begun; those of another run are none of it."""
    record = StartRecord.read(run) if is_first_rank() else None
    logs = (run / "metrics.jsonl", run / STOP_SCORES)
    return Checkpoints(run / "checkpoints", keep, logs, record.run if record else "")


def accepted_changes(
    run: Path, config: ForgetConfig, inputs: Inputs, *, accept: bool, say: Callable[[str], None]
) -> list[str]:
    """Compare a run that goes on with its beginning; refused where it is another one, unless that is accepted.

    Returns:
        All changes that were ever accepted, a line each.
    """
    found = _compared(run, config, inputs, accept) if is_first_rank() else ([], [], "")
    said, changes, refused = from_first_rank(found)
    if refused:
        raise InputError(refused)
    for line in said:
        say(line)
    return changes


def _compared(run: Path, config: ForgetConfig, inputs: Inputs, accept: bool) -> tuple[list[str], list[str], str]:
    """What to say, what was accepted, and why the run cannot go on."""
    now, wrong = StartRecord.of(config, inputs, run), ""
    try:
        start = StartRecord.read(run)
    except ValueError as error:
        start, wrong = None, f"{START} was damaged: {error}"
    if start is None and not wrong:
        dataclasses.replace(now, run="").write(run)
        unknown = "whether texts, model and settings are those it began with is not known: an earlier version began it"
        return [f"warning: {unknown}"], [], ""
    said = [wrong] if start is None else start.differences(now)
    if said and not accept:
        return [], [], f"{run} cannot go on as the same run: {'; '.join(said)}: {_ACCEPT}"
    known = start.changes if start else ()
    if said:
        _forget_scores(run)  # first: once the change is recorded, nothing would tell that they are of other texts
        known = (*known, {"when": datetime.now(UTC).isoformat(timespec="seconds"), "what": said})
        dataclasses.replace(now, changes=known, run=start.run if start else "").write(run)
    lines = [f"changed on the way: {what}" for change in known for what in change["what"]]
    return [f"warning: accepted: {what}" for what in said], lines, ""


def _forget_scores(run: Path) -> None:
    """Remove the scores that a run has measured: of other texts or models they cannot be compared with later ones."""
    for file in (*(run / "evaluations").glob("*.json"), *(run / "checkpoints").glob("*.json")):
        file.unlink()


def _plain(config: ForgetConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{where}{name}.") if isinstance(value, dict) and value else {f"{where}{name}": value}
    return found


def _moved(name: str, then: Any, now: Any) -> bool:
    """Whether the texts from standard input lie elsewhere because the run folder does."""
    return name == "documents" and Path(str(then)).name == Path(str(now)).name == PIPED
