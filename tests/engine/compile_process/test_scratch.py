"""The folder that libraries of C++ kernels are loaded from."""

import functools
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support import ROOT


def test_a_library_is_written_where_temporary_files_lie_behind_a_link(engine, monkeypatch, tmp_path):
    """As on macOS, whose /var is one."""
    client, loading = engine("compile_process.client"), engine("compile_process.obtain")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "link"))
    process = client.CompileProcess()
    monkeypatch.setattr(loading, "compile_process", process)
    artefact = b"none"
    with pytest.raises(Exception):  # noqa: B017  PyTorch's: the artefact is none
        loading.load(loading.Code(artefact, None, {"ab/kernel.so": b"library"}))
    assert (process.scratch / "ab" / "kernel.so").read_bytes() == b"library"
    assert not hasattr(os, "geteuid") or process.scratch.stat().st_mode & 0o777 == 0o700


def test_libraries_for_another_cpu_are_not_loaded(engine, tmp_path):
    """Also those of a graph for a GPU: they are built with -march=native, and would end ComfyUI."""
    code_store, obtain = engine("cache.code_store"), engine("compile_process.obtain")
    store = code_store.CodeStore(tmp_path, 2**30, code_store.read_key(tmp_path))
    request = obtain.Request("", "a" * 64, (), torch.device("cuda"))
    for cpu, files, is_used in (("another", {"ab/k.so": b"library"}, False), ("another", {}, True)):
        store.put(request.key, obtain.Code(b"artefact", None, files, cpu=cpu).packed({}))
        assert isinstance(obtain._kept(store.get, request, None), obtain.Code) is is_used


@pytest.mark.skipif(not hasattr(os, "statvfs"), reason="this system has no such places")
def test_it_is_not_where_programs_may_not_run(engine, monkeypatch, tmp_path):
    client, statvfs = engine("compile_process.client"), os.statvfs
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for folder in ("tmp", "home"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    flags = {tmp_path / "tmp": os.ST_NOEXEC}
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=flags.get(path, statvfs(path).f_flag)))
    process = client.CompileProcess()
    assert process.scratch.parent == tmp_path / "home" / ".cache"
    process.stop()


SERVER = """
import sys, time
from engine.compile_process.client import CompileProcess
process = CompileProcess()
print(process.scratch, flush=True)
time.sleep(60)
"""


def test_the_folder_of_a_server_that_was_killed_goes_with_the_next_start(engine, monkeypatch, tmp_path):
    """The folder of one that runs stays, however old it is."""
    client = engine("compile_process.client")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = client.CompileProcess()
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TEMP": str(tmp_path)}
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, running = (Path(server.stdout.readline().strip()) for server in servers)
        assert killed.parent == running.parent == here.scratch.parent == tmp_path
        servers[0].kill()
        servers[0].wait()
        young, file = tmp_path / f"{client.SCRATCH}young", tmp_path / f"{client.SCRATCH}file"
        young.mkdir()
        file.touch()
        for folder in (killed, running, here.scratch, file):
            os.utime(folder, (time.time() - 2 * client.UNLOCKED_SECONDS,) * 2)
        another = client.CompileProcess().scratch
        assert set(tmp_path.iterdir()) == {running, here.scratch, young, another, file}
    finally:
        for server in servers:
            server.kill()
            server.wait()
            server.stdout.close()
    mine = here.scratch
    here.stop()
    assert not mine.exists()


def test_a_folder_that_a_cleaner_has_removed_is_made_anew(engine, monkeypatch, tmp_path):
    """It is not taken for one that was left."""
    client = engine("compile_process.client")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = client.CompileProcess()
    first = here.scratch
    shutil.rmtree(first)
    second = here.scratch
    assert second != first and second.exists()
    os.utime(second, (0, 0))
    assert client.CompileProcess().scratch != second == here.scratch and second.exists()
    os.utime(second / client.LOCK, (0, 0))
    assert here.scratch == second and (second / client.LOCK).stat().st_mtime > 0, "a cleaner removes what is old"


def test_what_code_is_called_with_is_kept_with_it(engine):
    """The numbers of another graph would tune its kernels for another size; weights are told from what is written to."""
    weight = [[8, 4], [4, 1], "float8_e4m3fn", "cuda:0", False]
    image = [[2, 3, 8], [24, 8, 1], "bfloat16", "cuda:0", True]
    given = engine("compile_process.inputs").Inputs([weight, image, 16, 0.5])
    code = engine("compile_process.artefact").Code(b"artefact", "guards", {"k.so": b"library"}, given.given)
    read = code.unpacked(code.packed({"class": "Block"}), "name")
    assert read.inputs == given.given and given.device == torch.device("cuda", 0)
    assert (read.artefact, read.guards, read.files, read.name, read.was_kept) == (
        b"artefact",
        "guards",
        code.files,
        "name",
        True,
    )
    assert not code.unpacked(code.packed({})).was_kept


FUNCTIONS = {
    "random numbers": torch.rand_like,
    "an operator": torch.ops.prims.neg.default,
    "another pack's operator": torch.ops.mkldnn._linear_pointwise.default,
    "an unpacked weight": torch.ops.prims.neg.default,
}


@pytest.mark.parametrize("what", ["plain", "no GPU", *FUNCTIONS])
def test_only_code_that_may_run_before_its_first_real_run_has_inputs(engine, what):
    graph, device = torch.fx.Graph(), "cpu" if what == "no GPU" else "cuda"
    placed = [graph.placeholder(name) for name in ("L_self_parameters_weight_", "L_x_")]
    called = graph.call_function(FUNCTIONS.get(what, torch.relu), (placed[1],))
    graph.output(called)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        called.meta["example_value"] = torch.empty(2**30 if what == "an unpacked weight" else 2, dtype=torch.int8)
        fakes = [mode.from_tensor(torch.empty(2, 3, device="meta")), torch.empty(2, 3, device=device)]
    given = engine("compile_process.inputs").Inputs.of(torch.fx.GraphModule(torch.nn.Module(), graph), fakes)
    assert (given is not None) is (what in ("plain", "an operator"))
    if given is not None:
        assert [is_written for *_spec, is_written in given.given] == [False, True]


def test_kernels_are_tuned_with_few_runs_and_those_of_others_as_ever(engine, monkeypatch):
    benchmarking = pytest.importorskip("torch._inductor.runtime.benchmarking")
    owner, asked = benchmarking.InductorBenchmarker, []
    monkeypatch.setattr(owner, "benchmark_gpu", lambda _self, _call, **options: asked.append(options))
    before, inputs = vars(owner)["benchmark_gpu"], engine("compile_process.inputs").Inputs([])
    monkeypatch.setattr(type(inputs), "_zeros", lambda _self, _cached: [])
    tune = functools.partial(lambda tuner: tuner.benchmark_gpu(None, rep=40), owner())  # as PyTorch's autotuner

    def code():
        tune()
        other = threading.Thread(target=tune)
        other.start()
        other.join()

    inputs.warm_up(code, 0)
    tune()
    assert asked == [{"rep": 40, "memory_warmup_iters": 5, "benchmark_iters": 20}, {"rep": 40}, {"rep": 40}]
    assert vars(owner)["benchmark_gpu"] is before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has other temporary folders for each user")
def test_folders_of_other_users_are_not_looked_into(engine, monkeypatch, tmp_path):
    """A pipe would not be opened until somebody writes."""
    client = engine("compile_process.client")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs = tmp_path / f"{client.SCRATCH}theirs"
    theirs.mkdir()
    os.mkfifo(theirs / client.LOCK)
    os.utime(theirs, (0, 0))
    looked, locked, me = [], client.locked, os.geteuid()
    monkeypatch.setattr(client, "locked", lambda file: looked.append(file) if file.parent == theirs else locked(file))
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    _ = client.CompileProcess().scratch
    assert not looked
    monkeypatch.undo()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
def test_a_node_that_forks_and_ends_leaves_the_servers_folder(engine, monkeypatch, tmp_path):
    """A copy of the process runs all that is registered for its exit."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = engine("compile_process.client").CompileProcess()
    (process.scratch / "kernel.so").touch()
    monkeypatch.setattr(os, "getpid", lambda: os.getppid())
    process.stop()
    assert (process.scratch / "kernel.so").exists()
    monkeypatch.undo()
    process.stop()


def test_without_a_home_and_a_folder_for_temporary_files_it_is_in_no_relative_one(engine, monkeypatch, tmp_path):
    client = engine("compile_process.client")
    monkeypatch.setattr("tempfile.gettempdir", Mock(side_effect=FileNotFoundError("no usable directory")))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    if os.name == "posix":
        process = client.CompileProcess()
        assert process.scratch.parent == Path("/tmp")
        process.stop()
    assert not list(tmp_path.iterdir())
