"""A real server from its start to its end: when it gets ready to compile, and that it ends while code is compiled."""

import contextlib
import itertools
import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from devtools import inprocess, prompts
from devtools.server import Server, ServerError, error_of, wait_until

pytestmark = [pytest.mark.server, pytest.mark.rest]
PREPARED = "imported what loading code needs"  # engine/compile_process/obtain.py
# Longer than nodes/routes.py waits (IDLE there, from before the server answers).
IDLE = 8


def seen(server, seconds):
    """Whether the server has prepared, or does so within some seconds."""
    with contextlib.suppress(ServerError):
        return wait_until(lambda: PREPARED in server.log(), "it has prepared", seconds)
    return False


def is_compiling(server):
    return any(model["being_compiled"] for model in server.get("/torch-compile-kit/report")["models"])


def begin_to_compile(server):
    """In the background, after a prompt: beside one that runs ComfyUI's own thread aborts the process."""
    prompt = prompts.shrink(prompts.to_api(prompts.load(), server.get("/object_info")), width=64, height=64, steps=2)
    warmup = prompts.find(prompt, prompts.WARMUP_NODE)
    model = prompt.pop(warmup)["inputs"]["model"]
    for node in prompt.values():
        node["inputs"] = {name: model if value == [warmup, 0] else value for name, value in node["inputs"].items()}
    seeds = itertools.count(1)

    def is_compiling_after_a_prompt():  # the first ones come before the compiler is imported
        assert error_of(server.queue(prompts.change(prompt, "KSampler", seed=next(seeds)))) is None
        return is_compiling(server)

    wait_until(is_compiling_after_a_prompt, "code is compiled in the background")


def ends(server, told, code):
    process = psutil.Process(server.process.pid)

    def both():
        """The compile process, and the compiler that it has started."""
        found = process.children(recursive=True)
        return len(found) > 1 and found

    started = wait_until(both, "PyTorch has started a process")
    assert is_compiling(server)
    server.process.send_signal(told)
    assert server.process.wait(60) == code, server.log()[-5000:]
    assert not psutil.wait_procs(started, 30)[1]


def test_it_prepares_for_a_prompt_and_by_itself_after_a_restart_and_ends_as_without_the_pack(
    model_files, engine, tmp_path, monkeypatch
):
    models = Path(next(iter(model_files.values()))).parents[1]
    (tmp_path / "models").symlink_to(models, target_is_directory=True)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")  # of the other tests
    user, compiler = tmp_path / "user" / "torch-compile-kit", tmp_path / "compilers" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nsleep 20\nexit 1\n")  # takes no core meanwhile
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")

    def start():
        # Where a shell has started the tests in its background, they ignore Ctrl-C, and so would the server.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return Server(inprocess.host_folder(), tmp_path, inprocess.has_gpu(), arguments=["--verbose", "DEBUG"])

    with start() as server:
        assert not seen(server, IDLE), "nobody has compiled here"
        assert not user.exists()
        begin_to_compile(server)
        assert seen(server, 60)
        ends(server, signal.SIGINT, 0)
    assert (user / "store" / "signature.key").exists()
    code_store, here = engine("cache.code_store"), engine("cache.environment").environment()
    store = code_store.CodeStore(user / "store", 2**30, code_store.read_key(user / "store"))
    header = {"class": "Block", "environment": here}
    store.put("0" * 64, json.dumps(header).encode() + b"\n")  # as when the warmup had got so far
    with start() as server:
        assert seen(server, 60)
        begin_to_compile(server)
        ends(server, signal.SIGTERM, -signal.SIGTERM)
