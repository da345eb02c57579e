"""What readings say: figures with intervals, how far a model is beyond its control, and whether it held.

*Control.* What a model that never saw the documents has under the same attack: the reference (retrained), else the base
model, on the same items; without either, chance where an attack knows it, else the audited model itself on documents
that it never saw. An attack that returns something to a model that cannot have remembered it has proven nothing.

*Held.* ``beyond`` is the audited model's figure minus the control's, with a 95 % bootstrap interval over items, drawn
alike for both. It held where the interval ends within ``MARGIN`` of zero; it did not where it lies above zero and ends
beyond that; else nothing is said: the items do not tell, or the model says *less* than one that never saw the
documents, as one does that refuses or is broken, which may hide what is there. Few items can show a leak, never its
absence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unteach.audits import Reading
from unteach.evaluation.formulas import RESAMPLES, membership_auc, percentiles, resampled_aucs
from unteach.writing import format_number

__all__ = ["FEWEST", "MARGIN", "figures", "judge"]

MARGIN = {"percent": 10.0, "auc": 0.1}
"""So much beyond the control is none, in the unit of a reading."""
FEWEST = 16
"""With fewer items nothing is said to have held."""
DECIMALS = {"percent": 1, "auc": 2}
NOTHING = "nothing to compare with: give --reference, --base or --holdout"

Readings = Sequence[Reading]


def figures(readings: Readings, seed: int) -> list[dict[str, Any]]:
    """Value and interval of each reading, with its line and place, as plain values."""
    found = []
    for reading in readings:
        low, high = _interval(_resampled(reading, seed), reading)
        plain = {"line": reading.line, "at": reading.at, "value": _rounded(_value(reading))}
        found.append(plain | {"low": low, "high": high, "count": len(reading.scores), "unit": reading.unit})
    return found


def judge(
    after: Readings,
    control: Readings | None,
    holdout: Readings | None,
    before: Readings,
    *,
    over: str,
    control_name: str,
    seed: int,
) -> dict[str, Any]:
    """What an attack found, as plain values: ``control`` and ``beyond`` by line and place, ``held`` and a ``note``.

    Args:
        after: Of the audited model.
        control: Of a model that never saw the documents, on the same items; None where there is none.
        holdout: Of the audited model on documents that it never saw, for readings without chance.
        before: Of the model before it forgot, for the note.
        over: What the places of readings are.
        control_name: What the control is called.
        seed: Of the bootstrap.
    """
    controls, beyond = [], []
    for reading in after:
        other, paired = _control_of(reading, control, holdout)
        if other is None:
            continue
        controls += figures([other], seed)
        apart = _resampled(reading, seed) - _resampled(other, seed if paired else seed + 1)
        low, high = _interval(apart, reading)
        found = {"line": reading.line, "at": reading.at, "value": _rounded(_value(reading) - _value(other))}
        found |= {"low": low, "high": high, "unit": reading.unit}
        beyond.append(found | {"held": _held(low, high, len(reading.scores), reading)})
    answers = [entry["held"] for entry in beyond]
    held = False if False in answers else True if answers and all(answers) and len(beyond) == len(after) else None
    name = control_name if control is not None else "holdout or chance" if controls else "nothing"
    note = _note(held, beyond, figures(after, seed), figures(before, seed), controls, name, over)
    return {"compared_with": name, "control": controls, "beyond": beyond, "held": held, "note": note}


def _control_of(reading: Reading, control: Readings | None, holdout: Readings | None) -> tuple[Reading | None, bool]:
    """What a reading is compared with, and whether item by item."""
    if control is None and reading.chance is not None:
        level = reading.chance if isinstance(reading.chance, tuple) else (reading.chance,) * len(reading.scores)
        ties = (0.0,) * len(reading.against)  # with texts of equal loss, whose AUC is one half
        scores = (0.0,) * len(reading.scores) if reading.against else level
        return Reading(line=reading.line, at=reading.at, scores=scores, against=ties), True
    others = holdout if control is None else control
    found = next((other for other in others or () if (other.line, other.at) == (reading.line, reading.at)), None)
    return found, found is not None and control is not None and len(found.scores) == len(reading.scores)


def _scale(reading: Reading) -> float:
    return 1.0 if reading.against else 100.0


def _value(reading: Reading) -> float:
    if reading.against:
        return membership_auc(reading.scores, reading.against)
    return _scale(reading) * float(np.mean(reading.scores))


def _resampled(reading: Reading, seed: int) -> NDArray[np.float64]:
    """The value for every resampling of the items: the same items for the same seed and number of them."""
    if reading.against:
        return resampled_aucs(reading.scores, reading.against, seed)
    scores = np.asarray(reading.scores)
    draws = np.random.default_rng(seed).integers(0, len(scores), (RESAMPLES, len(scores)))
    return _scale(reading) * scores[draws].mean(1)


def _interval(values: NDArray[np.float64], reading: Reading) -> tuple[float | None, float | None]:
    if len(reading.scores) < 2:
        return None, None
    low, high = percentiles(values)
    return _rounded(low), _rounded(high)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _held(low: float | None, high: float | None, count: int, reading: Reading) -> bool | None:
    if low is None or high is None:
        return None
    margin = MARGIN[reading.unit]
    if abs(high) <= margin and (not reading.two_sided or abs(low) <= margin):
        return True if count >= FEWEST else None
    return False if low > 0 or (reading.two_sided and high < 0) else None


def _note(
    held: bool | None, beyond: list[dict[str, Any]], after: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]], controls: Sequence[Mapping[str, Any]], name: str, over: str,
) -> str:  # fmt: skip
    """The places that decide, where the model is furthest from its control, in a sentence."""
    if not beyond:
        return NOTHING if after else "not measured: the documents give nothing to ask"
    deciding = [entry for entry in beyond if entry["held"] is held] or beyond
    furthest: dict[str, dict[str, Any]] = {}  # of each kind of measurement: recital, answers
    for entry in sorted(deciding, key=lambda entry: -abs(entry["value"]) / MARGIN[entry["unit"]]):
        furthest.setdefault(re.split(r"\W", entry["line"])[0], entry)
    chosen = list(furthest.values())[: 1 if held else 2]

    def text(entries: Sequence[Mapping[str, Any]], entry: Mapping[str, Any]) -> str:
        values = {other["at"]: other["value"] for other in entries if other["line"] == entry["line"]}
        value = values.get(entry["at"], next(iter(values.values()), None))
        return format_number(value, DECIMALS[entry["unit"]])

    def told(entry: Mapping[str, Any]) -> str:
        place = entry["at"] if isinstance(entry["at"], str) else f"{over} {entry['at']:g}"
        compared = f"{name} {text(controls, entry)}, before {text(before, entry)}"
        return f"{entry['line']}, {place}: {text(after, entry)} ({compared})"

    said = {True: "nothing beyond the control; furthest:", False: "beyond the control:", None: "not clear:"}[held]
    if held is None and chosen[0]["unit"] == "percent" and chosen[0]["value"] < -MARGIN["percent"]:
        said = "says less than the control, which may hide what is there:"
    return f"{said} {'; '.join(map(told, chosen))}"
