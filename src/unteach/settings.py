"""Dataclasses of settings from YAML and from flags: every field is a key and a flag, its docstring the help.

Every problem is named, with the nearest known name. A dataclass that has had other names for its fields lists them in
``FORMER_NAMES`` and translates them in ``renamed``.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from unteach.errors import InputError

__all__ = ["checked", "from_values", "from_yaml", "help_text", "nearest_name", "parse", "read_settings", "to_yaml"]

_ARTICLES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}


def nearest_name(given: str, known: Any) -> str:
    """`` (did you mean X?)`` for the known name nearest to a given one, or nothing."""
    nearest = difflib.get_close_matches(given, list(known), n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def to_yaml(config: Any) -> str:
    """A config dataclass as YAML text that ``from_yaml`` reads back."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def from_yaml(kind: type, path: str | Path, **overrides: Any) -> Any:
    """Read a config dataclass from a YAML file.

    Raises:
        InputError: The file cannot be read, or has unknown keys (with the nearest known name) or values of a wrong
            type. All problems are named.
    """
    content = read_settings(path) | overrides
    try:
        return from_values(kind, content)
    except InputError as error:
        raise InputError([f"{path}: {problem}" for problem in error.problems]) from None


def from_values(kind: type, content: dict[str, Any], where: str = "") -> Any:
    """A config dataclass from plain values, or an ``InputError`` with all that is wrong with them; see ``checked``."""
    problems: list[str] = []
    values = checked(kind, content, where, problems)
    if problems:
        raise InputError(problems)
    return values


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings that a YAML file gives, as they stand there.

    Raises:
        InputError: The file cannot be read, or holds none.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"config {str(path)!r} does not exist: give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"config {str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise InputError(f"config {str(path)!r} holds no settings: give lines such as 'max_steps: 200'")
    return content


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def checked(kind: type, content: dict, where: str, problems: list[str]) -> Any:
    """An instance of a dataclass from plain values; where ``problems`` are added to, of the others, or None.

    Args:
        kind: The dataclass.
        content: Its fields' values.
        where: Put before the names of fields.
        problems: Gets a line for each unknown key, missing or wrong value.
    """
    content = kind.renamed(content) if hasattr(kind, "renamed") else content
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            problems.append(f"unknown key {where}{key}{nearest_name(str(key), known)}")
            continue
        found = len(problems)
        converted = _convert(hints[key], value, f"{where}{key}", problems)
        if len(problems) == found or _has_settings(converted):
            values[key] = converted
    for name, f in known.items():
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            if name not in content:
                problems.append(f"{where}{name} is missing")
            values[name] = ""  # so that the other values can still be checked
    try:
        return kind(**values)
    except InputError as error:
        problems += error.problems
        return None


def _has_settings(value: Any) -> bool:
    """Whether a value is settings that can be checked further, though a part of them was wrong and is left out."""
    parts = value if isinstance(value, tuple) else (value,)
    return len(parts) > 0 and all(dataclasses.is_dataclass(part) for part in parts)


def _convert(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """``value`` as the annotated type, or a problem."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where, problems)
    if origin is Literal:
        if value not in arguments:
            allowed = ", ".join(map(str, arguments))
            problems.append(
                f"{where} is {value!r}: it must be one of {allowed}{nearest_name(str(value), map(str, arguments))}"
            )
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            problems.append(f"{where} is {value!r}: it must hold settings of its own")
            return None
        return checked(typing.cast(type, hint), value, f"{where}.", problems)
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            problems.append(f"{where} is {value!r}: it must hold names and values")
            return None
        return dict(value)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            problems.append(f"{where} is {value!r}: it must be a list")
            return None
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            problems.append(f"{where} is {value!r}: it must have {len(kinds)} entries")
            return None
        return tuple(
            _convert(k, v, f"{where}[{i}]", problems) for i, (k, v) in enumerate(zip(kinds, value, strict=True))
        )
    if hint is float and isinstance(value, str):  # YAML reads 5e-4 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        problems.append(f"{where} is {value!r}: it must be {_ARTICLES.get(hint, hint.__name__)}")
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    name: str
    """As written, without the dashes."""
    path: tuple[str, ...]
    """The fields that lead to the value."""
    hint: Any
    default: Any
    help: str | None
    """None: a former name, which is accepted and not shown."""


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
        flag = flags.get(name)
        if flag is None:
            shown = [known.name for known in flags.values() if known.help is not None]
            problems.append(f"unknown flag --{name}{nearest_name(name, shown)}")
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif flag.hint is bool:
            _put(content, flag.path, value.lower() != "false" if equals else True)
        elif (origin := typing.get_origin(flag.hint)) in (dict, tuple):
            words = [value] if equals else []
            while rest and not rest[0].startswith("--"):
                words.append(rest.pop(0))
            if origin is tuple:
                _put(content, flag.path, [_read(typing.get_args(flag.hint)[0], word) for word in words])
                continue
            pairs = [word.partition("=") for word in words]
            problems += [f"--{flag.name} {''.join(p)}: write NAME=VALUE" for p in pairs if not p[0] or not p[1]]
            if not words:
                problems.append(f"--{flag.name} needs a value")
            _put(content, flag.path, {key: _read(Any, text) for key, _, text in pairs})
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
        if flag.help is None:
            continue
        default = "" if flag.default in (None, (), "", dataclasses.MISSING) else f" [{flag.default}]"
        value = "" if flag.hint is bool else f" {_kind(flag.hint)}"
        lines.append(f"  --{flag.name}{value}{default}")
        lines += textwrap.wrap(flag.help, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _flags(kind: type, flatten: Sequence[str], path: tuple[str, ...] = (), prefix: str = "") -> list[_Flag]:
    hints, docs = typing.get_type_hints(kind), _field_docs(kind)
    former = getattr(kind, "FORMER_NAMES", {}).items()
    flags = [_Flag(f"{prefix}{name}".replace("_", "-"), (*path, name), hint, None, None) for name, hint in former]
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
