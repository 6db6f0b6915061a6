"""The folder that libraries of C++ kernels are loaded from."""

import os

import pytest


def test_a_library_is_written_where_temporary_files_lie_behind_a_link(engine, monkeypatch, tmp_path):
    """As on macOS, whose /var is one; what would lie outside of the folder is refused."""
    client, loading = engine("compile_process.client"), engine("compile_process.loading")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "link"))
    process = client.CompileProcess()
    monkeypatch.setattr(loading, "compile_process", process)
    artefact = b"none"
    with pytest.raises(Exception) as error:  # PyTorch's: the artefact is none
        loading.load(client.Code(artefact, None, {"ab/kernel.so": b"library"}))
    assert "outside of its folder" not in str(error.value)
    assert (process.scratch / "ab" / "kernel.so").read_bytes() == b"library"
    assert not hasattr(os, "geteuid") or process.scratch.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match="outside of its folder"):
        loading.load(client.Code(artefact, None, {"../kernel.so": b"library"}))
