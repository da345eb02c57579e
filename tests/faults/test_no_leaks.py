"""A run needs no network, and of its documents nothing stays outside its folder."""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from small_run import make_inputs, run

from unteach.errors import InputError
from unteach.job.run_folder import TRACKERS
from unteach.models.load import find_folder

CANARY = "zebrafish lanterns of Quillmouth"


@pytest.fixture
def no_network(monkeypatch):
    """Every way to another machine is shut; the names that were asked for."""
    asked = []

    def refuse(*arguments, **named):
        asked.append(arguments)
        raise AssertionError(f"a connection was wanted: {arguments}")

    for name in ("connect", "connect_ex", "bind", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
    return asked


@pytest.fixture
def files_written():
    """What Python opens for writing, makes or renames, as paths."""
    found, watching = [], [True]

    def watch(event, arguments):
        if not watching:
            return
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and not isinstance(arguments[0], int):
            found.append(Path(os.fsdecode(arguments[0])).absolute())
        elif event in ("os.mkdir", "os.rename"):
            found.append(Path(os.fsdecode(arguments[event == "os.rename"])).absolute())

    sys.addaudithook(watch)  # for good: afterwards it does nothing
    yield found
    watching.clear()


def test_a_run_opens_no_connection_and_leaves_nothing_elsewhere(tmp_path, monkeypatch, no_network, files_written):
    (tmp_path / "inputs").mkdir()
    folder = make_inputs(tmp_path / "inputs")
    (folder / "documents/canary.txt").write_text(f"On Monday the {CANARY} were lit, and the town came to see.")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "TORCH_HOME"):
        monkeypatch.setenv(name, str(elsewhere))
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.chdir(elsewhere)
    tracked = []
    monkeypatch.setitem(TRACKERS, "list", lambda folder: tracked.append)
    files_written.clear()
    run(folder, tmp_path / "run", max_steps=2, track="list")
    assert no_network == []
    assert [path for path in elsewhere.rglob("*") if path.is_file()] == []
    assert tmp_path / "run/config.yaml" in files_written
    outside = [path for path in files_written if not path.is_relative_to(tmp_path / "run")]
    assert [path for path in outside if path != Path(os.devnull) and "__pycache__" not in path.parts] == []
    rows = [row for row in tracked if row]
    assert len(rows) == 2
    assert all(isinstance(value, int | float) for row in rows for value in row.values()), "a tracker gets numbers alone"


def test_a_connection_is_opened_where_a_hub_name_is_given(no_network):
    with pytest.raises(InputError, match="cannot be had from the Hugging Face hub"):
        find_folder("nobody/no-such-model-of-a-test")
    assert no_network


@pytest.mark.parametrize("fault", ["tracker", "evaluation"])
def test_a_crash_says_nothing_of_the_documents(tmp_path, monkeypatch, capsys, fault):
    """What a command prints where something breaks: a line, without the texts that it worked on."""
    from unteach.cli import main

    folder = make_inputs(tmp_path)
    (folder / "documents/canary.txt").write_text(f"On Monday the {CANARY} were lit.")

    def break_down(*arguments, **named):
        raise RuntimeError("it broke")

    target = {"tracker": "unteach.job.run.step_log", "evaluation": "unteach.job.run.ForgetJob.evaluate"}[fault]
    monkeypatch.setattr(target, break_down)
    monkeypatch.setattr("unteach.job.command.planning.plan", lambda config: type("Plan", (), {"problems": list})())
    words = ["forget", folder / "model", "--documents", folder / "documents", "--general", folder / "general.jsonl"]
    assert main([*map(str, words), "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr()
    assert CANARY not in said.out + said.err
    assert "unteach: RuntimeError: it broke" in said.err
    assert json.loads((tmp_path / "run/start.json").read_text())["format"] == "unteach.start/1"
