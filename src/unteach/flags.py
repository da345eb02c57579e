"""Command-line flags from a dataclass: every field is a flag, its docstring the help, every problem a line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from unteach.config import FORMER_NAMES, checked, nearest_name
from unteach.errors import InputError

__all__ = ["help_text", "parse"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    """As written, without the dashes."""
    path: tuple[str, ...]
    """The fields that lead to the value."""
    hint: Any
    default: Any
    help: str


def parse(
    kind: type, arguments: Sequence[str], *, positional: str, flatten: Sequence[str] = (), start: dict | None = None
) -> Any:
    """Read a dataclass from arguments such as ``MODEL --max-steps 20 --stop.metric "verbmem_f <= 20"``.

    Args:
        kind: The dataclass. A field ``max_steps`` is ``--max-steps``; one of a nested dataclass is ``--stop.metric``.
        arguments: What stands behind the command.
        positional: The field that takes arguments without a flag.
        flatten: Nested dataclasses whose fields need no prefix.
        start: Values that the flags override, nested as in YAML.

    Raises:
        InputError: Unknown flags (with the nearest name), missing or wrong values: all of them.
    """
    flags = {flag.name: flag for flag in _flags(kind, flatten)}
    content = dict(start or {})
    problems: list[str] = []
    loose, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            loose.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        flag = flags.get(name) or flags.get(FORMER_NAMES.get(name, ""))
        if flag is None:
            problems.append(f"unknown flag --{name}{nearest_name(name, flags)}")
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif flag.hint is bool:
            _put(content, flag.path, value.lower() != "false" if equals else True)
        elif typing.get_origin(flag.hint) is dict:
            words = [value] if equals else []
            while rest and not rest[0].startswith("--"):
                words.append(rest.pop(0))
            pairs = [word.partition("=") for word in words]
            problems += [f"--{flag.name} {''.join(p)}: write NAME=VALUE" for p in pairs if not p[0] or not p[1]]
            if not words:
                problems.append(f"--{flag.name} needs a value")
            _put(content, flag.path, {key: _read(Any, text) for key, _, text in pairs})
        elif typing.get_origin(flag.hint) is tuple:
            values = [value] if equals else []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            _put(content, flag.path, [_read(typing.get_args(flag.hint)[0], v) for v in values])
        elif not equals and (not rest or rest[0].startswith("--")):
            problems.append(f"--{flag.name} needs a value")
        else:
            _put(content, flag.path, _read(flag.hint, value if equals else rest.pop(0)))
    several = typing.get_origin(flags[positional].hint) is tuple
    if loose and not several and len(loose) > 1:
        problems.append(f"{', '.join(map(repr, loose[1:]))}: only one {positional} can be given; flags begin with --")
    if loose:
        _put(content, flags[positional].path, loose if several else loose[0])
    result = checked(kind, content, "", problems)
    if problems:
        raise InputError(problems)
    return result


def help_text(kind: type, *, usage: str, description: str, examples: Sequence[str], flatten: Sequence[str] = ()) -> str:
    """What ``--help`` prints."""
    lines = [f"usage: {usage}", "", *textwrap.wrap(description, 100), "", "examples:"]
    lines += [f"  {example}" for example in examples]
    lines += ["", "flags:"]
    for flag in _flags(kind, flatten):
        default = "" if flag.default in (None, (), "", dataclasses.MISSING) else f" [{flag.default}]"
        value = "" if flag.hint is bool else f" {_kind(flag.hint)}"
        lines.append(f"  --{flag.name}{value}{default}")
        lines += textwrap.wrap(flag.help, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _flags(kind: type, flatten: Sequence[str], path: tuple[str, ...] = (), prefix: str = "") -> list[_Flag]:
    hints, docs, flags = typing.get_type_hints(kind), _field_docs(kind), []
    for field in dataclasses.fields(kind):
        hint, here = hints[field.name], (*path, field.name)
        if dataclasses.is_dataclass(hint):
            inner = prefix if field.name in flatten else f"{prefix}{field.name}."
            flags += _flags(typing.cast(type, hint), flatten, here, inner)
        elif not (typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0])):
            name = f"{prefix}{field.name}".replace("_", "-")
            flags.append(_Flag(name, here, hint, field.default, docs.get(field.name, "")))
    return flags


def _field_docs(kind: type) -> dict[str, str]:
    """The strings that stand under the fields of a dataclass."""
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    docs = {}
    for statement, following in itertools.pairwise(body):
        documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if documented and isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = typing.cast(ast.Constant, typing.cast(ast.Expr, following).value).value
            docs[statement.target.id] = " ".join(str(text).split())
    return docs


def _plain_kinds(hint: Any) -> list[Any]:
    """The types a hint allows besides None, without unions."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (Literal, tuple, dict) or not arguments:
        return [hint]
    return [kind for argument in arguments if argument is not type(None) for kind in _plain_kinds(argument)]


def _read(hint: Any, text: str) -> Any:
    """A value as it would stand in YAML; text stays text where text is wanted."""
    kinds = _plain_kinds(hint)
    if any(kind in (str, Path) or typing.get_origin(kind) is Literal for kind in kinds):
        return text
    try:
        return None if text.lower() == "none" else yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _kind(hint: Any) -> str:
    kind = _plain_kinds(hint)[0]
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"{_kind(typing.get_args(kind)[0])} ..."
    if typing.get_origin(kind) is dict:
        return "NAME=VALUE ..."
    return {str: "TEXT", Path: "PATH", int: "N", float: "NUMBER"}.get(kind, "VALUE")


def _put(content: dict, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        content[name] = dict(content.get(name) or {})
        content = content[name]
    content[path[-1]] = value
