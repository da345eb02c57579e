"""Checkpoints that something happened to: a bad one is named and the one before it is used; never other weights."""

import json
import shutil

import pytest
import torch

from unteach.errors import InputError
from unteach.training.checkpoint import FORMAT, STATE, Checkpoints
from unteach.writing import sealed, unsealed

WEIGHTS = "rank_0.safetensors"


def content(step):
    """All that a checkpoint may hold, another at every step."""
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6) + step
    return {
        "position": {"step": step, "pull": 0.1 + 0.2, "limit": float("inf")},
        "weights": {"a": values, "half": values.to(torch.bfloat16), "view": values[:, 1:3], "none": values[:0]},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "m": values.double()}, 7: {"on": torch.tensor([True, False])}},
            "param_groups": [{"betas": (0.9, 0.95), "params": [0, 7], "clip": None}],
        },
        "loops": {"sequences": [torch.tensor([1, 2, 3])], "repeated": [2]},
    }


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and all(map(equal, first, second)) and len(first) == len(second)
    return first == second


@pytest.fixture
def checkpoints(tmp_path):
    """Two checkpoints, of steps 2 and 4."""
    made = Checkpoints(tmp_path / "checkpoints", 2, run="this one")
    for step in (2, 4):
        made.save(step, content(step), protect=())
    return made


def test_what_is_read_is_what_was_written(checkpoints):
    assert equal(checkpoints.load(), content(4))
    assert equal(checkpoints.load(2), content(2))
    assert sorted(file.name for file in checkpoints.path(4).iterdir()) == [WEIGHTS, STATE]


def flip(place):
    """One bit of a file."""

    def change(file):
        data = bytearray(file.read_bytes())
        data[place if place >= 0 else len(data) + place] ^= 1
        file.write_bytes(data)

    return change


def restate(**changes):
    """Other values under a checksum that matches."""

    def change(file):
        file.write_text(sealed(unsealed(file.read_text()) | changes))

    return change


def cut(length):
    return lambda file: file.write_bytes(file.read_bytes()[:length])


DAMAGES = {
    **{f"weights: bit {place}": (WEIGHTS, flip(place)) for place in (0, 7, 8, 100, 700, -300, -24, -1)},
    **{f"state: bit {place}": (STATE, flip(place)) for place in (0, 1, 12, 60, 90, 200, 400, -30, -2)},
    **{f"weights: cut at {n}": (WEIGHTS, cut(n)) for n in (0, 1, 8, 64, 800, -1)},
    **{f"state: cut at {n}": (STATE, cut(n)) for n in (0, 1, 8, 64, 300, -1)},
    "weights: missing": (WEIGHTS, lambda file: file.unlink()),
    "state: missing": (STATE, lambda file: file.unlink()),
    "weights: a folder": (WEIGHTS, lambda file: (file.unlink(), file.mkdir())),
    "state: a folder": (STATE, lambda file: (file.unlink(), file.mkdir())),
    "weights: longer": (WEIGHTS, lambda file: file.write_bytes(file.read_bytes() + b"\0")),
    "weights: of another checkpoint": (
        WEIGHTS,
        lambda file: shutil.copyfile(file.parent.parent / "step_000002" / WEIGHTS, file),
    ),
    "all of another checkpoint": (
        STATE,
        lambda file: shutil.copytree(file.parent.parent / "step_000002", file.parent, dirs_exist_ok=True),
    ),
    "state: a list": (STATE, lambda file: file.write_text("[]")),
    "state: a number": (STATE, lambda file: file.write_text("3")),
    "state: nothing in it": (STATE, lambda file: file.write_text("{}")),
    "state: not UTF-8": (STATE, lambda file: file.write_bytes(b"\xff\xfe\x00")),
    "state: deep": (STATE, lambda file: file.write_text("[" * 100_000)),
    "state: a number of 5,000 digits": (STATE, lambda file: file.write_text('{"sha256": ' + "9" * 5000 + "}")),
    "state: another format": (STATE, restate(format="other")),
    "state: another step": (STATE, restate(step=9)),
    "state: another run": (STATE, restate(run="another")),
    "state: files outside": (STATE, restate(files={"../../x.safetensors": {"bytes": 1, "sha256": ""}})),
    "state: files a list": (STATE, restate(files=[1])),
    "state: files without sums": (STATE, restate(files={WEIGHTS: {}})),
    "state: sums of nothing": (STATE, restate(files={WEIGHTS: None})),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_one_is_named_and_the_one_before_it_is_used(checkpoints, damage):
    name, change = DAMAGES[damage]
    change(checkpoints.path(4) / name)
    said = []
    assert equal(checkpoints.load(say=said.append), content(2))
    assert len(said) == 1
    assert f"{checkpoints.path(4)} is damaged" in said[0]
    assert "\n" not in said[0]
    checkpoints.save(4, content(4), protect=())
    assert equal(checkpoints.load(), content(4)), "made again, it is sound again"


def test_none_left_is_wrong_input_with_what_can_be_done(checkpoints, tmp_path):
    for step in (2, 4):
        flip(-1)(checkpoints.path(step) / WEIGHTS)
    with pytest.raises(InputError, match="no checkpoint is sound .* from a backup, or start anew with another --out"):
        checkpoints.load()
    with pytest.raises(InputError, match="has no checkpoint to resume from: start it anew"):
        Checkpoints(tmp_path / "empty", 2).load()
    (tmp_path / "empty" / "step_000002.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"only step_000002\.pt, which an earlier version wrote"):
        Checkpoints(tmp_path / "empty", 2).load()


def test_the_one_to_go_back_to_must_be_sound_too(tmp_path):
    """A checkpoint whose search may go back to a bad one leads nowhere: an earlier one is used."""
    made = Checkpoints(tmp_path, 2)
    made.save(0, content(0), protect=())
    made.save(3, content(3), protect=(0,))
    made.save(4, content(4), protect=(3,))
    made.save(5, content(5), protect=(3,))
    assert made.steps() == [3, 4, 5]
    flip(-1)(made.path(3) / WEIGHTS)
    with pytest.raises(InputError, match="no checkpoint is sound"):
        made.load()
    with pytest.raises(InputError, match="is damaged.*--resume"):
        made.load(3)
    made.save(3, content(3), protect=())
    assert equal(made.load(), content(3)), "the last one written"


def test_of_two_kept_each_keeps_what_it_may_go_back_to(tmp_path):
    made = Checkpoints(tmp_path, 2)
    for step, protect in ((0, ()), (10, (0,)), (20, (20,)), (30, (20,))):
        made.save(step, content(step), protect=protect)
        if step == 20:
            assert made.steps() == [0, 10, 20]
    assert made.steps() == [20, 30]


def test_nothing_is_pickled(checkpoints):
    for file in checkpoints.folder.rglob("*"):
        if file.is_file():
            start = file.read_bytes()[:2]
            assert start != b"PK"
            assert not start.startswith(b"\x80")
    assert json.loads((checkpoints.path(4) / STATE).read_text())["format"] == FORMAT


def test_a_log_that_no_longer_begins_as_it_did_is_named(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n')
    made = Checkpoints(tmp_path / "checkpoints", 2, logs=[log])
    made.save(1, content(1), protect=())
    log.write_text('{"step": 1}\n{"step": 2}\n')
    said = []
    made.load(say=said.append)
    assert said == []
    log.write_text('{"step": 7}\n{"step": 2}\n')
    made.load(say=said.append)
    assert len(said) == 1
    assert "metrics.jsonl is damaged" in said[0]
