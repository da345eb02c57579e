"""Every example runs and does what it says."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_named_and_tested():
    shown = set(re.findall(r"^\| \[`([\w.]+)`\]\(\1\)", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert shown == {file.name for file in FOLDER.iterdir() if file.suffix in (".py", ".ipynb")}
    tested = Path(__file__).read_text()
    assert [name for name in shown if Path(name).stem not in tested] == []


LOOPS = ("with_trainer", "with_accelerate", "with_peft")


def run_loop(name, steps):
    if name == "with_peft":
        pytest.importorskip("peft", reason="peft is not installed")
    (forget, general), (forget_after, general_after), *models = example(name).main(steps=steps)
    assert forget < 0.3
    assert general_after < general + 0.1
    assert not any("lora" in weight for model in models for weight, _ in model.named_parameters()), "merged"
    return forget_after - forget


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_two_steps_move_away_from_the_documents(name):
    assert run_loop(name, steps=2) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_loops_unlearn_and_keep_the_rest(name):
    assert run_loop(name, steps=30) > 2


@pytest.mark.slow
def test_compare_models():
    compared = example("compare_models").main(items=2)
    before, goal = compared["verbmem_f"]
    assert before.value > 90 > goal.value
    assert all(value.low <= value.value <= value.high for value in compared["verbmem_f"])


@pytest.mark.slow
def test_the_notebook_runs(capsys):
    """Its cells of code, one after the other, in one namespace; the last line of a cell may be an expression."""
    content = json.loads((FOLDER / "demo.ipynb").read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(content["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    before, _, *_, after, stands_there, recital, _ = said
    report = stands_there.removeprefix("report: ").strip()  # a line ends with a space where the model's text does
    assert before.removeprefix("model:  ").strip() == report
    assert after.removeprefix("model:  ").strip() != report
    assert names["result"].forgotten
    first, last = map(float, recital.removeprefix("verbmem_f: ").split(" -> "))
    assert first > 90
    assert last < 30
