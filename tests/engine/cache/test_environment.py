"""What compiled code depends on beside the model."""

import collections
import os
import subprocess
import sys

import pytest
import torch
from support import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU nobody asks the CPU")
def test_telling_what_a_machine_is_compiles_nothing(tmp_path):
    """PyTorch asks a CPU for its vector units with small C++ programs: as long as no block's folder is in use, in any place."""
    code = "from engine.cache.environment import environment; print(environment()['device'])"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_VEC_ISA_OK"}
    environment |= {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("CPU "), done.stdout + done.stderr
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_a_limit_that_is_none_is_told_in_a_line(engine, caplog):
    """Anybody may send megabytes to the server."""
    limit = engine("cache.environment").limit_in_bytes
    for given in ("x" * 2**20, [1] * 2**20, 10**400):
        assert limit(given) == 2 * 2**30
    assert len(caplog.records) == 3 and all(300 > len(record.getMessage()) > 60 for record in caplog.records)
    for given in (1e300, "1e300", "inf", "-inf", "nan", -1):
        assert limit(given) == 2 * 2**30
    assert len(caplog.records) == 9


@pytest.mark.host
@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "CPU "), ("cuda", "a GPU"), ("xpu", "another GPU"), ("privateuseone", "CPU ")]
)
def test_the_cache_depends_on_the_device_that_the_host_computes_on(engine, monkeypatch, device, name):
    """With --cpu not on the GPU that PyTorch sees: code for a CPU is for that CPU."""
    machine, folder = engine("cache.environment"), engine("host.model.user_folder")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda: "another GPU")
    monkeypatch.setattr(folder, "device_type", lambda: device)
    monkeypatch.setattr(folder, "open_store", lambda *args: None)
    machine.environment.cache_clear()
    monkeypatch.setattr(machine._Host, "device", None)
    try:
        assert machine.environment()["device"] == "a GPU"
        folder.open_users_store()
        assert machine.environment()["device"].startswith(name)
    finally:
        machine.environment.cache_clear()


def test_a_variable_that_another_thread_removes_is_left_out(engine, monkeypatch):
    """As `folder_scope` does while code is loaded."""

    class Environment(collections.ChainMap):
        def __iter__(self):
            return iter([*super().__iter__(), "TRITON_GONE"])

    monkeypatch.setattr(os, "environ", Environment({"TRITON_X": "1"}))
    with pytest.raises(KeyError):
        dict(os.environ.items())
    assert engine("cache.environment").variables() == {"TRITON_X": "1"}
    assert engine("compile_process.lowering_settings").now(torch.device("cpu"))["variables"] == {"TRITON_X": "1"}
