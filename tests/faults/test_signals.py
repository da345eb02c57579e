"""SIGINT and SIGTERM at any time: a line and status 130, never a traceback, nothing half-written."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from small_run import make_inputs, names_in

from unteach import cli
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


def ended(words, *waits):
    """Send signals to a command after so many seconds each; its status and what it said."""
    process = subprocess.Popen([sys.executable, "-m", "unteach", *map(str, words)], stderr=subprocess.PIPE, text=True)
    for seconds, number in waits:
        time.sleep(seconds)
        process.send_signal(number)
    said = process.communicate(timeout=100)[1]
    return process.returncode, said


def test_the_second_signal_ends_it_at_once():
    code = (
        "import os, signal, time\n"
        "from unteach.errors import ending_on_signals\n"
        "with ending_on_signals(program=True):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "unteach: interrupted\n")


def test_a_signal_that_comes_where_exceptions_are_ignored_is_not_lost(monkeypatch, capsys):
    """In a destructor, or in a callback of the import system, Python prints an exception and goes on."""

    class Gone:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)

    def run(name, arguments):
        Gone()
        time.sleep(5)
        raise AssertionError("the signal was lost")

    hook = sys.unraisablehook
    monkeypatch.setattr(cli, "_run", run)
    assert cli.main(["plan", "x"]) == 130
    assert capsys.readouterr().err == "unteach: interrupted\n"
    assert sys.unraisablehook is hook


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("command", ["forget", "plan"])
def test_in_the_first_seconds(tmp_path, command, seconds):
    folder = make_inputs(tmp_path)
    words = [command, folder / "model", "--documents", folder / "documents", "--general", folder / "general.jsonl"]
    words += ["--out", tmp_path / "run", "--max-steps", 10_000] if command == "forget" else []
    number = signal.SIGTERM if seconds == 1.0 else signal.SIGINT
    status, said = ended(words, (seconds, number))
    assert status == 130, said
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("unteach: ")
    if (tmp_path / "run").exists():
        assert "unteach forget --resume" in said
        assert not [name for name in names_in(tmp_path / "run") if name.endswith(".part")]
