"""A resumed run is the run that began: what was changed meanwhile is named and refused, or accepted and recorded."""

import errno
import json
import os
import re
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small_run import make_inputs, names_in, paused_run, result_of, run

from unteach.cli import main
from unteach.errors import InputError
from unteach.job.ending import saying_how_to_go_on
from unteach.job.inputs import read_inputs
from unteach.job.lock import holding
from unteach.job.same_run import StartRecord, accepted_changes, saved_config
from unteach.writing import sealed


@pytest.fixture(scope="module")
def paused(tmp_path_factory):
    """Inputs, with a run that is paused after two steps, and one that was not."""
    folder = make_inputs(tmp_path_factory.mktemp("same"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        paused_run(folder, folder / "paused", monkeypatch)
    run(folder, folder / "whole")
    return folder


@pytest.fixture
def mine(paused, tmp_path):
    """A copy of all that, to be changed."""
    shutil.copytree(paused, tmp_path / "copy")
    for out in ("paused", "whole"):
        config = tmp_path / "copy" / out / "config.yaml"
        config.write_text(config.read_text().replace(str(paused), str(tmp_path / "copy")))
        start = StartRecord.read(tmp_path / "copy" / out)
        moved = json.loads(json.dumps(start.config).replace(str(paused), str(tmp_path / "copy")))
        StartRecord(moved, start.inputs).write(tmp_path / "copy" / out)
    return tmp_path / "copy"


def added(file, text):
    file.write_text(file.read_text() + text)


def other_weights(folder):
    weights = load_file(folder / "model/model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3
    save_file(weights, folder / "model/model.safetensors", {"format": "pt"})


def edited(**changes):
    """Other values in config.yaml; ``method__lr`` is one of the method."""

    def change(folder):
        file = folder / "paused/config.yaml"
        content = yaml.safe_load(file.read_text())
        for name, value in changes.items():
            outer, _, inner = name.partition("__")
            content[outer] = content[outer] | {inner: value} if inner else value
        file.write_text(yaml.safe_dump(content))

    return change


INPUTS = {
    "a document changed": (lambda f: (f / "documents/1.txt").write_text("Another text."), "the texts of documents"),
    "a document more": (lambda f: (f / "documents/9.txt").write_text("Another text."), "the texts of documents"),
    "a document less": (lambda f: (f / "documents/1.txt").unlink(), "the texts of documents"),
    "another order": (lambda f: (f / "documents/0.txt").rename(f / "documents/8.txt"), "the texts of documents"),
    "general text": (lambda f: added(f / "general.jsonl", '{"text": "More."}\n'), "the texts of general"),
    "weights": (other_weights, "the weights of model"),
    "tokenizer": (
        lambda f: added(f / "model/tokenizer_config.json", " "),
        "the configuration or tokenizer of model",
    ),
}  # fmt: skip
SETTINGS = {
    "lr": (edited(method__lr=0.1), "method.lr was 0.02 and is 0.1"),
    "loss": (edited(method__loss="ll"), "method.loss was 'nlul' and is 'll'"),
    "seed": (edited(seed=1), "seed was 0 and is 1"),
    "batch": (edited(batch=3), "batch was 4 and is 3"),
    "max_tokens": (edited(max_tokens=16), "max_tokens was None and is 16"),
    "fewer steps": (edited(max_steps=2), "max_steps was 3 and is 2"),
    "the rule": (edited(stop={"metric": "verbmem_f <= 50"}), "stop.metric was 'verbmem_f <= -1' and is"),
    "a model": (edited(model="micro:small"), "model was"),
    "keep": (edited(keep="micro:retain"), "keep was None and is 'micro:retain'"),
    "a damaged record": (
        lambda f: (f / "paused/start.json").write_text((f / "paused/start.json").read_text().replace("nlul", "nlum")),
        "start.json is damaged: its checksum does not match",
    ),
    "a record of nothing": (
        lambda f: (f / "paused/start.json").write_text(sealed({"format": "unteach.start/1", "config": 3})),
        "start.json is damaged: it has no config and no inputs and no changes",
    ),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_other_settings_are_refused_by_name(mine, change):
    alter, expected = SETTINGS[change]
    alter(mine)
    with pytest.raises(InputError) as refused:
        saved_config(mine / "paused")
    assert len(refused.value.problems) == 1
    assert expected in refused.value.problems[0]
    assert "--accept-changes" in refused.value.problems[0]
    saved_config(mine / "paused", accept=True)


@pytest.mark.parametrize("flag", ["--config", "--preset"])
def test_settings_from_elsewhere_are_refused(mine, flag, capsys):
    assert main(["forget", "--resume", str(mine / "paused"), flag, str(mine / "paused/config.yaml")]) == 2
    assert f"unteach: {flag}: a resumed run keeps its settings" in capsys.readouterr().err


@pytest.mark.parametrize("change", INPUTS)
def test_other_texts_and_models_are_refused_by_name(mine, change):
    alter, expected = INPUTS[change]
    alter(mine)
    before = names_in(mine / "paused")
    config = saved_config(mine / "paused")
    with pytest.raises(InputError) as refused:
        accepted_changes(mine / "paused", config, read_inputs(config), accept=False, say=print)
    assert len(refused.value.problems) == 1
    assert f"{expected} are not those that the run began with" in refused.value.problems[0]
    assert names_in(mine / "paused") == before


def test_unchanged_it_goes_on_to_the_same_bytes_wherever_it_lies(mine, paused):
    (mine / "paused").rename(mine / "moved")
    run(mine, mine / "moved", resume=True)
    assert result_of(mine / "moved") == result_of(paused / "whole")
    assert "changed on the way" not in (mine / "moved/model/README.md").read_text()


def test_accepted_changes_stand_in_the_record_the_log_and_the_card(mine):
    INPUTS["a document changed"][0](mine)
    SETTINGS["seed"][0](mine)
    run(mine, mine / "paused", resume=True, accept_changes=True)
    change = StartRecord.read(mine / "paused").changes[0]
    assert change["what"] == [
        "seed was 0 and is 1",
        "the texts of documents are not those that the run began with",
    ]
    assert "changed on the way: seed was 0 and is 1" in (mine / "paused/model/README.md").read_text()
    assert "warning: accepted: seed was 0 and is 1" in (mine / "paused/run.log").read_text()
    scores = [json.loads((mine / f"paused/evaluations/step_{step:06d}.json").read_text()) for step in (0, 3)]
    assert scores[0]["benchmark"] == scores[1]["benchmark"], "before and after are of the same texts"


def test_a_finished_run_says_so_and_does_nothing(mine, capsys):
    before = {name: (mine / "whole" / name).stat().st_mtime_ns for name in names_in(mine / "whole")}
    assert main(["forget", "--resume", str(mine / "whole")]) == 3
    assert "has ended already: max_steps 3 reached" in capsys.readouterr().out
    with pytest.raises(InputError, match="it has ended already"):
        run(mine, mine / "whole", resume=True)
    assert before == {name: (mine / "whole" / name).stat().st_mtime_ns for name in names_in(mine / "whole")}


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def emptied(file):
    file.write_bytes(b"")


BEFORE, FIRST, SUMS = "checkpoints/before.json", "evaluations/step_000000.json", "checkpoints/sums.json"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (BEFORE, flipped),
        (FIRST, emptied),
        (SUMS, flipped),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((BEFORE, emptied), (FIRST, flipped))),
    ],
)
def test_damaged_scores_are_measured_again(mine, paused, name, damage):
    damage(mine / "paused" / name)
    said = []
    run(mine, mine / "paused", resume=True, said=said)
    assert result_of(mine / "paused") == result_of(paused / "whole")
    named = BEFORE if name == SUMS else name
    assert any(f"{named} is damaged" in line and "is measured again" in line for line in said)
    scores = [json.loads((out / "paused/checkpoints/before.json").read_text()) for out in (mine, paused)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("content", [None, "", "\0", "max_steps: [", "- 1"])
def test_a_lost_config_is_taken_from_the_record(mine, paused, content):
    file = mine / "paused/config.yaml"
    file.unlink() if content is None else file.write_text(content)
    config = saved_config(mine / "paused")
    assert config == saved_config(mine / "paused")
    shutil.copyfile(paused / "paused/config.yaml", file)
    assert config.method == saved_config(mine / "paused", accept=True).method


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: ["\xff\0", *lines[1:]],
        *(pytest.param(c, marks=pytest.mark.slow) for c in (lambda x: x[1:], lambda x: [])),
    ],
)
def test_a_damaged_log_is_named_and_the_weights_do_not_depend_on_it(mine, paused, change):
    file, said = mine / "paused/metrics.jsonl", []
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n", encoding="latin-1")
    run(mine, mine / "paused", resume=True, said=said)
    assert result_of(mine / "paused")[0] == result_of(paused / "whole")[0]
    assert any("metrics.jsonl is damaged" in line for line in said)


def test_without_its_log_it_goes_on_from_its_checkpoint(mine, paused):
    (mine / "paused/metrics.jsonl").unlink()
    said = []
    run(mine, mine / "paused", resume=True, said=said)
    assert result_of(mine / "paused")[0] == result_of(paused / "whole")[0]
    assert any("metrics.jsonl is damaged" in line for line in said)
    assert "goes on from step 2" in said


def test_a_checkpoint_of_another_run_is_not_used(paused, tmp_path, monkeypatch):
    """Of the same model and steps: its weights fit, and are others."""
    out, other = tmp_path / "run", tmp_path / "other"
    for folder, seed in ((out, 0), (other, 1)):
        paused_run(paused, folder, monkeypatch, seed=seed)
    shutil.rmtree(out / "checkpoints/step_000002")
    shutil.copytree(other / "checkpoints/step_000002", out / "checkpoints/step_000002")
    said = []
    run(paused, out, resume=True, said=said)
    assert any("step_000002 is damaged: it is a checkpoint of another run" in line for line in said)
    assert result_of(out) == result_of(paused / "whole")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, "make room"), (errno.EDQUOT, "make room"), (errno.EROFS, "let it be"), (errno.EISDIR, "let it be")],
)
def test_a_folder_that_cannot_be_written_is_a_line(paused, number, expected):
    words = f"{os.strerror(number)} (the file): {expected}"
    with pytest.raises(InputError, match=re.escape(words)), saying_how_to_go_on(paused / "paused"):
        raise OSError(number, os.strerror(number), "the file")


def test_a_damaged_checkpoint_costs_a_step_and_no_bit(mine, paused):
    said = []
    flipped(mine / "paused/checkpoints/step_000002/rank_0.safetensors")
    run(mine, mine / "paused", resume=True, said=said)
    assert result_of(mine / "paused") == result_of(paused / "whole")
    assert any("step_000002 is damaged" in line for line in said)
    assert "goes on from step 1" in said


def test_no_sound_checkpoint_is_status_2(mine, capsys):
    for file in (mine / "paused/checkpoints").glob("step_*/rank_0.safetensors"):
        flipped(file)
    assert main(["forget", "--resume", str(mine / "paused")]) == 2
    assert "no checkpoint is sound" in capsys.readouterr().err.splitlines()[-1]


def test_of_two_in_one_folder_the_second_is_refused(mine, tmp_path):
    with holding(mine / "paused"), pytest.raises(InputError, match="another process works on this run"):
        run(mine, mine / "paused", resume=True)
    (tmp_path / "new").mkdir()
    with holding(tmp_path / "new"), pytest.raises(InputError, match="another process works on this run"):
        run(mine, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    assert torch.is_grad_enabled()
