"""Compiled code survives a restart and is shared: real processes, one after the other; with files: tests/faults/there.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import TESTS

pytestmark = [pytest.mark.host, pytest.mark.rest]
RESTART = TESTS / "restart.py"
OURS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_COMPILE_KIT_CACHE_GIB")  # a user has none of them


def start(base, *actions, **environment):
    """One process of ComfyUI, from its start to its end; what it says about its cache."""
    base.mkdir(parents=True, exist_ok=True)
    (base / "tmp").mkdir(exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    clean |= {
        "TMPDIR": str(base / "tmp"),
        "HOME": str(base / "home"),
        **{name: str(value) for name, value in environment.items()},
    }
    done = subprocess.run(
        [sys.executable, str(RESTART), str(base), ",".join(actions)], env=clean, capture_output=True, text=True, cwd=base
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[-1].removeprefix("ANSWER ")) | {"log": done.stdout + done.stderr}


def all_hits(answer):
    assert answer["from_disk"] == answer["graphs"] > 0, answer
    assert answer["processes"] == answer["lowered_here"] == 0, answer
    assert answer["error"] < 1e-5, answer
    return True


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The variables of a cache that machines share, and its folder."""
    volume = tmp_path_factory.mktemp("shared") / "volume"
    return {"TORCH_COMPILE_KIT_SHARED_CACHE": volume, "TORCH_COMPILE_KIT_SHARED_KEY": "k" * 32}, volume


@pytest.fixture(scope="module")
def first(tmp_path_factory, shared):
    """A machine on which ComfyUI has run once, with a shared cache, and what that run said."""
    base = tmp_path_factory.mktemp("machine")
    return base, start(base, "warm", "attention", "after", **shared[0])


def test_the_first_process_compiles_into_the_users_folder(first):
    base, answer = first
    assert answer["graphs"] == 2 and (answer["from_disk"], answer["processes"], answer["lowered_here"]) == (0, 1, 0)
    assert answer["error"] < 1e-5
    folder = base / "user" / "torch-compile-kit" / "store"
    assert answer["store"] == str(folder) and (folder / "signature.key").exists()
    kinds = [json.loads(file.read_bytes()[32:].partition(b"\n")[0])["class"] for file in folder.glob("*.code")]
    assert sorted(kinds) == ["DoubleStreamBlock", "SingleStreamBlock"]


def test_a_plain_compile_keeps_its_own_folder(first):
    base, answer = first
    assert answer["variables_left"] == []
    assert Path(answer["plain_after"]).parent == base / "tmp"
    assert len(list(Path(answer["plain_after"]).glob("fxgraph/*/*"))) == 1, "of the plain one alone"


def test_another_machine_takes_every_graph_from_a_shared_cache(first, shared, tmp_path):
    variables, volume = shared
    second = start(tmp_path, "warm", "attention", "after", **variables)
    assert all_hits(second) and "shared cache" not in second["log"]
    assert len(list(volume.glob("*/*.entry"))) == 2, "what other packs compile is not shared"


def test_the_second_process_reads_every_graph_from_disk(first):
    base, answer = first
    second = start(base, "warm", "attention", "order")
    assert all_hits(second)
    assert second["graphs"] == answer["graphs"]
    assert answer["order"] != second["order"] == [3, 1, 2, 0, 4]
    assert "read from the cache on disk" in second["report"]
    print(f"\ncompile seconds: first {answer['seconds']:.1f}, second {second['seconds']:.1f}")


def test_the_users_own_variables_win(first, shared, tmp_path):
    mine = tmp_path / "mine"
    folders = {"TORCHINDUCTOR_CACHE_DIR": mine, "TRITON_CACHE_DIR": tmp_path / "triton"}
    answer = start(tmp_path, "before", "warm", "one", "attention", "after", **folders, **shared[0])
    assert answer["variables_left"] == []
    assert Path(answer["plain_before"]) == mine == Path(answer["plain_after"])
    assert Path(answer["store"]).parent == mine
    assert not (tmp_path / "user" / "torch-compile-kit" / "store").exists()
