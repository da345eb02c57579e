"""Who may import whom: late imports count, imports for type checking do not. And what is imported is installed."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
ROOT = TOP / "src" / "unteach"
LEAVES = {"errors", "settings", "writing"}
"""What every part may import."""
ALLOWED = {
    "errors": set(),
    "settings": set(),
    "writing": set(),
    "method": set(),
    "config": {"method"},
    "corpora.micro": {"corpora"},
    "data": {"config", "method", "corpora.micro"},
    "models": {"config", "method", "corpora.micro"},
    "corpora": {"config", "data", "corpora.micro"},
    "evaluation": {"config", "method", "data", "models", "corpora", "corpora.micro"},
    "training": {"config", "method", "data", "models", "corpora", "corpora.micro", "evaluation"},
}
ALLOWED["audits"] = ALLOWED["training"] | {"training"}
ALLOWED["report"] = ALLOWED["evaluation"] | {"evaluation"}
ALLOWED["planning"] = ALLOWED["audits"]
ALLOWED["job"] = ALLOWED["audits"] | {"audits", "report", "planning"}
ALLOWED["experiments"] = ALLOWED["job"] | {"job"}
ALLOWED["cli"] = ALLOWED["__main__"] = ALLOWED["__init__"] = ALLOWED["experiments"] | {"experiments", "cli"}


def modules() -> dict[str, Path]:
    """Every module by its name within the package."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = file
    return found


def part_of(module: str) -> str:
    """The part of the house that a module belongs to."""
    return "corpora.micro" if module.startswith("corpora.micro") else module.split(".")[0]


def imports_of(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, at any depth of its code."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [*name.split("."), "x"] if file.name == "__init__.py" else name.split(".")
                base = ".".join(["unteach", *here[: -node.level], *([base] if base else [])])
            if base == "unteach" or base.startswith("unteach."):
                inner = base.removeprefix("unteach").removeprefix(".")
                for alias in node.names:
                    whole = f"{inner}.{alias.name}".strip(".")
                    found.add(whole if whole in known else inner)
        elif isinstance(node, ast.Import):
            found.update(a.name.removeprefix("unteach.") for a in node.names if a.name.startswith("unteach."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(file.read_text(encoding="utf-8")))
    return found - {"", name}


MODULES = modules()
IMPORTS = {name: imports_of(name, file, MODULES) for name, file in MODULES.items()}


@pytest.mark.parametrize("module", list(MODULES))
def test_arrows(module):
    part = part_of(module)
    assert part in ALLOWED, f"{module} lies in a part that has no arrows: add it to ALLOWED and to docs"
    wrong = {
        other
        for other in IMPORTS[module]
        if part_of(other) not in ALLOWED[part] | LEAVES | {part} and other not in ALLOWED[part]
    }
    assert not wrong, f"{module} may not import {', '.join(sorted(wrong))}"


def test_no_cycles():
    state: dict[str, str] = {}

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != "open", f"imports run in a circle: {' → '.join((*path, module))}"
        if module in state:
            return
        state[module] = "open"
        for other in sorted(IMPORTS.get(module, ())):
            walk(other, (*path, module))
        state[module] = "done"

    for module in MODULES:
        walk(module, ())


def test_an_added_arrow_is_noticed(tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(
        "def late():\n    from unteach.training.loop import unlearn\n    return unlearn\n", encoding="utf-8"
    )
    assert imports_of("method.losses", file, MODULES) == {"training.loop"}
    assert "training" not in ALLOWED["method"] | LEAVES


def test_the_size_of_the_house():
    entries = [entry for entry in ROOT.iterdir() if not entry.name.startswith("__") and entry.name != "py.typed"]
    assert len(entries) <= 16, sorted(entry.name for entry in entries)
    for file in MODULES.values():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert lines <= 420, f"{file.relative_to(ROOT)} has {lines} lines: divide it where the concepts divide"


PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CALLED = {"pyyaml": "yaml", "scikit-learn": "sklearn", "rouge-score": "rouge_score"}
"""Modules that are called otherwise than their packages."""
INDIRECT = {
    "huggingface_hub": "transformers",
    "tokenizers": "transformers",
    "pyarrow": "datasets",
    "markupsafe": "jinja2",
}
"""What another requirement brings."""
OPTIONAL = {"bitsandbytes", "fcntl", "lm_eval", "tensorboard", "triton", "wandb", "mlflow", "trackio"}
"""Looked for, and never needed."""


def installed(requirements):
    names = [re.split(r"[<>=\[]", requirement)[0].strip() for requirement in requirements]
    return {CALLED.get(name.lower(), name.lower()) for name in names}


def imported(folder):
    """Modules from outside that the files of a folder import, at any depth of their code."""
    found = set()
    for file in (TOP / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    return {INDIRECT.get(name, name) for name in found - set(sys.stdlib_module_names) - {"unteach", "recipes"}}


def test_requirements_are_what_is_imported():
    required, extras = installed(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    assert imported("src") - OPTIONAL == required | installed(extras["benchmarks"] + extras["documents"])


def test_constraints_name_every_requirement():
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (TOP / "constraints.txt").read_text().split()}
    extras = PROJECT["optional-dependencies"].values()
    for requirement in [*PROJECT["dependencies"], *(name for extra in extras for name in extra)]:
        name = re.split(r"[<>=\[]", requirement)[0].lower()
        assert name in pinned | {"unteach"}, f"{name} is not in constraints.txt"
