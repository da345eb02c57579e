"""SIGINT and SIGTERM at any time: a line and status 130, never a traceback, nothing half-written."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_run import make_inputs, names_in

from unteach import cli, errors
from unteach.errors import ending_on_signals


def interrupting(number, then=None):
    """A command during which a signal comes, and perhaps another error of it."""

    def run(name, arguments):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            if then is None:
                raise
            raise then from None
        raise AssertionError("no signal came")

    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "then", [None, ModuleNotFoundError("no such module"), ValueError("wrong"), RuntimeError("a\nb")]
)
def test_a_signal_is_a_line_and_status_130(number, then, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", interrupting(number, then))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["plan", "x"]) == 130
    assert capsys.readouterr().err == "unteach: interrupted\n"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_signals_are_left_alone():
    found = []

    def work():
        with ending_on_signals(program=False) as came:
            found.append(came)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]


def test_the_second_signal_ends_it_at_once():
    code = (
        "import os, signal, time\n"
        "from unteach.errors import ending_on_signals\n"
        "with ending_on_signals(program=True):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(100)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(100)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (130, "unteach: interrupted\n")


def signalled_where_exceptions_are_ignored(name, arguments):
    """A command during which a signal comes in a destructor."""

    class Gone:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)

    Gone()
    time.sleep(100)
    raise AssertionError("the signal was lost")


def test_a_signal_that_comes_where_exceptions_are_ignored_is_not_lost(monkeypatch, capsys):
    """In a destructor, or in a callback of the import system, Python prints an exception and goes on."""

    hook = sys.unraisablehook
    monkeypatch.setattr(cli, "_run", signalled_where_exceptions_are_ignored)
    assert cli.main(["plan", "x"]) == 130
    assert capsys.readouterr().err == "unteach: interrupted\n"
    assert sys.unraisablehook is hook


def test_a_signal_that_a_library_swallows_comes_again(monkeypatch, capsys):
    def run(name, arguments):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        time.sleep(100)

    monkeypatch.setattr("unteach.errors.SWALLOWED", (0.01, 30.0))
    monkeypatch.setattr(cli, "_run", run)
    handler = signal.getsignal(signal.SIGALRM)
    assert cli.main(["plan", "x"]) == 130
    assert capsys.readouterr().err == "unteach: interrupted\n"
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_signal_that_comes_again_while_that_is_arranged_is_not_lost(monkeypatch, capsys):
    """On a busy machine the alarm may ring before the hook that has set it is left."""
    setitimer, rung = signal.setitimer, []

    def ring_at_once(which, seconds, interval=0.0):
        setitimer(which, seconds, interval)
        if seconds == errors.SOON[0] and not rung:
            rung.append(1)
            signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(signal, "setitimer", ring_at_once)
    monkeypatch.setattr(cli, "_run", signalled_where_exceptions_are_ignored)
    assert cli.main(["plan", "x"]) == 130
    assert (rung, capsys.readouterr().err) == ([1], "unteach: interrupted\n")


IMPORTS = [("import", "numpy"), ("import", "torch"), ("import", "transformers")]
FILES = [
    ("os.rename", "start.json"),
    ("os.rename", "config.yaml"),
    ("os.rename", "before.json"),
    ("open", "metrics.jsonl"),
]
MOMENTS = [
    *(("plan", *moment) for moment in (*IMPORTS, ("import", "unteach.planning.rehearsal"))),
    *(("forget", *moment) for moment in (*IMPORTS, ("import", "unteach.job.run"), *FILES)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "event", "name"), MOMENTS)
def test_from_the_first_import_on(tmp_path, command, event, name):
    """The run has no end of its own: its rule cannot be met."""
    folder, out = make_inputs(tmp_path), tmp_path / "run"
    number = signal.SIGTERM if name in ("torch", "config.yaml") else signal.SIGINT
    words = [command, folder / "model", "--documents", folder / "documents", "--general", folder / "general.jsonl"]
    words += ["--out", out, "--max-steps", 10_000, "--stop.metric", "verbmem_f <= -1", "--stop.plateau", 0]
    program = [sys.executable, Path(__file__).with_name("signalled.py"), int(number), event, name]
    done = subprocess.run([str(word) for word in [*program, *words]], capture_output=True, text=True, timeout=900)
    assert done.returncode == 130, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("unteach: ")
    if command == "plan" or event == "import":
        assert not out.exists()
    else:
        assert not [file for file in names_in(out) if file.endswith(".part")]
    if (out / "config.yaml").exists():
        assert f"unteach forget --resume {out}" in done.stderr
