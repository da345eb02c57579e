"""Cells: how they are kept, known again and shown; and the cells that are shipped."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import unteach
from unteach.config import ForgetConfig, Method, Precision, Stop
from unteach.errors import InputError
from unteach.experiments import side_by_side
from unteach.experiments.cells import KEY_DEFAULTS, Cell, CellFolder, differing, mean_and_std, result_table, thinned
from unteach.experiments.paper import experiment, experiment_names, losses
from unteach.experiments.paper.recovery import RecoverySettings, RelearningSettings
from unteach.experiments.paper.theorem import TheoremSettings
from unteach.experiments.reproduce import ReproduceOptions, run, write_readme
from unteach.experiments.sources import build
from unteach.method.losses import LOSSES

RESULTS = Path(__file__).parents[2] / "results"
NOT_MEASURED = ("deep-", "relearn-")
"""Beginnings of names of cells that are not shipped yet."""


# ---- keys --------------------------------------------------------------------------------------------


def test_shipped_cells_have_the_keys_of_their_settings():
    files = sorted(RESULTS.rglob("*-seed-*.json"))
    assert len(files) >= 153
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        cell = Cell(name=content["name"], seed=content["seed"], settings=content["settings"], run=dict)
        assert content["key"] == cell.key, file
        assert CellFolder(file.parent, print).path(cell) == file


@pytest.fixture(scope="module")
def micro_setup(tmp_path_factory):
    return build(ReproduceOptions(device="cpu"), tmp_path_factory.mktemp("texts"), print)


@pytest.mark.parametrize("name", experiment_names())
def test_shipped_cells_are_those_that_the_commands_measure(name, micro_setup):
    """Whatever is added to the settings: nothing has to be measured again unless something else is measured."""
    folder = CellFolder(RESULTS / "micro", print)
    cells = experiment(name).cells(micro_setup, [0, 1, 2], folder)
    assert len(cells) >= 3
    assert all(experiment(name).shows(cell.name) for cell in cells)
    later = [cell for cell in cells if cell.name.startswith(NOT_MEASURED)]
    assert {folder.state(cell) for cell in later} <= {"missing"}, "measured: take their names from NOT_MEASURED"
    states = {cell.name: folder.state(cell) for cell in cells if cell not in later and not folder.is_usable(cell)}
    assert states == {}
    if later:
        pytest.skip(f"{len(later)} cells are not shipped yet: unteach reproduce {name} measures them")


def test_shipped_runs_of_300_steps_are_those_of_their_settings(tmp_path):
    settings = RESULTS / "losses-300-steps" / "settings.yaml"
    setup = build(ReproduceOptions(device="cpu", settings=settings), tmp_path, print)
    folder = CellFolder(RESULTS / "losses-300-steps" / "micro", print)
    states = [folder.state(cell) for cell in experiment("losses").cells(setup, [0, 1, 2], folder)]
    assert len(states) - states.count("missing") == len(folder.read_all()) == 8
    assert "other settings" not in states


@pytest.mark.parametrize("readme", sorted(RESULTS.rglob("README.md")), ids=lambda path: path.parent.name)
def test_tables_beside_the_cells_are_made_from_them(readme, tmp_path):
    folder = tmp_path / readme.parent.name
    shutil.copytree(readme.parent, folder)
    assert write_readme(CellFolder(folder, print)).read_bytes() == readme.read_bytes()


def test_a_new_setting_changes_no_key_and_a_new_default_does():
    longer = dataclasses.make_dataclass("Method", [("dummy", int, 3)], bases=(Method,), frozen=True, kw_only=True)
    assert differing(longer(alpha=0.5)) == differing(Method(alpha=0.5)) == {"alpha": 0.5}
    assert differing(longer(dummy=4)) == {"dummy": 4}
    other = dataclasses.make_dataclass("Method", [("momentum", float, 0.5)], bases=(Method,), frozen=True, kw_only=True)
    assert differing(other()) == {"momentum": 0.5}
    phases = (Method(optimizer="adamw", token_share=0.25, loops_every=4, steps=3),)
    config = ForgetConfig(model="m", method=Method(lr=0.1), phases=phases, stop=Stop(metric="verbmem_f <= 3"))
    assert differing(config) == {
        "model": "m",
        "method": {"lr": 0.1},
        "phases": [{"optimizer": "adamw", "steps": 3}],
        "stop": {"metric": "verbmem_f <= 3"},
    }
    keys = {Cell(name="a", seed=s, settings=x, run=dict).key for s in (0, 1) for x in ({}, {"batch": 2}, {"batch": 3})}
    assert len(keys) == 6


def test_options_of_a_loss_are_in_the_key_only_where_they_differ():
    assert differing(
        Method(
            optimizer="mean_teacher",
            token_share=0.25,
            loops_every=4,
            loss="npo",
            loss_options={"ratio": "sum", "beta": 0.1},
        )
    ) == {"loss": "npo"}
    assert differing(
        Method(optimizer="mean_teacher", token_share=0.25, loops_every=4, loss="npo", loss_options={"ratio": "mean"})
    ) == {"loss": "npo", "loss_options": {"ratio": "mean"}}


@pytest.mark.parametrize(
    "kind", [ForgetConfig, Method, Precision, Stop, RecoverySettings, RelearningSettings, TheoremSettings]
)
def test_every_setting_has_a_frozen_default(kind):
    names = {field.name for field in dataclasses.fields(kind)} - {"model"}
    missing = names - set(KEY_DEFAULTS[kind.__name__])
    assert not missing, f"add {missing} to KEY_DEFAULTS with the default of today, which must then stay there"


def test_every_option_of_a_loss_has_a_frozen_default():
    for name, loss in LOSSES.items():
        assert set(loss.hyper) <= set(KEY_DEFAULTS.get(f"loss {name}", {})), f"add the options of {name}"


# ---- a folder of cells -------------------------------------------------------------------------------


def counted(folder: Path, settings: dict, done: list, **others) -> tuple[CellFolder, Cell]:
    def work() -> dict:
        done.append(settings)
        return {"metrics": {"verbmem_f": {"value": float("nan"), "low": None, "high": None}}}

    return CellFolder(folder, lambda line: None, **others), Cell(name="a", seed=1, settings=settings, run=work)


def test_an_interrupted_run_keeps_what_is_finished(tmp_path):
    done: list = []
    folder, finished = counted(tmp_path, {"x": 1}, done)

    def stop() -> dict:
        raise KeyboardInterrupt

    broken = Cell(name="b", seed=1, settings={}, run=stop)
    with pytest.raises(KeyboardInterrupt):
        folder.complete([finished, broken])
    assert [folder.state(cell) for cell in (finished, broken)] == ["done", "missing"]
    repaired = Cell(name="b", seed=1, settings={}, run=lambda: {"metrics": {}})
    contents = folder.complete([finished, repaired])
    assert [content["name"] for content in contents] == ["a", "b"]
    assert len(done) == 1
    assert contents[0]["metrics"]["verbmem_f"]["value"] is None  # JSON has no NaN


def test_a_cell_of_an_older_version_is_noticed_and_measured_again_on_request(tmp_path):
    done: list = []
    folder, cell = counted(tmp_path, {"x": 1}, done)
    folder.get(cell)
    content = json.loads(folder.path(cell).read_text())
    assert content["versions"]["unteach"] == unteach.__version__
    assert content["commit"] is None or len(content["commit"].removesuffix("-dirty")) == 12
    content["versions"]["unteach"] = "0.0.1"
    folder.path(cell).write_text(json.dumps(content))
    assert folder.state(cell) == "older version"
    assert "older version" in folder.states([cell])
    folder.complete([cell])
    assert len(done) == 1
    fresh, cell = counted(tmp_path, {"x": 1}, done, fresh=True)
    fresh.complete([cell])
    assert len(done) == 2
    assert fresh.state(cell) == "done"


def test_a_cell_with_other_settings_is_measured_again(tmp_path):
    done: list = []
    for settings in ({"x": 1}, {"x": 1}, {"x": 2}, {"x": 2}):
        folder, cell = counted(tmp_path, settings, done)
        assert folder.complete([cell])[0]["settings"] == settings
    assert done == [{"x": 1}, {"x": 2}]


def test_a_damaged_file_counts_as_missing(tmp_path):
    done: list = []
    folder, cell = counted(tmp_path, {"x": 1}, done)
    folder.get(cell)
    folder.path(cell).write_text('{"key":')
    assert folder.state(cell) == "missing"
    folder.get(cell)
    assert len(done) == 2


def test_thinning_keeps_both_ends():
    rows = [
        {"step": n, "phase": 0, "nll_forget": 1 / 3, "forget_loss": float("inf"), "grad_norm": n, "divergence": 0.0}
        for n in range(1, 202)
    ]
    curve = thinned(rows, 5)
    assert curve["step"] == [1, 51, 101, 151, 201]
    assert curve["nll_forget"] == [0.3333] * 5
    assert curve["forget_loss"] == [None] * 5
    assert thinned(rows[:1], 5)["step"] == [1]


def test_tables_show_mean_and_sample_deviation():
    assert mean_and_std([1.0, 2.0, 3.0]) == "2.0 (1.0)"
    assert mean_and_std([1.25, None], 2) == "1.25"
    assert mean_and_std([None]) == "–"
    seeds = [{"verbmem_f": {"value": 10.0}}, {"verbmem_f": {"value": 14.0}}]
    table = result_table({"a": seeds, "b": [{}]}, ("verbmem_f", "knowmem_f"), {"steps": ["3", "4"]})
    assert table.splitlines()[2] == "| a   |  12.0 (2.8) |     3 |"
    assert table.splitlines()[3] == "| b   |           – |     4 |"
    assert "knowmem_f" not in table
    small = result_table({"a": [{"tofu_model_utility": {"value": 0.2163}}]}, ("tofu_model_utility",))
    assert "0.216" in small


def test_the_table_of_losses_begins_where_the_mean_teacher_does():
    curve = {"step": [1, 2, 3, 4], "nll_forget": [0.1, 0.2, 0.3, 0.4], "grad_norm": [5.0, 6.0, 7.0, 8.0]}
    plain, escaped = (
        {"name": name, "seed": 0, "metrics": {}, "curve": curve | {"phase": phases}}
        for name, phases in (("plain", [0, 0, 0, 0]), ("escaped", [0, 0, 1, 1]))
    )
    rows = losses.table([plain, escaped]).splitlines()[2:]
    found = [[text.strip() for text in row.strip("|").split("|")] for row in rows]
    assert found[0] == ["plain", "0.100", "0.400", "5.000", "8.000"]
    assert found[1] == ["escaped", "0.300", "0.400", "7.000", "8.000"]


def test_a_worker_that_reads_other_inputs_refuses(tmp_path, monkeypatch):
    done: list = []
    folder, cell = counted(tmp_path, {"x": 1}, done)
    monkeypatch.setattr(side_by_side, "_worker", {"folder": folder, "cells": {("a", 1): cell}})
    with pytest.raises(InputError, match="changed after the start, or can be read once only"):
        side_by_side._measure("a", 1, "the key of the command")
    assert not done
    side_by_side._measure("a", 1, cell.key)
    assert done


def test_tables_need_no_models_and_no_data(tmp_path, capsys):
    shutil.copytree(RESULTS / "smollm2" / "tofu", tmp_path / "tofu")
    (tmp_path / "tofu" / "README.md").unlink()
    result = run(ReproduceOptions(name="methods", benchmark="tofu", out=tmp_path, tables=True))
    assert {(cell["name"], cell["state"]) for cell in result["cells"]} >= {("target", "done"), ("adamw-npo-kl", "done")}
    assert Path(result["table"]).read_bytes() == (RESULTS / "smollm2" / "tofu" / "README.md").read_bytes()
    assert "| retrained " in capsys.readouterr().out
