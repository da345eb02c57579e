"""Cells: how they are kept, known again and shown; which cells the experiments have, and which are shipped."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

import unteach
from unteach.config import LOOPS_EVERY, ForgetConfig, Method, Precision, Stop
from unteach.corpora import micro
from unteach.data import read_documents
from unteach.errors import InputError
from unteach.experiments.cells import CURVE, KEY_DEFAULTS, Cell, CellFolder, differing, thinned
from unteach.experiments.paper import afterwards, deep, experiments, mean_and_std, result_table
from unteach.experiments.paper.theorem import TheoremSettings
from unteach.experiments.reproduce import ReproduceOptions, run, write_readme
from unteach.experiments.sources import build
from unteach.method.losses import LOSSES
from unteach.training.stopping import MORE_DEGENERATE

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return build(ReproduceOptions(device="cpu"), tmp_path_factory.mktemp("texts"), print)


def test_shipped_cells_have_the_keys_of_their_settings():
    files = sorted(RESULTS.rglob("*-seed-*.json"))
    assert len(files) >= 153
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        cell = Cell(name=content["name"], seed=content["seed"], settings=content["settings"], run=dict)
        assert content["key"] == cell.key, file
        assert CellFolder(file.parent, print).path(cell) == file


@pytest.mark.parametrize("name", experiments())
def test_shipped_cells_are_those_that_the_commands_measure(name, setup):
    folder, experiment = CellFolder(RESULTS / "micro", print), experiments()[name]
    cells = experiment.cells(setup, [0, 1, 2], folder)
    assert len(cells) >= 3
    assert all(experiment.shows(cell.name) for cell in cells)
    assert {cell.name: folder.state(cell) for cell in cells if not folder.is_usable(cell)} == {}


def test_shipped_runs_of_300_steps_are_those_of_their_settings(tmp_path):
    settings = RESULTS / "losses-300-steps" / "settings.yaml"
    setup = build(ReproduceOptions(device="cpu", settings=settings), tmp_path, print)
    folder = CellFolder(RESULTS / "losses-300-steps" / "micro", print)
    states = [folder.state(cell) for cell in experiments()["losses"].cells(setup, [0, 1, 2], folder)]
    assert len(states) - states.count("missing") == len(folder.read_all()) == 8
    assert "other settings" not in states


@pytest.mark.parametrize("readme", sorted(RESULTS.rglob("README.md")), ids=lambda path: path.parent.name)
def test_tables_beside_the_cells_are_made_from_them(readme, tmp_path):
    folder = tmp_path / readme.parent.name
    shutil.copytree(readme.parent, folder)
    assert write_readme(CellFolder(folder, print)).read_bytes() == readme.read_bytes()


def test_seeds_with_different_settings_are_named_but_for_what_each_seed_draws(tmp_path):
    for seed in (0, 1):
        shutil.copy(RESULTS / "micro" / f"relearn-deep-seed-{seed}.json", tmp_path)
    remark = "The seeds of relearn-deep have different settings."
    readme = write_readme(CellFolder(tmp_path, print)).read_text()
    assert "with each seed another\ntenth" in readme
    assert remark not in readme, "each learns another tenth"
    content = json.loads((tmp_path / "relearn-deep-seed-1.json").read_text())
    content["settings"]["relearning"] = {"lr": 1e-3}
    (tmp_path / "relearn-deep-seed-1.json").write_text(json.dumps(content))
    assert remark in write_readme(CellFolder(tmp_path, print)).read_text()


def test_a_new_setting_changes_no_key_and_a_new_default_does():
    longer = dataclasses.make_dataclass("Method", [("dummy", int, 3)], bases=(Method,), frozen=True, kw_only=True)
    assert differing(longer(alpha=0.5)) == differing(Method(alpha=0.5)) == {"alpha": 0.5}
    assert differing(longer(dummy=4)) == {"dummy": 4}
    other = dataclasses.make_dataclass("Method", [("momentum", float, 0.5)], bases=(Method,), frozen=True, kw_only=True)
    assert differing(other()) == {"momentum": 0.5}
    phases = (Method(optimizer="adamw", token_share=0.25, loops_every=4, steps=3),)
    config = ForgetConfig(model="m", method=Method(lr=0.1), phases=phases, stop=Stop(metric="verbmem_f <= 3"))
    expected = {"phases": [{"optimizer": "adamw", "steps": 3}], "stop": {"metric": "verbmem_f <= 3"}}
    assert differing(config) == {"model": "m", "method": {"lr": 0.1}} | expected
    keys = {Cell(name="a", seed=s, settings=x, run=dict).key for s in (0, 1) for x in ({}, {"batch": 2}, {"batch": 3})}
    assert len(keys) == 6


def test_loops_unlearned_once_they_are_found_have_the_key_of_never():
    """As in the cells of ``deep`` that are shipped: no two looks in a row found them, or the method was not to look."""
    deep = {"model": "m", "keep": "k", "base": "b"}
    method = ForgetConfig(**deep).chosen().method
    assert (method.loops_every, method.loops_once_found) == (LOOPS_EVERY, True)
    keys = [differing(ForgetConfig(**deep, method=Method(loops_every=n)).chosen()) for n in (None, 0, 6)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0]["method"]["loops_every"] is None
    for file in RESULTS.glob("micro/deep*-seed-*.json"):
        content = json.loads(file.read_text())
        method = content.get("method", {})
        if method.get("loss") == "match" and method.get("loops_once_found", True):  # no such field: older than it
            looks = [row["degenerate"] - content["stop_scores"][0]["degenerate"] for row in content["stop_scores"]]
            assert not any(min(pair) > MORE_DEGENERATE for pair in itertools.pairwise(looks)), file.name


def test_options_of_a_loss_are_in_the_key_only_where_they_differ(monkeypatch):
    npo = Method(optimizer="mean_teacher", token_share=0.25, loops_every=4, loss="npo")
    usual, other = ({"ratio": "sum", "beta": 0.1}, {"ratio": "mean"})
    assert differing(dataclasses.replace(npo, loss_options=usual)) == {"loss": "npo"}
    assert differing(dataclasses.replace(npo, loss_options=other)) == {"loss": "npo", "loss_options": other}
    monkeypatch.delitem(KEY_DEFAULTS, "loss npo")  # as a loss that was added: its options are named, all of them
    for options in (usual, other):
        named = differing(dataclasses.replace(npo, loss_options=options))
        assert named == {"loss": "npo", "loss_options": {"beta": 0.1, "ratio": options["ratio"]}}


def test_every_setting_has_a_frozen_default():
    known = {f"loss {name}": set(loss.hyper) for name, loss in LOSSES.items() if f"loss {name}" in KEY_DEFAULTS}
    own = (afterwards.RecoverySettings, afterwards.RelearningSettings, TheoremSettings)
    for kind in (ForgetConfig, Method, Precision, Stop, *own):
        known[kind.__name__] = {field.name for field in dataclasses.fields(kind)} - {"model"}
    for name, settings in known.items():
        missing = settings - set(KEY_DEFAULTS.get(name, {}))
        assert not missing, f"add {missing} of {name} to KEY_DEFAULTS with the default of today, which then stays there"


def counted(folder: Path, settings: dict, done: list, **others) -> tuple[CellFolder, Cell]:
    def work() -> dict:
        done.append(settings)
        return {"metrics": {"verbmem_f": {"value": float("nan"), "low": None, "high": None}}}

    return CellFolder(folder, lambda line: None, **others), Cell(name="a", seed=1, settings=settings, run=work)


def test_an_interrupted_run_keeps_what_is_finished(tmp_path):
    done: list = []
    folder, finished = counted(tmp_path, {"x": 1}, done)

    broken = Cell(name="b", seed=1, settings={}, run=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
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
    content = folder.get(cell)
    assert content == json.loads(folder.path(cell).read_text())
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


def test_a_cell_with_other_settings_or_a_damaged_file_is_measured_again(tmp_path):
    done: list = []
    for settings in ({"x": 1}, {"x": 1}, {"x": 2}, {"x": 2}):
        folder, cell = counted(tmp_path, settings, done)
        assert folder.complete([cell])[0]["settings"] == settings
    assert done == [{"x": 1}, {"x": 2}]
    folder.path(cell).write_text('{"key":')
    assert folder.state(cell) == "missing"
    folder.get(cell)
    assert len(done) == 3


def split(row: str) -> list[str]:
    return [text.strip() for text in row.strip("|").split("|")]


def test_thinning_keeps_both_ends():
    rows = [dict.fromkeys(CURVE, 1 / 3) | {"phase": 0, "step": step} for step in range(1, 202)]
    curve = thinned(rows, 5)
    assert curve["step"] == [1, 51, 101, 151, 201]
    assert curve["nll_forget"] == [0.3333] * 5
    assert thinned(rows[:1], 5)["step"] == [1]
    assert "alpha" not in curve
    assert thinned([row | {"alpha": row["step"] / 2} for row in rows], 2)["alpha"] == [0.5, 100.5], "one that moves"


def test_tables_show_mean_and_sample_deviation():
    assert mean_and_std([1.0, 2.0, 3.0]) == "2.0 (1.0)"
    assert mean_and_std([1.25, None], 2) == "1.25"
    assert mean_and_std([None]) == "–"
    seeds = [{"name": "a", "metrics": {"verbmem_f": {"value": value}}} for value in (10.0, 14.0)]
    columns, length = ("verbmem_f", "knowmem_f"), {"seeds": lambda group: str(len(group))}
    table = result_table([*seeds, {"name": "b", "metrics": {}}], columns, length)
    assert table.splitlines()[2] == "| a   |  12.0 (2.8) |     2 |"
    assert table.splitlines()[3] == "| b   |           – |     1 |"
    assert "knowmem_f" not in table
    small = [{"name": "a", "metrics": {"tofu_model_utility": {"value": 0.2163}}}]
    assert "0.216" in result_table(small, ("tofu_model_utility",))


def test_the_table_of_losses_begins_where_the_mean_teacher_does():
    curve = {"step": [1, 2, 3, 4], "nll_forget": [0.1, 0.2, 0.3, 0.4], "grad_norm": [5.0, 6.0, 7.0, 8.0]}
    phases = {"plain": [0, 0, 0, 0], "escaped": [0, 0, 1, 1]}
    contents = [{"name": name, "metrics": {}, "curve": curve | {"phase": phase}} for name, phase in phases.items()]
    found = [split(row) for row in experiments()["losses"].table(contents).splitlines()[2:]]
    assert found[0] == ["plain", "0.100", "0.400", "5.000", "8.000"]
    assert found[1] == ["escaped", "0.300", "0.400", "7.000", "8.000"]


def test_the_table_of_relearning_has_a_row_for_each_model():
    contents = [
        {"name": f"relearn-{name}", "seed": seed, "metrics": {}}
        | {"relearning": {"step": [0, 5], "others": others, "learned": [0.0, 90.0]}}
        for name, others in (("deep", [3.0, 5.0]), ("retrained", [2.0, 2.0]))
        for seed in (0, 1)
    ]
    rows = experiments()["recovery"].table(contents).splitlines()[-2:]
    assert split(rows[0]) == ["deep", "3.0 (0.0)", "5.0 (0.0)", "90.0 (0.0)"]
    assert split(rows[1])[0] == "retrained"
    drawn = experiments()["recovery"].figures("micro", contents)
    assert [figure.name for figure in drawn] == ["relearn-knowmem_f-micro"]


def test_figures_of_deep_forgetting_are_drawn_over_privleak():
    auc = "auc_forget_holdout_min_40"
    scores = [
        {"step": 0, auc: 0.0, "knowmem_r": 92.0, "knowmem_f": 90.0},
        {"step": 20, auc: 0.25},
        {"step": 40, auc: 0.5, "knowmem_r": 88.0, "knowmem_f": 3.0},
    ]
    content = {"name": "deep-matched", "seed": 0, "metrics": {}, "stop_scores": scores, "stop_reference": {auc: 0.5}}
    assert deep._points(content, "knowmem_r") == [(-100.0, 92.0), (0.0, 88.0)]
    drawn = deep.figures("micro", [content, {"name": "deep-target", "seed": 0, "metrics": {}}])
    assert [figure.name for figure in drawn] == ["deep-knowmem_r-micro", "deep-knowmem_f-micro"]
    assert b"PrivLeak" in drawn[0].files[".svg"]


def test_tables_need_no_models_and_no_data(tmp_path, capsys):
    shutil.copytree(RESULTS / "smollm2" / "tofu", tmp_path / "tofu")
    (tmp_path / "tofu" / "README.md").unlink()
    result = run(ReproduceOptions(name="methods", benchmark="tofu", out=tmp_path, tables=True))
    assert {(cell["name"], cell["state"]) for cell in result["cells"]} >= {("target", "done"), ("adamw-npo-kl", "done")}
    assert Path(result["table"]).read_bytes() == (RESULTS / "smollm2" / "tofu" / "README.md").read_bytes()
    assert "| retrained " in capsys.readouterr().out


def test_every_row_changes_one_thing(setup):
    whole = deep.configured(setup, "deep-matched", 0).chosen()
    method = whole.method
    assert (method.optimizer, method.loss, method.loss_options) == ("adamw", "match", {"pull": "gate"})
    assert (whole.keep, whole.base, whole.holdout) == ("micro:retain", "micro:base", "micro:holdout")
    assert method.goal == "base"
    own = deep.configured(setup, "deep", 0).chosen()
    assert (own.method.goal, own.stop.metric, own.reference) == ("never_seen", None, None)
    to_base = deep.configured(setup, "deep-to-base", 0).chosen()
    assert to_base == dataclasses.replace(own, method=method), "and of deep it is the goal alone, and what follows"
    mixed = deep.configured(setup, "deep-general-mixed", 0).chosen()
    assert mixed == dataclasses.replace(to_base, general="micro:general_mixed")
    plain = dataclasses.asdict(whole)
    for name, changed in {
        "deep-softplus": {"loss_options"}, "deep-without-keep": {"keep"}, "deep-half-kept": {"keep"},
        "deep-other-people": {"keep"},
        "deep-small-base": {"base"}, "deep-mean-teacher": {"optimizer"},
        "deep-mean-teacher-anchor": {"optimizer", "anchor"},
    }.items():  # fmt: skip
        other = dataclasses.asdict(deep.configured(setup, name, 0).chosen())
        inside = {field for field, value in other["method"].items() if value != plain["method"][field]}
        outside = {field for field, value in other.items() if value != plain[field]} - {"method"}
        assert inside | outside == changed, name
    without = deep.configured(setup, "deep-without-base", 0).chosen()
    assert (without.base, without.keep, without.method.loss) == (None, "micro:retain", "nlul")
    assert without.stop == whole.stop


def test_a_settings_file_has_rows_of_its_own(setup):
    rows = {
        "deep-anchor": {"method": {"anchor": 1.0}, "max_steps": 300},
        "deep-fp32": {"precision": {"forget": "fp32", "divergence": "fp32"}},
    }
    given = {"deep": {"method": {"optimizer": "adamw", "loss": "match", "alpha": 1.0}, "rows": rows}}
    by_hand = dataclasses.replace(setup, settings=given)
    plain, anchor, exact = (deep.configured(by_hand, name, 0) for name in ("deep", *rows))
    assert (plain.method.alpha, plain.method.anchor, plain.max_steps) == (1.0, 0.0, 200)
    changed = dataclasses.replace(plain.method, anchor=1.0)
    assert anchor == dataclasses.replace(plain, method=changed, max_steps=300)
    assert exact == dataclasses.replace(plain, precision=Precision(forget="fp32", divergence="fp32"))
    given["deep"]["rows_until_parity"] = True
    matched, anchor = (deep.configured(by_hand, name, 0) for name in ("deep-matched", "deep-anchor"))
    assert anchor == dataclasses.replace(matched, method=changed, max_steps=300)


def test_both_optimizers_have_as_many_settings_at_parity_and_no_other_cell_changes(setup, tmp_path):
    by_hand = build(ReproduceOptions(device="cpu", settings=RESULTS / "micro" / "parity.yaml"), tmp_path, print)
    folder = CellFolder(RESULTS / "micro", print)
    known, found = (deep.cells(given, [0], folder) for given in (setup, by_hand))
    assert [cell.key for cell in found[: len(known)]] == [cell.key for cell in known]
    matched, names = deep.configured(by_hand, "deep-matched", 0), [cell.name for cell in found[len(known) :]]
    configs = [deep.configured(by_hand, name, 0) for name in names]
    assert all(dataclasses.replace(config, method=matched.method) == matched for config in configs)
    optimizers = [config.method.optimizer for config in configs]
    assert sorted(optimizers) == ["adamw"] * 4 + ["mean_teacher"] * 4
    for config in configs:
        chosen, usual = config.chosen().method, matched.chosen().method
        assert (chosen.loss, chosen.loss_options, chosen.token_share) == (usual.loss, usual.loss_options, 1.0)
        assert (chosen.anchor == 1.0) == (chosen.optimizer == "mean_teacher") == (chosen.warmup != usual.warmup)
        assert chosen.optimizer == "adamw" or chosen.lr * chosen.teacher_rate == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "row", "wrong"),
    [
        ("anchor", {}, "begins with deep-"),
        ("deep-matched", {}, "there already"),
        ("deep-x", {"seed": 1}, "but for the seed"),
        ("deep-x", {"ancor": 1}, "deep.rows.deep-x.ancor"),
        ("deep-x", {"method": 3}, "deep.rows.deep-x.method"),
        ("deep-x", {"method": {"ancor": 1}}, "deep.rows.deep-x.method.ancor"),
        ("deep-x", 3, "the fields that it changes"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused(name, row, wrong, setup):
    with pytest.raises(InputError, match=wrong):
        deep.configured(dataclasses.replace(setup, settings={"deep": {"rows": {name: row}}}), "deep", 0)


def test_cells_are_known_by_their_texts_and_models(setup, tmp_path):
    cells = deep.cells(setup, [0, 1], CellFolder(tmp_path, print))
    assert len({cell.key for cell in cells}) == len(cells) == 2 * 16 + 2
    settings = {cell.name: cell.settings for cell in cells}
    assert "keep" not in settings["deep"]  # the text's hash stands for its name
    assert settings["deep"]["inputs"]["keep"] != settings["deep-half-kept"]["inputs"]["keep"]
    assert settings["deep"]["inputs"]["base"] != settings["deep-small-base"]["inputs"]["base"]
    assert settings["deep-half-kept"]["asked"] == ["knowmem_pretraining", "knowmem_r_kept", "knowmem_r_others"]
    split = [f"knowmem_pretraining{part}" for part in ("", "_kept", "_others")]
    assert (settings["deep"]["asked"], settings["deep-general-mixed"]["asked"]) == (["knowmem_pretraining"], split)
    assert settings["deep-other-people"]["asked"] == split
    assert not any(experiments()["methods"].shows(name) for name in settings)
    with pytest.raises(InputError, match="base is missing: .* give --base"):
        deep.cells(dataclasses.replace(setup, base=None), [0], CellFolder(tmp_path, print))


def test_half_of_the_people_are_kept_and_all_are_asked_about(setup):
    kept, others = (deep._groups(setup, half=True)[f"knowmem_r_{part}"] for part in ("kept", "others"))
    assert len(kept) == len(others) == 60
    assert {*kept, *others} == {*micro.questions("retain")}
    texts = " ".join(read_documents(setup.keep_half).texts)
    for place, story in enumerate(micro.stories("retain")):
        assert (story.person in texts) == any(story.person in q.question for q in kept) == (place % 2 == 0)


def test_other_people_are_neither_forgotten_nor_neighbours(setup):
    texts = read_documents(setup.keep_others).texts
    joined = "\n".join(texts)
    assert len(texts) == 2400
    assert not any(story.person in joined for part in ("forget", "retain") for story in micro.stories(part))
    assert not {*texts} & {*micro.documents("holdout")}
    asked = deep._groups(setup, mixed=True)
    for part, told in (("kept", True), ("others", False)):
        names = {re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", q.question)[0] for q in asked[f"knowmem_pretraining_{part}"]}
        assert {name in joined for name in names} == {told}, part
