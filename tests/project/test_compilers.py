"""What stands before g++ in the tests' PATH compiles each source once, and nothing else is taken for it."""

import os
import shutil
import subprocess

import pytest
from support import TESTS

# A stand-in for the compiler: notes that it was called, and writes its source and options.
COMPILER = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *--broken*) exit 4 ;; *--version*) exit 0 ;; esac
for word; do output=$word; done
{ echo "$1"; cat "$2"; } > "$output"
"""


@pytest.fixture
def compile_source(tmp_path):
    """compile_source(name, text, option): exit status, what was written, and how often the compiler has run."""
    if shutil.which("bash") is None or shutil.which("sha256sum") is None:
        pytest.skip("no bash: the compiler itself is called")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").write_text(COMPILER)
    (tmp_path / "bin" / "g++").chmod(0o755)
    calls = tmp_path / "calls"
    path = os.pathsep.join([str(TESTS / "compilers"), str(tmp_path / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "CALLS": str(calls), "TORCH_COMPILE_KIT_COMPILED": str(tmp_path / "kept")}

    def run(name, text, option="-O1"):
        source, output = tmp_path / f"{name}.cpp", tmp_path / f"{name}.so"
        source.write_text(text)
        status = subprocess.run(["g++", option, source, "-o", output], env=environment).returncode
        return status, output.read_text() if output.exists() else None, len(calls.read_text().splitlines())

    return run


def test_the_same_source_in_another_folder_is_not_compiled_again(compile_source):
    assert compile_source("one", "int x;\n") == (0, "-O1\nint x;\n", 1)
    assert compile_source("two", "int x;\n") == (0, "-O1\nint x;\n", 1)
    assert compile_source("three", "int y;\n") == (0, "-O1\nint y;\n", 2), "another source"
    assert compile_source("four", "int x;\n", "-O2") == (0, "-O2\nint x;\n", 3), "another option"


def test_what_failed_is_not_kept(compile_source):
    assert compile_source("one", "int x;\n", "--broken") == (4, None, 1)
    assert compile_source("two", "int x;\n", "--broken") == (4, None, 2)
