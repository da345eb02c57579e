"""Whether a value is as a JSON schema says: the few words of the language that our own schema files use."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

__all__ = ["problems", "schema"]

KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip
USED = {
    "$schema", "$defs", "$ref", "title", "description", "type", "const", "pattern", "minimum", "required", "properties",
    "additionalProperties", "items",
}  # fmt: skip
"""The words that are understood; a schema file with others would be checked in part only."""


@functools.cache
def schema(name: str) -> dict[str, Any]:
    """A schema file of this package."""
    return json.loads(files("unteach.job.receipts").joinpath(name).read_text(encoding="utf-8"))


def problems(value: Any, rule: Mapping[str, Any], whole: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """What is wrong with a value, a line each; ``whole`` is the schema that a rule is part of."""
    here = place or "the whole"
    if reference := rule.get("$ref"):
        yield from problems(value, whole["$defs"][reference.rpartition("/")[2]], whole, place)
    if "const" in rule and value != rule["const"]:
        yield f"{here} is {value!r}: it must be {rule['const']!r}"
    if "type" in rule:
        allowed = [rule["type"]] if isinstance(rule["type"], str) else rule["type"]
        if not any(_is(value, kind) for kind in allowed):
            yield f"{here} is {type(value).__name__}: it must be {' or '.join(allowed)}"
            return
    if "pattern" in rule and isinstance(value, str) and not re.search(rule["pattern"], value):
        yield f"{here} is {value!r}: it must match {rule['pattern']}"
    if "minimum" in rule and _is(value, "number") and value < rule["minimum"]:
        yield f"{here} is {value}: it must be at least {rule['minimum']}"
    if isinstance(value, dict):
        known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
        yield from (
            f"{place}{'.' * bool(place)}{name} is missing" for name in rule.get("required", ()) if name not in value
        )
        for name, part in value.items():
            inner = f"{place}{'.' * bool(place)}{name}"
            if name in known:
                yield from problems(part, known[name], whole, inner)
            elif others is False:
                yield f"{inner} is unknown"
            elif isinstance(others, dict):
                yield from problems(part, others, whole, inner)
    if isinstance(value, list) and "items" in rule:
        for number, part in enumerate(value):
            yield from problems(part, rule["items"], whole, f"{place}[{number}]")


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of a kind; True and False are no numbers."""
    return isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
