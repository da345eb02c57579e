"""SmolLM2's results as a queue of commands: their order, what fails, what is done already; and that each is known."""

import importlib
import sys

import pytest

from recipes.smollm2.results import JOBS, Job, Queue, main
from unteach.experiments.reproduce import ReproduceOptions
from unteach.settings import parse

WRITE = '{python} -c "import sys; open(sys.argv[1], chr(97)).write(sys.argv[2])" {work}/order '


def queue(work, jobs, most=1):
    return Queue(jobs, work, {"python": sys.executable, "work": str(work)}, most)


def test_jobs_run_when_what_they_need_is_done_and_never_twice(tmp_path):
    jobs = {
        "last": Job(WRITE + "3", ("first", "second")),
        "second": Job(WRITE + "2", ("first",)),
        "first": Job(WRITE + "1"),
    }
    assert queue(tmp_path, jobs).state("last") == "waiting"
    assert queue(tmp_path, jobs).run(60)
    assert (tmp_path / "order").read_text() == "123"
    again = queue(tmp_path, jobs | {"more": Job(WRITE + "4", ("last",))})
    assert again.run(60)
    assert (tmp_path / "order").read_text() == "1234"
    assert [again.state(name) for name in again.jobs] == ["done"] * 4


def test_what_needs_a_job_that_failed_waits_and_the_rest_goes_on(tmp_path):
    fails = '{python} -c "import sys; print(chr(33)); sys.exit(3)"'
    jobs = {"fails": Job(fails), "needs": Job(WRITE + "1", ("fails",)), "other": Job(WRITE + "2")}
    found = queue(tmp_path, jobs, most=2)
    assert not found.run(60)
    assert [found.state(name) for name in jobs] == ["status 3", "waiting", "done"]
    assert (tmp_path / "logs" / "fails.log").read_text() == "!\n"
    assert "status 3" in found.table()
    assert queue(tmp_path, {"fails": Job(fails, accepted=(0, 3))}).run(60), "one whose status is accepted is done"


def test_after_its_time_a_queue_ends_what_runs(tmp_path):
    found = queue(tmp_path, {"long": Job('{python} -c "import time; time.sleep(600)"')})
    assert not found.run(1)
    assert found.state("long") == "ended"
    assert queue(tmp_path, found.jobs).state("long") == "ready", "the same command begins it again"


@pytest.mark.parametrize("name", JOBS)
def test_every_command_is_known(name, tmp_path, capsys):
    """Options are read; without its files a recipe refuses in one line."""
    assert set(JOBS[name].needs) <= set(JOBS)
    values = {"python": "python", "sources": str(tmp_path / "sources"), "work": str(tmp_path / "work")}
    words = Queue(JOBS, tmp_path, values, 1).words(name)
    if words[1].endswith(".py"):
        return
    module, *arguments = words[2:]
    if module == "unteach":
        options = parse(ReproduceOptions, ["--name", *arguments[1:]])
        assert options.name in ("audits", "deep", "field", "sequential", "trajectories")
        assert options.settings.is_file()
        return
    assert importlib.import_module(module).main(arguments) == 2
    said = capsys.readouterr().err
    assert "usage" not in said
    assert said.startswith("error: ")


def test_sources_without_the_texts_are_refused(tmp_path, capsys):
    assert main([str(tmp_path), str(tmp_path / "work")]) == 2
    assert "it has no folder muse-news and no tofu" in capsys.readouterr().err
    for name in ("muse-news", "tofu"):
        (tmp_path / name).mkdir()
    assert main([str(tmp_path), str(tmp_path / "work"), "--list", "--only", "tofu-1"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["base", "form", "tofu-models", "tofu-1"]
