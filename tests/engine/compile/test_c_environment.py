"""The variables that lowering sets are Python's alone: setenv() beside the getenv() of another thread can crash the process."""

import ctypes
import os

import pytest
import torch
from support import CompiledNet, Net
from support import torch_settings as process_settings

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH")


@pytest.fixture
def cache(engine, tmp_path, monkeypatch):
    disk = engine("cache.disk")
    found = disk.DiskCache(tmp_path / "cache", 2**30)
    monkeypatch.setattr(disk._Current, "cache", found)
    return found


@pytest.fixture
def written(monkeypatch):
    """Variables that anything gives to C."""
    variables = []
    for function in ("putenv", "unsetenv"):
        theirs = getattr(os, function)
        monkeypatch.setattr(
            os, function, lambda *variable, of=theirs: (variables.append(tuple(map(os.fsdecode, variable))), of(*variable))
        )
    return variables


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_compiled_writes_no_folder_into_the_environment_of_c(waits, engine, cache, written):
    before, net, x = process_settings(), CompiledNet(engine, Net(), backend="inductor"), torch.randn(2, 4, 8)
    with torch.inference_mode():
        (net.at_once if waits else net)(x)
        assert net.wait() == 1
    assert any(cache.root.glob("*/*/*")), "the folder is used all the same"
    # Outside PyTorch may write its own folder.
    assert not [(name, *value) for name, *value in written if name in NAMES[1:] or str(cache.root) in "".join(value)]
    assert process_settings() == before


@pytest.mark.skipif(os.name == "nt", reason="getenv of another C library")
def test_two_graphs_at_once_and_what_pytorch_writes_itself(engine, cache, monkeypatch):
    """PyTorch's `cache_dir()` writes its variable back, from 2.15 on at each call."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    session, putenv = engine("compile.session"), os.putenv
    monkeypatch.setenv(NAMES[0], "before")
    with session.lowering_scope(("0" * 12, "Block")):
        with session.lowering_scope(("1" * 12, "Other")):
            os.environ[NAMES[0]] = os.environ[NAMES[0]]
            assert getenv(NAMES[0].encode()) == b"before" != os.environb[NAMES[0].encode()]
        monkeypatch.setenv("TORCH_COMPILE_KIT_OTHER", "1")
        assert getenv(b"TORCH_COMPILE_KIT_OTHER") == b"1"
    assert os.environ[NAMES[0]] == "before" and os.putenv is putenv
