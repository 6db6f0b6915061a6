"""A real server that is told to end while code is compiled in the background."""

import itertools
import os
import signal
from pathlib import Path

import psutil
import pytest

from devtools import inprocess, prompts
from devtools.server import Server, wait_until

pytestmark = [pytest.mark.server, pytest.mark.rest]


@pytest.mark.parametrize(("told", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_ends_as_without_the_pack(told, code, model_files, tmp_path, monkeypatch):
    """After a prompt: beside one that runs ComfyUI's own thread aborts the process."""
    models = Path(next(iter(model_files.values()))).parents[1]
    (tmp_path / "models").symlink_to(models, target_is_directory=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    compiler = tmp_path / "compilers" / "g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nsleep 20\nexit 1\n")  # takes no core meanwhile
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    with Server(inprocess.host_folder(), tmp_path, inprocess.has_gpu()) as server:
        shipped = prompts.to_api(prompts.load(), server.get("/object_info"))
        prompt = prompts.shrink(shipped, width=64, height=64, steps=2)
        warmup = prompts.find(prompt, prompts.WARMUP_NODE)
        model = prompt.pop(warmup)["inputs"]["model"]
        for node in prompt.values():
            node["inputs"] = {name: model if value == [warmup, 0] else value for name, value in node["inputs"].items()}
        seeds = itertools.count(1)

        def is_compiling():
            return any(model["being_compiled"] for model in server.get("/torch-compile-kit/report")["models"])

        def is_compiling_after_a_prompt():  # the first ones come before the compiler is imported
            server.queue(prompts.change(prompt, "KSampler", seed=next(seeds)))
            return is_compiling()

        wait_until(is_compiling_after_a_prompt, "code is compiled in the background")
        process = psutil.Process(server.process.pid)

        def both():
            """The compile process, and the compiler that it has started."""
            found = process.children(recursive=True)
            return len(found) > 1 and found

        started = wait_until(both, "PyTorch has started a process")
        assert is_compiling()
        server.process.send_signal(told)
        assert server.process.wait(60) == code, server.log()[-3000:]
        _, left = psutil.wait_procs(started, 30)
        assert not left
