"""Killed, without power, on a full disk at any moment: a run goes on or begins anew, and ends with the same bytes."""

import contextlib
import shutil

import pytest
from faulty_disk import MODES, FaultyDisk, Killed
from small_run import make_inputs, names_in, result_of, run

from unteach.errors import InputError
from unteach.job.same_run import ended_already


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Inputs, a run without faults, and the operations of another."""
    folder = make_inputs(tmp_path_factory.mktemp("instant"))
    run(folder, folder / "whole")
    with FaultyDisk(folder / "counted") as disk:
        run(folder, folder / "counted")
    assert disk.unsynced_renames == [], "a file has its name before it is on the disk"
    assert result_of(folder / "counted") == result_of(folder / "whole")
    return folder, disk.operations


def survives(folder, out, mode, fault):
    """A run with a fault, then one without: what is wrong with its end, or nothing."""
    with FaultyDisk(out, mode, fault) as disk, contextlib.suppress(Killed, OSError, InputError):
        run(folder, out)
    if disk.operations[fault:] == [] and fault is not None:
        return "the fault did not come"
    for _ in range(2):  # the second finds all done
        try:
            run(folder, out, resume=(out / "config.yaml").exists())
        except InputError as error:
            if not ended_already(out):
                return f"it does not go on: {error}"
    if result_of(out) != result_of(folder / "whole"):
        return "it ends with other bytes"
    left = set(names_in(out)) ^ set(names_in(folder / "whole"))
    return f"other files: {sorted(left)}" if left else ""


@pytest.mark.parametrize(("mode", "share"), [("killed", 0.02), ("power", 0.5), ("full", 0.85)])
def test_after_a_fault_it_ends_with_the_same_bytes(inputs, tmp_path, mode, share):
    folder, operations = inputs
    fault = int(share * len(operations))
    assert survives(folder, tmp_path / "run", mode, fault) == "", operations[fault]


def moments(operations):
    """The numbers of all operations; of several writes of one file, one after the other, the first and the last."""
    around = zip([None, *operations], operations, [*operations[1:], None], strict=False)
    return [n for n, (before, now, after) in enumerate(around) if before != now or after != now]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_after_a_fault_at_any_operation_it_ends_with_the_same_bytes(inputs, tmp_path, mode):
    folder, operations = inputs
    wrong = {}
    for fault in moments(operations):
        if problem := survives(folder, tmp_path / "run", mode, fault):
            wrong[fault, *operations[fault]] = problem
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert wrong == {}
