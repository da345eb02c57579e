"""An audit: every attack on every model that is there, one JSON file each, and a summary.

``ATTACK.json`` (schema ``unteach.audit/1``) holds ``attack``, ``title``, ``protocol``, ``source``, ``over``,
``settings``, ``seed``, ``quick``; ``before``, ``after``, ``reference`` (where given) and ``control``, each a list of
``{line, at, value, low, high, count, unit}``; ``compared_with``, the control's name; ``beyond``, a list of ``{line, at,
value, low, high, unit, held}``; ``held`` (true, false, or null where it is not known), ``note`` in a sentence;
``inputs`` (hashes), ``key``, ``seconds``, ``created`` and ``versions``. ``summary.json`` has ``held`` and ``note`` of
all. No file holds a word of a document. An attack whose file has the same key is not made again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unteach.audits import Attack, Reading, attacks
from unteach.audits.judging import figures, judge
from unteach.audits.texts import Asked, Case
from unteach.data import Documents
from unteach.evaluation.scores import AUDIT_SCHEMA, library_versions, progress_bars, write_json
from unteach.writing import json_sha256

__all__ = ["CONTROLS", "SUMMARY", "Audit"]

SUMMARY = "summary.json"
CONTROLS = ("reference", "base")
"""Models that never saw the documents, the better first."""
Remember = Callable[[str, Callable[[], Any]], Any]
"""Takes a name and what measures it; gives back what was measured under that name, once."""


@dataclass(kw_only=True)
class Audit:
    """What is audited, with which models."""

    models: Mapping[str, Callable[[], Any]]
    """By role, ``after``, ``before``, ``reference``, ``base``, as far as there are: what loads each."""
    tokenizer: Any
    asked: Asked
    never_seen: Asked | None
    """The same about documents that no model here has seen, for the control where no model is one."""
    unrelated: Documents
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Hashes of models and texts."""
    quick: bool = False
    seed: int = 0
    batch_size: int = 128
    packages: bool = True
    """Whether attacks also use packages that are not required but installed."""
    progress: bool | None = None
    say: Callable[[str], None] = lambda line: None
    remember: Remember = lambda name, compute: compute()
    """For the readings of models that several audits share."""

    def run(self, out: Path | None, names: Sequence[str] = (), *, fresh: bool = False) -> dict[str, dict[str, Any]]:
        """Make the attacks of these names, or all; the content of each file, and in ``out`` the files."""
        found = {}
        for name in names or attacks():
            file = out / f"{name}.json" if out else None
            done = None if fresh or file is None else _read(file)
            if done is None or done.get("key") != self.key(name):
                done = self.attack(name)
                if file is not None:
                    write_json(file, done)
            found[name] = done
            self.say(line_of(done))
        if out is not None:
            write_json(out / SUMMARY, self.summary(out))
        return found

    def settings(self, attack: Attack) -> Any:
        """An attack's settings."""
        chosen = attack.quick if self.quick else attack.full
        return attack.installed(chosen) if self.packages else chosen

    def key(self, name: str) -> str:
        """Hash of all that an attack's result depends on."""
        settings = dataclasses.asdict(self.settings(attacks()[name]))
        content = {"attack": name, "settings": settings, "seed": self.seed, "inputs": dict(self.inputs)}
        return json_sha256(content)[:16]

    def attack(self, name: str) -> dict[str, Any]:
        """Make one attack on all models."""
        started, attack = time.perf_counter(), attacks()[name]
        control = next((role for role in CONTROLS if role in self.models), None)
        roles = [role for role in ("before", "after", control) if role in self.models]
        read = {role: self.readings(name, role) for role in roles if role is not None}
        holdout = None
        if control is None and self.never_seen is not None and any(r.chance is None for r in read["after"]):
            holdout = self.readings(name, "holdout")
        judged = judge(
            read["after"], read.get(control or ""), holdout, read.get("before", []),
            over=attack.over, control_name=control or "", seed=self.seed,
        )  # fmt: skip
        return {
            "schema": AUDIT_SCHEMA,
            "attack": name,
            **{field: getattr(attack, field) for field in ("title", "protocol", "source", "over")},
            "settings": dataclasses.asdict(self.settings(attack)),
            "seed": self.seed,
            "quick": self.quick,
            **{role: figures(readings, self.seed) for role, readings in read.items() if role != "base"},
            **judged,
            "inputs": dict(self.inputs),
            "key": self.key(name),
            "seconds": round(time.perf_counter() - started, 1),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": library_versions(),
        }

    def readings(self, name: str, role: str) -> list[Reading]:
        """What an attack reads of one model; ``holdout`` is the audited one on documents that it never saw."""
        attack = attacks()[name]

        def compute() -> list[dict[str, Any]]:
            asked = self.never_seen if role == "holdout" else self.asked
            assert asked is not None
            model = self.models["after" if role == "holdout" else role]()
            with progress_bars(self.progress) as start_bar:
                case = Case(
                    model=model, tokenizer=self.tokenizer, asked=asked, unrelated=self.unrelated, seed=self.seed,
                    role=role, batch_size=self.batch_size, start_bar=lambda label, n: start_bar(f"{name}, {label}", n),
                )  # fmt: skip
                return [dataclasses.asdict(reading) for reading in attack.measure(case, self.settings(attack))]

        shared = role not in ("after", "holdout")
        rows = self.remember(f"audit {self.key_of_role(name, role)}", compute) if shared else compute()
        return [_reading(row) for row in rows]

    def key_of_role(self, name: str, role: str) -> str:
        """What the readings of one model are known by."""
        settings = dataclasses.asdict(self.settings(attacks()[name]))
        inputs = {key: value for key, value in self.inputs.items() if key not in ("after", "before", *CONTROLS)}
        content = [name, role, self.inputs.get(role), settings, self.seed, inputs]
        return json_sha256(content)[:16]

    def summary(self, out: Path) -> dict[str, Any]:
        """What all attacks in a folder found."""
        done = {name: content for name in attacks() if (content := _read(out / f"{name}.json")) is not None}
        return {
            "schema": AUDIT_SCHEMA,
            "attacks": {
                name: {key: content[key] for key in ("title", "held", "compared_with", "note", "quick", "seed")}
                for name, content in done.items()
            },
            "held": [name for name, content in done.items() if content["held"] is True],
            "not_held": [name for name, content in done.items() if content["held"] is False],
            "not_known": [name for name, content in done.items() if content["held"] is None],
            "not_made": [name for name in attacks() if name not in done],
        }


def _reading(row: Mapping[str, Any]) -> Reading:
    """A reading from plain values."""
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Reading(**values)


def line_of(content: Mapping[str, Any]) -> str:
    """An attack's result in a line for people."""
    mark = {True: "✓", False: "✗"}.get(content["held"], "–")
    return f"{mark} {content['title']}: {content['note']}"


def _read(file: Path) -> dict[str, Any] | None:
    """The content of a file of this schema; None where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return content if isinstance(content, dict) and content.get("schema") == AUDIT_SCHEMA else None
