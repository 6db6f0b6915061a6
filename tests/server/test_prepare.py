"""When a real server gets ready to compile: when a prompt is queued that will, and by itself after a restart."""

import contextlib
import json
from pathlib import Path

import pytest

from devtools import inprocess, prompts
from devtools.server import Server, ServerError, wait_until

pytestmark = pytest.mark.server
PREPARED = "imported what loading code needs"  # engine/compile_process/obtain.py
# Longer than nodes/routes.py waits (IDLE there, from before the server answers).
IDLE = 8


def seen(server, seconds):
    """Whether the server has prepared, or does so within some seconds."""
    with contextlib.suppress(ServerError):
        return wait_until(lambda: PREPARED in server.log(), "it has prepared", seconds)
    return False


@pytest.mark.rest
def test_it_prepares_for_a_prompt_and_by_itself_after_a_restart(model_files, engine, tmp_path, monkeypatch):
    models = Path(next(iter(model_files.values()))).parents[1]
    (tmp_path / "models").symlink_to(models, target_is_directory=True)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")  # of the other tests
    user = tmp_path / "user" / "torch-compile-kit"

    def start():
        return Server(inprocess.host_folder(), tmp_path, inprocess.has_gpu(), arguments=["--verbose", "DEBUG"])

    with start() as server:
        assert not seen(server, IDLE), "nobody has compiled here"
        assert not user.exists()
        shipped = prompts.to_api(prompts.load(), server.get("/object_info"))
        server.start(prompts.only_warmup(prompts.shrink(shipped, width=64, height=64, steps=1)))
        assert seen(server, 60)
    assert (user / "store" / "signature.key").exists()
    code_store, here = engine("cache.code_store"), engine("cache.environment").environment()
    store = code_store.CodeStore(user / "store", 2**30, code_store.read_key(user / "store"))
    header = {"class": "Block", "environment": here}
    store.put("0" * 64, json.dumps(header).encode() + b"\n")  # as when the warmup had got so far
    with start() as server:
        assert seen(server, 60)
