"""What the documents say is there: links, commands, flags, files, Python, numbers. And they stay short."""

import ast
import functools
import importlib
import itertools
import json
import re
import shlex
import statistics
from pathlib import Path

import unteach
from unteach import cli, settings
from unteach.errors import InputError
from unteach.evaluation.formulas import Metric
from unteach.evaluation.metrics import RAW_AUC
from unteach.evaluation.verdict import RAREST, judge

ROOT = Path(__file__).parent.parent
WRITTEN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
GENERATED = sorted(file for top in ("results", "benchmarks", "src", "recipes") for file in ROOT.glob(f"{top}/**/*.md"))
PLACES = ("src/unteach", "tests", "tests/**")
"""From where the tables of changes and of methods name files."""
MOST_WORDS = 14_000
MOST_WORDS_OF_A_DECISION = 120
LONGEST_LINE = 120
COLUMNS = {
    "recites": "verbmem_f",
    "answers": "knowmem_f",
    "PrivLeak": "privleak",
    "rarest words, AUC": "auc_forget_holdout_min_5",
    "kept reports, NLL": "nll_retain",
    "kept answers": "knowmem_r",
    "general NLL": "nll_general",
    "loops": "degenerate",
}
"""What the columns of README's table of results are called in the cells."""


@functools.cache
def read(file):
    return Path(file).read_text(encoding="utf-8")


def blocks(text):
    """The blocks of code: (language, lines)."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


def prose(text):
    """Everything but the blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text):
    """What stands in backticks in the prose."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def code_lines(text):
    """Lines of code, in blocks of either kind, continued ones joined."""
    fenced = [line for _, block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    return fenced + re.findall(r"^ {4}(\S.*)$", prose(text), re.MULTILINE)


def wrong_in_each(files, find):
    """What ``find`` finds wrong in the text of each file, by the file's name."""
    found = {str(file.relative_to(ROOT)): find(file) for file in files}
    return {name: wrong for name, wrong in found.items() if wrong}


def anchors(file):
    """The anchors that GitHub makes of a file's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(read(file)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(file):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(read(file))):
        path, _, anchor = target.partition("#")
        there = file.parent / path if path else file
        if not re.match(r"https?:", target) and (not there.exists() or (anchor and anchor not in anchors(there))):
            broken.append(target)
    return broken


def commands(text):
    """Every ``unteach ...`` shown: as a line of code (also behind a prompt or torchrun) and in the prose."""
    lines = [match[1] for line in code_lines(text) if (match := re.match(r"(?:\s*\$?\s*|.*-m )unteach (.*)", line))]
    return lines + [span.removeprefix("unteach ") for span in spans(text) if span.startswith("unteach ")]


def problems_of(command):
    """What the command line itself finds wrong with a command; a mention may leave out what must be given."""
    name, *arguments = shlex.split(command, comments=True)
    if name not in cli.COMMANDS:
        return [f"unknown command {name}"]
    command = cli.COMMANDS[name]
    arguments = [word for word in arguments if word not in ("--help", "$resume")]
    try:
        _, arguments = cli.take_flags(arguments, command.other_flags)
        settings.parse(command.kind(), arguments, flatten=("method",))
    except InputError as error:
        return [problem for problem in error.problems if not problem.endswith(" is missing")]
    return []


def test_links_lead_somewhere():
    assert wrong_in_each([*WRITTEN, *GENERATED], broken_links) == {}


def test_documents_are_short():
    assert sum(len(read(file).split()) for file in ROOT.glob("docs/*.md")) <= MOST_WORDS
    lines = {(file.name, len(line), line) for file in WRITTEN for line in read(file).splitlines()}
    assert {line for line in lines if line[1] > LONGEST_LINE} == set()


def test_decisions_are_dated_and_short():
    entries = re.split(r"^#+ ", read(ROOT / "docs/decisions.md"), flags=re.MULTILINE)[2:]
    entries = [entry for entry in entries if entry.partition("\n")[2].strip()]
    assert [entry.splitlines()[0] for entry in entries if not re.match(r"\d{4}-\d\d-\d\d: ", entry)] == []
    words = {e.splitlines()[0]: len(re.sub(r"^\|.*$", "", e.partition("\n")[2], flags=re.M).split()) for e in entries}
    assert {title: count for title, count in words.items() if count > MOST_WORDS_OF_A_DECISION} == {}


def test_every_table_follows_a_sentence():
    """A table straight below a heading or a picture says nothing of what to see in it."""

    def alone(file):
        lines = [line for line in read(file).splitlines() if line.strip()]
        return [table for before, table in itertools.pairwise(lines) if table.startswith("|") and before[0] in "#!"]

    assert wrong_in_each(WRITTEN, alone) == {}


def test_commands_exist_and_their_flags_parse():
    shown = {command for file in WRITTEN for command in commands(read(file))}
    assert len(shown) > 30
    assert {command: wrong for command in shown if (wrong := problems_of(command))} == {}


def test_a_wrong_command_would_be_found():
    text = "`unteach forgets`\n```\n$ unteach forget m --documents d --alfa 3  # no\nunteach demo --al\n```"
    found = [problem.split(" (")[0] for command in commands(text) for problem in problems_of(command)]
    assert found == ["unknown flag --alfa", "unknown flag --al", "unknown command forgets"]


def test_flags_in_the_prose_belong_to_a_command(capsys):
    for name in cli.COMMANDS:
        cli.main([name, "--help"])
    known = {"--help", *re.findall(r"--[a-z][a-z.-]*", capsys.readouterr().out)}

    def unknown(file):
        shown = [span for span in spans(read(file)) if span.startswith("--")]
        return {flag for span in shown for flag in re.findall(r"(?<!\S)--[a-z][a-z.-]*", span)} - known

    assert wrong_in_each(WRITTEN, unknown) == {}


def test_make_targets_exist():
    lines = [line for file in WRITTEN for line in (*code_lines(read(file)), *spans(read(file)))]
    shown = {match[1] for line in lines if (match := re.match(r"make ([a-z-]+)", line))}
    assert shown <= set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))


def test_files_named_exist():
    """A path from the top of the repository, in backticks, or a file run by a line of code."""
    path = r"(?:src|tests|docs|results|benchmarks|configs|recipes)/[\w./*-]*"

    def missing(file):
        shown = {span for span in spans(read(file)) if re.fullmatch(path, span)}
        shown |= {found for line in code_lines(read(file)) for found in re.findall(rf"(?<!\S){path}", line)}
        return {name for name in shown if not any(ROOT.glob(name.rstrip("/")))}

    assert wrong_in_each(WRITTEN, missing) == {}


def test_methods_and_contributing_name_what_is_there():
    """Files within the package and the tests, functions of the method, and tests, by their names in backticks."""
    method = "\n".join(read(file) for file in ROOT.glob("src/unteach/method/*.py"))
    tests = "\n".join(read(file) for file in ROOT.glob("tests/**/*.py"))

    def missing(file):
        shown = set(spans(read(file)))
        files = {span for span in shown if re.fullmatch(r"[\w/]+\.py", span)}
        there = {name for name in files if (ROOT / name).exists()}
        there |= {name for name in files if any(any(ROOT.glob(f"{place}/{name}")) for place in PLACES)}
        functions = {span for span in shown if re.fullmatch(r"\w+_rows|token_log_odds|MeanTeacher", span)}
        there |= {name for name in functions if re.search(rf"(def|class) {name}\b", method)}
        named = {span for span in shown if re.fullmatch(r"test_\w+\*?", span)}
        there |= {name for name in named if re.search(rf"def {name.rstrip('*')}", tests)}
        return (files | functions | named) - there

    assert wrong_in_each([ROOT / "docs/methods.md", ROOT / "CONTRIBUTING.md"], missing) == {}


def test_python_compiles_and_its_names_are_there():
    for block in [block for file in WRITTEN for language, block in blocks(read(file)) if language == "python"]:
        indent = re.match(r" *", block)[0]
        for node in ast.walk(ast.parse(re.sub(rf"^{indent}", "", block, flags=re.MULTILINE))):
            if isinstance(node, ast.Import):
                assert all(importlib.import_module(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert all(hasattr(importlib.import_module(node.module), alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "unteach":
                assert hasattr(unteach, node.attr)


def test_the_results_table_shows_the_cells():
    """Every number of README's table is the mean of the cells that its row names, and its mark is the verdict's."""
    lines = [line for line in read(ROOT / "README.md").splitlines() if line.startswith("|")]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    start = next(number for number, row in enumerate(rows) if row[-1] == "cells")
    header = rows[start][1:-1]
    rows = [row for row in rows[start + 2 :] if len(row) == len(header) + 2]
    assert set(header) == set(COLUMNS)
    assert len(rows) >= 4
    means = {row[-1]: means_of(row[-1].strip("`")) for row in rows}
    before, reference = means["`target-seed-*`"], means["`retrained-seed-*`"]
    for name, *shown, named in rows:
        recited, known, detectable, rest = judge(means[named], before, reference)
        kept = {part.metric: part.mark for part in rest.parts}
        told = {part.metric: part.mark for part in detectable.parts}
        rarest = next(mark for metric, mark in told.items() if metric in RAREST)
        marks = {"verbmem_f": recited.mark, "knowmem_f": known.mark, "privleak": told[RAW_AUC]}
        marks |= {COLUMNS["rarest words, AUC"]: rarest} | kept
        for title, cell in zip(header, shown, strict=True):
            *mark, number = cell.split()
            digits = len(number.partition(".")[2])
            assert number.replace("−", "-") == f"{means[named][COLUMNS[title]].value:.{digits}f}", (name, title)
            assert mark == ([] if rows.index([name, *shown, named]) < 2 else [marks[COLUMNS[title]]]), (name, title)


def means_of(pattern):
    """Every metric of the cells of that name, its mean and interval over the seeds."""
    cells = [json.loads(read(file))["metrics"] for file in ROOT.glob(f"results/micro/{pattern}.json")]
    bounds = ("value", "low", "high")
    means = {name: [statistics.mean(cell[name][part] or 0.0 for cell in cells) for part in bounds] for name in cells[0]}
    return {name: Metric(*values, 0, None, "") for name, values in means.items()}
