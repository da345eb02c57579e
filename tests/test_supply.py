"""What is installed: every module with the least that the package requires, and the oldest versions that it allows."""

import contextlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

import unteach

TOP = Path(__file__).parents[1]
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"scikit-learn": "sklearn", "rouge-score": "rouge_score", "pyyaml": "yaml", "pytest-cov": "pytest_cov"}
ELSEWHERE = {
    "bitsandbytes",
    "pandas",
    "pyarrow",
    "nltk",
    "absl",
    "tensorboard",
    "tensorboardX",
    "wandb",
    "trackio",
    "lm_eval",
    "triton",
    "sentencepiece",
}
"""What neither the package nor its requirements bring, and what the extras bring along."""
BLOCKED_IMPORTS = """
import importlib, sys
from importlib.machinery import PathFinder
blocked, modules = sys.argv[1].split(","), sys.argv[2].split(",")

class Fewer(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)

sys.meta_path[:] = [Fewer if finder is PathFinder else finder for finder in sys.meta_path]
for module in modules:
    importlib.import_module(module)
print(len(modules))
"""


def names(requirements):
    return {re.split(r"[ <>=!~(\[;]", requirement)[0].strip() for requirement in requirements}


def required():
    """What the package requires, and what that requires in turn."""
    found, open_ends = set(), names(PROJECT["dependencies"])
    while open_ends:
        name = open_ends.pop()
        found.add(name.lower())
        with contextlib.suppress(PackageNotFoundError):
            needs = [need for need in requires(name) or () if "extra ==" not in need]
            open_ends |= {need for need in names(needs) if need.lower() not in found}
    return found


def optional():
    """What the extras name, as it is imported; not what the package itself requires."""
    extras = names(requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra)
    return {IMPORTED_AS.get(name, name) for name in extras | ELSEWHERE if name.lower() not in required() | {"unteach"}}


def modules():
    package = Path(unteach.__file__).parent
    files = (file.relative_to(package.parent).with_suffix("") for file in package.rglob("*.py"))
    return sorted({".".join(file.parts).removesuffix(".__init__") for file in files})


@pytest.mark.slow
def test_every_module_imports_with_what_the_package_requires():
    assert len(modules()) > 100
    assert {
        "datasets",
        "pypdf",
        "gguf",
        "accelerate",
        "peft",
        "sklearn",
        "scipy",
        "rouge_score",
        "pytest",
    } <= optional()
    words = [sys.executable, "-c", BLOCKED_IMPORTS, ",".join(sorted(optional())), ",".join(modules())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(modules())


def pip(*words):
    """Status of pip, and what it says; it asks once."""
    common = ["--disable-pip-version-check", "--retries", "0", "--timeout", "30"]
    done = subprocess.run([sys.executable, "-m", "pip", *words, *common], capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_oldest_versions_that_are_allowed_resolve(tmp_path):
    """pip finds versions that go together where all that the package requires is as old as it may be.

    PyTorch, and Accelerate that requires it, are gigabytes: for them it is asked whether the version is there.
    """
    extras = (
        name for extra in ("benchmarks", "documents", "recipes") for name in PROJECT["optional-dependencies"][extra]
    )
    everything = [*PROJECT["dependencies"], *extras]
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", requirement) for requirement in everything)
    status, said = pip("index", "versions", "torch")
    if status:
        pytest.skip(f"no package registry can be reached from here: {said.splitlines()[-1]}")
    large = {"torch", "accelerate"}
    for requirement in everything:
        name, _, oldest = requirement.partition(">=")
        if name in large:
            assert re.search(rf"\b{re.escape(oldest)}(\.0)?,", pip("index", "versions", name)[1]), requirement
    rest = [requirement for requirement in everything if requirement.partition(">=")[0] not in large]
    (tmp_path / "oldest.txt").write_text("\n".join(requirement.replace(">=", "==") for requirement in rest))
    words = ("install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary", ":all:")
    status, said = pip(*words, "--no-binary", "rouge-score", "--constraint", str(tmp_path / "oldest.txt"), *rest)
    assert status == 0, said
