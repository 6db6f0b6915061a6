"""Buffers of streamed weights: in which order streams, buffers and sources are given up. Copies themselves need a GPU
(test_gpu.py); here PyTorch's streams and events are replaced by ones that only note what they are asked for."""

import contextlib
import gc
import weakref

import pytest
import torch

pytestmark = pytest.mark.host
CPU = torch.device("cpu")


class Owner:
    def __init__(self):
        self.lost = False

    def lose_slot(self):
        self.lost = True


class Event:
    """A copy's end, which comes when the test says so."""

    def __init__(self):
        self.done = False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


class Stream:
    def __init__(self, _device=None):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture
def computing(monkeypatch):
    """The stream that computes."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    return stream


@pytest.fixture
def slots(engine, computing, monkeypatch):
    """The two buffers, as `release_buffers` knows them."""
    streaming = engine("host.weights.partial_load")
    monkeypatch.setattr(streaming, "_slots", {CPU: streaming.Slots(CPU)})
    return streaming._slots[CPU]


def fetched(slots, owner, size=8):
    """A slot in which a copy is under way, and its source."""
    source = torch.arange(size, dtype=torch.float32)
    slot = slots.take(owner, 512 * size)
    assert torch.equal(slot.copy([source])[0], source)
    return slot, source


def when_freed(slot, computing, seen):
    """Note what the computing stream had been told to wait for when the buffer's memory was freed."""
    weakref.finalize(slot._buffer.untyped_storage(), lambda: seen.append(list(computing.waited)))


def test_a_cancel_between_fetch_and_use_waits_for_the_copy_on_the_device(slots, computing):
    slot, _ = fetched(slots, Owner())
    copy = slot._ready
    slot.free()
    assert computing.waited[-1] is copy and not copy.done, "the CPU does not wait"


def test_growth_over_a_copy_that_was_never_used(slots, computing):
    skipped, other = Owner(), Owner()
    slot, _ = fetched(slots, skipped)
    copy, seen = slot._ready, []
    fetched(slots, other)
    computing.waited.clear()
    when_freed(slot, computing, seen)
    fetched(slots, Owner(), size=32)
    gc.collect(1)
    assert skipped.lost and not other.lost
    assert copy in seen[0], "memory that is freed earlier may be used by the computing stream at once"


def test_buffers_are_released_after_a_cancel_when_nothing_writes_to_them(slots, computing, engine):
    slot, _ = fetched(slots, Owner())
    copy = slot._ready
    slot.free()
    engine("host.weights.partial_load").release_buffers()
    assert copy.done and copy in computing.waited, "the host may free the source at once"
    assert not engine("host.weights.partial_load")._slots


def test_a_source_lives_as_long_as_its_copy_is_under_way(slots):
    slot, source = fetched(slots, Owner())
    first, copy = weakref.ref(source), slot._ready
    del source
    slot.free()
    for _ in range(2):  # the other slot, then this one
        slots.take(Owner(), 64).copy([torch.zeros(2)])
    assert first() is not None
    copy.done = True
    slot.copy([torch.zeros(2)])
    gc.collect(1)
    assert first() is None


def test_a_model_that_ends_leaves_another_ones_buffer_alone(slots, computing, engine):
    """Two models in turn: what the second has fetched when the first is cleaned up is still there."""
    slot, source = fetched(slots, Owner())
    engine("host.weights.partial_load").release_buffers()
    slot.wait()
    kept = slot._buffer[: source.nbytes].view(torch.float32)
    assert computing.waited[-1] is slot._ready and torch.equal(kept, source)


@pytest.fixture
def streamed(engine, slots, monkeypatch):
    """The weight of a layer that travels."""
    streaming = engine("host.weights.partial_load")
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    found = streaming.StreamedTensors([streaming.Elsewhere(layer, "weight")], CPU, torch.float32)
    monkeypatch.setattr(found, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(streaming, "_slots_on", lambda _device: slots)
    found.bytes, found.layer = layer.weight.nbytes, layer
    return found


def test_a_new_tensor_at_the_address_of_an_old_one_is_not_taken_for_it(streamed):
    """What was fetched is known by `id`, which is only safe while the source is alive."""
    streamed.fetch()
    fetched_weight = weakref.ref(streamed.layer.weight)
    streamed.layer.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
    assert fetched_weight() is not None
    streamed.drop()


def test_a_copy_waits_for_the_last_use_of_its_buffer(slots, computing):
    slot, _ = fetched(slots, Owner())
    slot.free()
    assert slot._free.stream is computing, "the last use ends when the computing stream gets here"
    slot._stream.waited.clear()
    slot.copy([torch.zeros(2)])
    assert slot._stream.waited == [slot._free], "else it writes over weights that are still read"


def test_a_copy_into_a_new_buffer_waits_for_who_had_its_memory_before(slots, computing):
    slot, _ = fetched(slots, Owner())
    slot._free.stream = None
    slot.grow(1)
    assert slot._free.stream is None, "it is large enough"
    slot.grow(2**20)
    assert slot._free.stream is computing


def test_what_was_dropped_gives_its_buffer_back_and_is_fetched_again(slots, streamed, computing):
    streamed.fetch()
    slot = streamed._slot
    assert slot.owner() is streamed
    streamed.drop()
    assert slot.owner is None and slot._ready in computing.waited and not streamed._arrived
    streamed.fetch()
    assert streamed._slot is not None and list(streamed._arrived) == [id(streamed.layer.weight)]


def test_what_is_on_meta_does_not_travel(engine):
    block = torch.nn.Linear(4, 4)
    block.register_parameter("unused", torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False))
    streaming = engine("host.weights.partial_load")
    found = streaming.tensors_elsewhere(torch.nn.Sequential(block), torch.device("cuda"))
    assert [item.name for item in found] == ["weight", "bias"]
    assert not streaming.tensors_elsewhere(torch.nn.Sequential(block), torch.device("cpu"))
    state = engine("cuda_graphs.model_state").ModelState()
    state.check_unchanged(block, torch.device("cpu"), None, lambda: None)
    assert state.obstacle is None
