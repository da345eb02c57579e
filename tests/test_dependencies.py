"""What is installed is what is imported: requirements of the package, its extras, and imports in the code."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn", "rouge-score": "rouge_score"}
"""Modules that are called otherwise than their packages."""
INDIRECT = {
    "huggingface_hub": "transformers",
    "tokenizers": "transformers",
    "pyarrow": "datasets",
    "markupsafe": "jinja2",
}
"""What another requirement brings."""
OPTIONAL = {"fcntl", "lm_eval", "tensorboard", "triton", "wandb", "mlflow", "trackio"}
"""Looked for, and never needed."""


def modules(requirements):
    names = [re.split(r"[<>=\[]", requirement)[0].strip() for requirement in requirements]
    return {MODULES.get(name.lower(), name.lower()) for name in names}


def imported(folder):
    """Modules from outside that the files of a folder import, at any depth of their code."""
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
    return {INDIRECT.get(name, name) for name in found - set(sys.stdlib_module_names) - {"unteach", "recipes"}}


def test_requirements_are_what_is_imported():
    required, extras = modules(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    assert required <= imported("src"), "required and not imported"
    used = imported("src") - OPTIONAL
    assert used == required | modules(extras["benchmarks"])


def test_constraints_name_every_requirement():
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    extras = PROJECT["optional-dependencies"].values()
    for requirement in [*PROJECT["dependencies"], *(name for extra in extras for name in extra)]:
        name = re.split(r"[<>=\[]", requirement)[0].lower()
        assert name in pinned | {"unteach"}, f"{name} is not in constraints.txt"
