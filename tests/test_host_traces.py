"""Traces of the host's architectures are kept and used again; PyTorch's own graphs in memory stand for inductor's on disk."""

import gc
import os
import pickle

import pytest
import sweep
import zoo

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
# Of each family, and what was hard to keep: modules that the bytecode names, classes made in functions, enumerations, expert
# layers, sizes that vary in loops.
SAMPLE = os.environ.get("SAMPLE", "sd15 cascade_c z_image lens ltxav").split()


@pytest.fixture
def in_memory(engine, monkeypatch, tmp_path):
    """The compiled graphs stay in this process; all else goes to disk and back."""
    record, made = engine("trace_record"), []
    disk_cache, kind = engine("disk_cache"), engine("compiled_kind")

    class Kept:
        def __init__(self, function):
            made.append(function)

        def serialize(self):
            return len(made) - 1

    def key(self, compiled, shapes):
        if self.patches:
            return None
        return kind.trace_key(self.forward, self.settings.kind_key(), compiled is self._dynamic, self._sources(), shapes)

    monkeypatch.setattr(record, "_innermost", Kept)
    monkeypatch.setattr(engine("stored_traces"), "_compiled", lambda entry: made[pickle.loads(entry)])
    monkeypatch.setattr(kind.CompiledKind, "_trace_key", key)
    monkeypatch.setattr(disk_cache._Current, "cache", disk_cache.DiskCache(tmp_path, 2**30))
    return made


@pytest.mark.parametrize("name", SAMPLE)
def test_a_second_process_traces_nothing(engine, in_memory, name):
    from torch._dynamo.utils import counters

    first = sweep.run_setup(engine, zoo.SETUPS[name])
    gc.collect()  # the first model's kinds go with it
    kept, traced = len(in_memory), counters["frames"]["total"]
    assert kept >= first.graphs + first.graphs_after > 0
    second = sweep.run_setup(engine, zoo.SETUPS[name])
    assert counters["frames"]["total"] == traced and len(in_memory) == kept
    assert (second.graphs, second.graphs_after, second.graphs_again) == (first.graphs, first.graphs_after, 0)
    assert second.error < 1e-5 and not second.eager, sweep.as_row(second)
