"""Dataclasses of settings from YAML and from flags: every field is a key and a flag, its docstring the help.

Every problem is named, with the nearest known name. A dataclass may say more: ``ALIASES`` has hidden names of its
fields, ``ASKED_FOR`` the fields that files and flags must give though they have a default, ``GROUPS`` the headings of
its help, with the fields and other flags below each.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal

import yaml

from unteach.errors import InputError, shown

__all__ = [
    "checked", "completion_script", "flag_values", "from_values", "from_yaml", "help_text", "nearest_name", "parse",
    "read_settings", "to_yaml",
]  # fmt: skip

_ARTICLES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
_LARGEST_FILE, _LARGEST_NUMBER = 2**20, 2**53
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_PLACEHOLDERS = {str: "TEXT", Path: "PATH", int: "N", float: "NUMBER"}


def nearest_name(given: str, known: Any) -> str:
    """`` (did you mean X?)`` for the known name nearest to a given one, or nothing."""
    nearest = difflib.get_close_matches(given[:100], list(known), n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def to_yaml(config: Any) -> str:
    """A config dataclass as YAML text that ``from_yaml`` reads back."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_ExactDumper, sort_keys=False, allow_unicode=True)


class _ExactDumper(yaml.SafeDumper):
    """Writes text so that it reads back: PyYAML itself makes spaces of the rarer ends of lines."""


def _written(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    rare = any(character in text for character in "\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if rare else None)


_ExactDumper.add_representer(str, _written)


def from_yaml(kind: type, path: str | Path, **overrides: Any) -> Any:
    """A config dataclass from a YAML file, or an ``InputError`` with all that is wrong with it."""
    content = read_settings(path) | overrides
    try:
        return from_values(kind, content)
    except InputError as error:
        raise InputError([f"{path}: {problem}" for problem in error.problems]) from None


def from_values(kind: type, content: dict[str, Any], where: str = "", problems: Sequence[str] = ()) -> Any:
    """A config dataclass from plain values, or an ``InputError`` with all that is wrong with them; see ``checked``."""
    found = list(problems)
    values = checked(kind, content, where, found)
    if found:
        raise InputError(found)
    return values


def read_settings(path: str | Path, option: str = "config") -> dict[str, Any]:
    """The settings that a YAML file gives, as they stand there; an ``InputError`` where it has none to be read."""
    try:
        file = Path(path).expanduser()
        with file.open("rb") as stream:
            read = stream.read(_LARGEST_FILE + 1)  # a device or a pipe may have no end
        if len(read) > _LARGEST_FILE:
            raise ValueError(f"it has more than {_LARGEST_FILE:,} bytes, which no settings have")
        content = plain_yaml(read.decode())
    except FileNotFoundError:
        raise InputError(f"{option} {str(path)!r} does not exist: give a YAML file") from None
    except RecursionError:
        raise InputError(f"{option} {str(path)!r} cannot be read: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError, OSError, RuntimeError) as error:  # the last: no such home
        raise InputError(f"{option} {str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise InputError(f"{option} {str(path)!r} holds no settings: give lines such as 'max_steps: 200'")
    return content


class _PlainLoader(yaml.SafeLoader):
    """YAML in which every key stands once and nothing refers to something else."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse ``*name``: a few lines of them can stand for more than a computer holds."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, f"*{event.anchor} refers to another value: write the value itself", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that stands twice: of two values one would be lost."""
        seen = set()
        for key, _ in node.value:
            name = getattr(key, "value", None)
            if key.tag == "tag:yaml.org,2002:merge":
                wrong = "<< brings values of another map: write them themselves"
                raise yaml.constructor.ConstructorError(None, None, wrong, key.start_mark)
            if isinstance(name, str) and name in seen:
                wrong = f"{name!r} stands there twice: keep one of them"
                raise yaml.constructor.ConstructorError(None, None, wrong, key.start_mark)
            seen.add(name if isinstance(name, str) else id(key))
        return super().construct_mapping(node, deep)


def plain_yaml(text: str) -> Any:
    """What a YAML text says; keys that stand twice and references are refused."""
    return yaml.load(text, _PlainLoader)


def checked(kind: type, content: dict, where: str, problems: list[str]) -> Any:
    """An instance of a dataclass from plain values.

    Adds a line to ``problems`` for each unknown key, missing or wrong value, with ``where`` before the names of fields;
    the instance is then made of the others, or ``MISSING``.
    """
    aliases = getattr(kind, "ALIASES", {})
    content = {aliases.get(key, key): value for key, value in content.items()}
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            name = shown(key, bare=True)
            problems.append(f"unknown key {where}{name}{nearest_name(name, known)}")
        elif (converted := _convert(hints[key], value, f"{where}{key}", problems)) is not MISSING:
            values[key] = converted
    asked_for = getattr(kind, "ASKED_FOR", ())
    for name, f in known.items():
        needed = (f.default is MISSING and f.default_factory is MISSING) or name in asked_for
        if name not in values and needed:
            if name not in content:
                problems.append(f"{where}{name} is missing")
            values[name] = ""  # so that the other values can still be checked
    try:
        return kind(**values)
    except InputError as error:
        problems += error.problems
        return MISSING


def _without_none(hint: Any) -> Any:
    """The type that a hint allows besides None."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    return next(kind for kind in typing.get_args(hint) if kind is not type(None))


def _convert(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """``value`` as the annotated type; a problem and ``MISSING`` where it is none."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    hint = _without_none(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)

    def refuse(must: str) -> Any:
        problems.append(f"{where} is {shown(value)}: it must {must}")
        return MISSING

    if origin is Literal:
        names = [str(argument) for argument in arguments]
        allowed = f"{', '.join(names)}{nearest_name(shown(value, bare=True), names)}"
        return value if value in arguments else refuse(f"be one of {allowed}")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            return refuse("hold settings of its own")
        return checked(typing.cast(type, hint), value, f"{where}.", problems)
    if origin is dict:
        named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
        return dict(value) if named else refuse("hold names and values")
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return refuse("be a list")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            return refuse(f"have {len(kinds)} entries")
        pairs = zip(kinds, value, strict=True)
        parts = [_convert(kind, part, f"{where}[{n}]", problems) for n, (kind, part) in enumerate(pairs)]
        return MISSING if MISSING in parts else tuple(parts)
    if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
        return refuse(f"be at most {_LARGEST_NUMBER}")
    if hint in (float, Path) and isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            converted = hint(value)  # YAML reads 5e-4 as a string
            return converted.expanduser() if isinstance(converted, Path) else converted
        except RuntimeError:
            return refuse("be in a home that is there")
        except (TypeError, ValueError):
            pass
    if hint in (str, Path) and isinstance(value, (str, Path)) and "\0" in str(value):
        return refuse("hold no NUL")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        return refuse(f"be {_ARTICLES.get(hint, hint.__name__)}")
    return value


class _Flag(typing.NamedTuple):
    path: tuple[str, ...]
    """The fields that lead to the value."""
    hint: Any
    default: Any
    help: str


def parse(kind: type, arguments: Sequence[str], *, flatten: Sequence[str] = (), start: dict | None = None) -> Any:
    """Read a dataclass from arguments such as ``MODEL --max-steps 20 --stop.metric "verbmem_f <= 20"``.

    A field ``max_steps`` is ``--max-steps``, one of a nested dataclass ``--stop.metric``, without the prefix where
    ``flatten`` names it; the first field takes arguments without a flag. The flags override ``start``, values that are
    nested as in YAML. An ``InputError`` names all that is wrong, unknown flags with the nearest name.
    """
    flags = _flags(kind, flatten)
    aliases = getattr(kind, "ALIASES", {})
    content = dict(start or {})
    problems: list[str] = []
    loose, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            loose.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = aliases.get(name, name.replace("_", "-"))
        flag = flags.get(name)
        origin = typing.get_origin(flag.hint) if flag else None
        most = 0 if flag and flag.hint is bool else 1 if flag and origin not in (dict, tuple) else len(rest) + 1
        words = [value] if equals else []
        while rest and len(words) < most and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        if flag is None:
            problems.append(f"unknown flag --{shown(name, bare=True)}{nearest_name(name, flags)}")
        elif flag.hint is bool and equals and value.lower() not in (*_TRUE, *_FALSE):
            problems.append(f"--{name} is {shown(value)}: it must be true or false")
        elif flag.hint is bool:
            _put(content, flag.path, not equals or value.lower() in _TRUE)
        elif origin is tuple:
            _put(content, flag.path, [_read(typing.get_args(flag.hint)[0], word) for word in words])
        elif not words or (words == [""] and _without_none(flag.hint) not in (str, Path)):
            problems.append(f"--{name} needs a value")
        elif origin is dict:
            pairs = [word.partition("=") for word in words]
            problems += [
                f"--{name} {shown(''.join(p), bare=True)}: write NAME=VALUE" for p in pairs if not p[0] or not p[1]
            ]
            _put(content, flag.path, {key: _read(Any, text) for key, _, text in pairs})
        else:
            _put(content, flag.path, _read(flag.hint, words[0]))
    first = dataclasses.fields(kind)[0].name
    if typing.get_origin(typing.get_type_hints(kind)[first]) is tuple:
        content |= {first: loose} if loose else {}
    elif loose:
        content[first] = loose[0]
        if len(loose) > 1:
            problems.append(f"{', '.join(map(shown, loose[1:3]))}: only one {first} can be given; flags begin with --")
    return from_values(kind, content, problems=problems)


def help_text(kind: type, flatten: Sequence[str] = (), others: Mapping[str, tuple[str, str]] | None = None) -> str:
    """The flags of a dataclass with their help below the headings of its ``GROUPS``, and others that are no settings:
    what these take, and what they do."""
    groups = getattr(kind, "GROUPS", {})
    heading_of = {field: heading for heading, fields in groups.items() for field in fields}
    rest = "everything else" if groups else "flags"
    shown: dict[str, list[str]] = {heading: [] for heading in (*groups, rest)}

    def add(heading: str, name: str, value: str, says: str) -> None:
        shown[heading].append(f"  {name} {value.strip()}".rstrip())
        shown[heading] += textwrap.wrap(says, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)

    for name, flag in _flags(kind, flatten).items():
        default = "" if flag.default in (None, (), "", False, MISSING) else f" [{flag.default}]"
        value = "" if flag.hint is bool else _placeholder(flag.hint)
        add(heading_of.get(flag.path[0], rest), f"--{name}", value + default, flag.help)
    for name, (value, says) in (others or {}).items():
        add(heading_of.get(name, rest), name, value, says)
    return "\n\n".join("\n".join([f"{heading}:", *lines]) for heading, lines in shown.items() if lines)


def flag_values(
    kind: type, flatten: Sequence[str] = (), others: Mapping[str, tuple[str, str]] | None = None
) -> dict[str, tuple[str, ...] | None]:
    """For every flag the values that it takes: none where it takes no value, None where anything."""
    found: dict[str, tuple[str, ...] | None] = {
        name: None if takes[0] else () for name, takes in (others or {}).items()
    }
    for name, flag in _flags(kind, flatten).items():
        hint = _without_none(flag.hint)
        choices = tuple(map(str, typing.get_args(hint))) if typing.get_origin(hint) is Literal else None
        found[f"--{name}"] = () if hint is bool else choices
    return found


def completion_script(shell: str, program: str, commands: Mapping[str, Mapping[str, tuple[str, ...] | None]]) -> str:
    """What bash, zsh or fish reads to complete commands, their flags (see ``flag_values``), values and file names."""
    if shell == "fish":
        lines = [f"complete -c {program} -n __fish_use_subcommand -f -a '{' '.join(commands)}'"]
        for command, flags in commands.items():
            for flag, values in flags.items():
                takes = "" if values == () else " -r" if values is None else f" -x -a '{' '.join(values)}'"
                seen = f"-n '__fish_seen_subcommand_from {command}'"
                lines.append(f"complete -c {program} {seen} -l {flag.removeprefix('--')}{takes}")
        return "\n".join(lines)
    cases = []
    for command, flags in commands.items():
        for flag, values in flags.items():
            if values != ():
                cases.append(f'        "{command} {flag}") words="{" ".join(values or ())}";;')
        cases.append(f'        "{command} "*) words="{" ".join(flags)}";;')
    first = f'        *) words="{" ".join(commands)}";;'
    choose = "\n".join(['    case "$command $previous" in', *cases, first, "    esac"])
    if shell == "bash":
        return f"""_{program}() {{
    local words="" command="" current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD - 1]}}"
    (( COMP_CWORD > 1 )) && command="${{COMP_WORDS[1]}}"
{choose}
    [[ "$words" == -* && "$current" != -* ]] && words=""
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _{program} {program}"""
    return f"""#compdef {program}
_{program}() {{
    local words_here="" command="" previous="${{words[CURRENT - 1]}}"
    (( CURRENT > 2 )) && command="${{words[2]}}"
{choose.replace("words=", "words_here=")}
    if [[ -n "$words_here" && ( "$PREFIX" == -* || "$words_here" != -* ) ]]; then
        compadd -- ${{=words_here}}
    else
        _files
    fi
}}
compdef _{program} {program}"""


def _flags(kind: type, flatten: Sequence[str], path: tuple[str, ...] = (), prefix: str = "") -> dict[str, _Flag]:
    hints, docs = typing.get_type_hints(kind), _field_docs(kind)
    flags: dict[str, _Flag] = {}
    for field in dataclasses.fields(kind):
        hint, here = hints[field.name], (*path, field.name)
        if dataclasses.is_dataclass(hint):
            inner = prefix if field.name in flatten else f"{prefix}{field.name}."
            flags |= _flags(typing.cast(type, hint), flatten, here, inner)
        elif not (typing.get_origin(hint) is tuple and dataclasses.is_dataclass(typing.get_args(hint)[0])):
            name = f"{prefix}{field.name}".replace("_", "-")
            flags[name] = _Flag(here, hint, field.default, docs.get(field.name, ""))
    return flags


@functools.cache
def _field_docs(kind: type) -> dict[str, str]:
    """The strings that stand under the fields of a dataclass."""
    definition: Any = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _read(hint: Any, text: str) -> Any:
    """A value as it would stand in YAML; text stays text where text is wanted."""
    hint = _without_none(hint)
    if hint in (str, Path) or typing.get_origin(hint) is Literal:
        return text
    try:
        return None if text.lower() == "none" else plain_yaml(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return text


def _placeholder(hint: Any) -> str:
    hint = _without_none(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        return f"{_placeholder(arguments[0])} ..."
    return "NAME=VALUE ..." if origin is dict else _PLACEHOLDERS.get(hint, "VALUE")


def _put(content: dict, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        content[name] = dict(content.get(name) or {})
        content = content[name]
    content[path[-1]] = value
