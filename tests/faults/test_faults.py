"""Every row of the table of faults and moments: what must hold afterwards holds."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
import here
import table
import there

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    started = there.Zygote(tmp_path_factory.mktemp("zygote"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def warm(zygote, tmp_path_factory):
    """A machine on which the model has been compiled, and saved to a file."""
    machine = there.Machine(tmp_path_factory.mktemp("warm"), zygote, "at once")
    answer = machine.process("run", "save=mine")
    assert there.right(answer) and not answer["raised"] and machine.saved.exists(), answer
    return machine


# The first compilation is what these rows are about.
COLD = {"killed_compiling", "reset_meanwhile", "full_disk"}


# Where it matters that a model has several kinds of blocks.
BY_KIND = {"refused", "passes", "no_memory_to_compile", "cancelled_meanwhile", "cancelled_compiling"}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        *(pytest.param(row, "flux", id=str(row)) for row in table.HERE),
        *(pytest.param(row, "sdxl", id=f"{row}, sdxl", marks=pytest.mark.rest) for row in table.HERE if row.by in BY_KIND),
    ],
)
def test_in_this_process(row, name, tiny, engine, monkeypatch, caplog, inference_mode):
    case = here.Case(tiny, engine, name, row.moment, monkeypatch, caplog)
    try:
        getattr(here, row.by)(case)
    finally:
        case.close()


@pytest.mark.rest
@pytest.mark.parametrize("row", table.THERE, ids=str)
def test_in_processes_of_its_own(row, zygote, warm, tmp_path):
    machine = there.Machine(tmp_path, zygote, row.moment, None if row.by in COLD else warm)
    cleared = getattr(there, row.by)(machine)
    machine.keeps_the_others(but=[file for file in machine.others if cleared in file.parents])


def test_the_table_has_every_fault_and_moment_and_each_row_is_run():
    cells = {(row.fault, row.moment) for row in table.TABLE}
    assert cells == {(fault, moment) for fault, _ in cells for moment in table.MOMENTS}
    pairs = [(row.fault, row.moment, row.happens) for row in table.TABLE]
    assert len(set(pairs)) == len(pairs)
