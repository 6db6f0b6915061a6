"""The files of stored traces, and when they are read."""

import collections

import pytest
import torch
from support import Block, Net, copy_of, nothing, nothing_compiles, recorded, relative_error
from torch import nn

pytestmark = pytest.mark.usefixtures("inference_mode")


class Other(nn.Module):
    def forward(self, x):
        return x + 1


@pytest.fixture
def files(engine, tmp_path, monkeypatch):
    """The module, with a cache of its own."""
    disk_cache = engine("disk_cache")
    monkeypatch.setattr(disk_cache._Current, "cache", disk_cache.DiskCache(tmp_path, 2**30))
    return engine("trace_files")


def key_of(files, block=Block, **changed):
    given = {"settings": ("a",), "dynamic": False, "sources": "", "shapes": (torch.Size((2, 4, 8)),), **changed}
    return files.trace_key(block.forward, **given)


def test_the_key_tells_calls_apart(files, monkeypatch):
    keys = [key_of(files), key_of(files, Other), key_of(files, settings=("b",)), key_of(files, sources="a")]
    keys += [key_of(files, dynamic=True), key_of(files, shapes=(torch.Size((2, 5, 8)),))]
    assert len(set(keys)) == len(keys) and None not in keys
    assert key_of(files, dynamic=True) == key_of(files, dynamic=True, shapes=(torch.Size((3, 7, 8)),))
    with torch._inductor.config.patch(max_autotune=True):  # monkeypatch would leave the setting deleted
        assert key_of(files) not in keys
    monkeypatch.setattr(files, "current", lambda: None)
    assert key_of(files) is None


def test_the_newest_are_kept(files, engine, tmp_path, monkeypatch):
    contents = iter(f"{number}".encode() for number in range(9))
    monkeypatch.setattr(files, "dumps", lambda _trace: next(contents))
    for _ in range(files.KEPT + 2):
        files.store_traces("kind", "key", [object()])
    files.store_traces("kind", "key", [object(), object()])  # a graph break
    files.store_traces("kind", "key", [None])
    kept = sorted(file.read_text() for file in (tmp_path / "kind" / "traces").iterdir())
    assert kept == ["2", "3", "4", "5"]


def test_a_damaged_file_is_no_error(files, engine, tmp_path):
    given = Block(), torch.randn(2, 4, 8)
    stored = recorded(engine, *given)
    (tmp_path / "kind" / "traces").mkdir(parents=True)
    for data in (stored[:1000], b"", b"x" * 1000, stored):
        own = copy_of(Block.forward)
        (tmp_path / "kind" / "traces" / "key-0").write_bytes(data)
        assert files.load_trace("kind", "key", own, given, {}) == (data == stored)
    assert relative_error(torch.compile(own, backend=nothing_compiles)(*given), given[0](given[1])) < 1e-5


def test_blocks_with_patches_are_traced_in_each_process(files, engine):
    """Stored code is compared with eager, and a patch may count its calls."""
    module = engine("compiled_kind")
    settings = engine("settings").CompileSettings(backend="inductor")
    kind = module.CompiledKind("Block", Block.forward, settings, None, "kind")
    assert kind._trace_key(None, (torch.Size((2, 4, 8)),)) is not None
    assert kind._for_patches(("attn1",))._trace_key(None, (torch.Size((2, 4, 8)),)) is None


def test_blocks_with_exchanged_parts_are_traced_in_each_process(files, engine):
    settings = engine("settings").CompileSettings(backend="inductor")
    block, code = Block(), engine("registry").ModelCode()
    plain = code.kind_of(block, settings)
    block.inner.forward = lambda x: x
    exchanged = code.kind_of(block, settings)
    assert exchanged is not plain
    assert [kind._trace_key(None, (torch.Size((2, 4, 8)),)) is None for kind in (plain, exchanged)] == [False, True]


def test_loaded_code_counts_among_the_variants_of_its_function(engine, monkeypatch):
    from torch._dynamo.utils import counters

    module, loaded = engine("compiled_kind"), collections.Counter()

    def load_trace(_folder, _key, own, *_given):
        with engine("monitor").compiling():
            counters["stats"]["unique_graphs"] += 1
            loaded[own.__code__] += 1

    monkeypatch.setattr(module, "load_trace", load_trace)
    monkeypatch.setattr(module, "loaded_in", lambda code: loaded[code])
    monkeypatch.setattr(module.CompiledKind, "_trace_key", lambda *_: "key")
    settings = engine("settings").CompileSettings(backend="eager", dynamic="false", cache_limit=3)
    net = Net()
    with engine("monitor").watching, engine("binding").compiled_blocks(net, settings, poll=nothing):
        for length in range(2, 8):
            x = torch.randn(2, length, 8)
            assert relative_error(net(x), net.__class__.forward(net, x)) < 1e-5
    assert list(loaded.values()) == [2], "the third is left to what is compiled"


def test_what_a_block_compiles_while_it_is_compared_is_its_own_affair(engine):
    monitor, record, tuning = engine("monitor"), engine("trace_record"), engine("kernel_tuning")
    copied, own = [], copy_of(Block.forward)
    event = monitor.CompileEvent("Block", lambda: copied.append(1), dict, ("kind", "Block"), own.__code__)
    monitor.monitor.calls.append(event)
    with monitor.watching:
        with monitor.compiling():
            torch.compile(lambda x: x + 1, backend="eager")(torch.randn(3))
            assert not event.traces and record.recorder.traces is None
        assert record.recorder.traces is None and record.recorder.code is None and not copied
        torch.compile(lambda x: x + 2, backend="eager")(torch.randn(3))
        assert event.traces == [None] and copied == [1], "of other code"
    monitor.monitor.calls.pop()
    event.close()
    assert not tuning.tuning_scope._users and not engine("scopes").compile_scope._users


def test_callbacks_that_someone_removed_come_back(engine):
    from torch._dynamo.callback import callback_handler

    monitor = engine("monitor")
    with monitor.watching:
        torch._dynamo.reset()
        assert not callback_handler.start_callbacks
        monitor.watching.renew()
        monitor.watching.renew()
        assert len(callback_handler.start_callbacks) == len(callback_handler.end_callbacks) == 1
    monitor.watching.renew()
    assert not callback_handler.start_callbacks
