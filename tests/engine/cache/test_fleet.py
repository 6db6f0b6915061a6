"""Workers that are processes of their own, with one shared cache or one folder."""

import json
import os
import subprocess
import sys
import time

import pytest
from redis_servers import SECRET, RedisServer
from support import ROOT


def start(folder, place, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    if place is not None:
        environment |= {"TORCH_COMPILE_KIT_SHARED_CACHE": str(place), "TORCH_COMPILE_KIT_SHARED_KEY": SECRET}
    command = [sys.executable, str(ROOT / "tests" / "fleet_worker.py"), str(folder), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def answer(process):
    output, _ = process.communicate(timeout=400)
    lines = [line for line in output.splitlines() if line.startswith("ANSWER ")]
    assert lines, output
    found = json.loads(lines[0].removeprefix("ANSWER "))
    assert found["equal"] and not found["failures"], output
    return found


@pytest.mark.rest
def test_workers_that_start_at_once_compile_each_graph_once(tmp_path, place):
    processes = [start(tmp_path / str(number), place) for number in range(3)]
    answers = [answer(process) for process in processes]
    assert sum(found["compiled"] for found in answers) == 2, answers
    assert all(found["compiled"] + found["taken"] == 2 for found in answers), answers


@pytest.mark.rest
def test_what_one_worker_compiles_another_runs(tmp_path):
    """With the compiler itself: libraries of C++ travel as well."""
    first = answer(start(tmp_path / "one", tmp_path / "volume", "real"))
    assert (first["compiled"], first["processes"]) == (2, 1)
    second = answer(start(tmp_path / "two", tmp_path / "volume", "real"))
    assert (second["taken"], second["processes"]) == (2, 0), "no process is needed"
    again = answer(start(tmp_path / "two", None, "real"))
    assert (again["taken"], again["processes"]) == (2, 0), "what was taken is kept"


@pytest.mark.rest
def test_a_server_that_dies_while_workers_compile_costs_no_image(tmp_path):
    with RedisServer() as server:
        processes = [start(tmp_path / str(number), server.url) for number in range(2)]
        while not server.client.keys("*:claim"):
            time.sleep(0.05)
        server.process.kill()
        assert all(answer(process)["compiled"] <= 2 for process in processes)


@pytest.mark.rest
def test_servers_with_one_folder(tmp_path):
    """On a network volume, without Redis or a key: at once, and one after the other."""
    first = [answer(process) for process in [start(tmp_path / "volume", None) for _ in range(2)]]
    assert sum(one["compiled"] for one in first) >= 2
    assert answer(start(tmp_path / "volume", None))["compiled"] == 0
