"""What is done with a host that is not as known: its own way, said once; and with its own compiler."""

import importlib.util
import logging
import sys
import types
from pathlib import Path

import pytest
import torch
from capturing import capture_again
from paging import paged
from patching import patched
from patching import shares_code as fresh_dynamo  # noqa: F401
from support import relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def look(engine):
    """Looks at the host as it is now, and forgets it after the test."""
    adapter = engine("host.adapter")
    adapter.host.cache_clear()
    yield adapter.host
    adapter.host.cache_clear()


def renamed(patch):
    """A host in which what we call has another name."""
    import comfy.model_prefetch
    import comfy.ops

    patch.delattr(comfy.model_prefetch, "cleanup_prefetched_modules")
    patch.delattr(comfy.ops, "resolve_cast_module_with_vbar")


def with_other_arguments(patch):
    """A host whose function takes one argument more."""
    import comfy.model_prefetch

    original = comfy.model_prefetch.cleanup_prefetched_modules
    patch.setattr(
        comfy.model_prefetch, "cleanup_prefetched_modules", lambda queue, core, modules: original(*([modules] if queue else []))
    )


def without_streams(patch):
    """A host that hands out its streams in another way."""
    import comfy.model_management

    patch.delattr(comfy.model_management, "current_stream")


def without_quantized_tensors(patch):
    import comfy.ops

    patch.delattr(comfy.ops, "QuantizedTensor")


def without_list(patch):
    """A host that lists its layers for other arguments."""
    from comfy.model_patcher import ModelPatcher

    original = ModelPatcher._load_list
    patch.setattr(ModelPatcher, "_load_list", lambda self, units, *rest: original(self, *rest))


def test_this_host_is_known(look, caplog):
    with caplog.at_level(logging.WARNING, "torch-compile-kit"):
        assert look().pages is not None and look().traceable_cast and look().list_of_layers and not look().unknown
    assert not caplog.records


def looked_at(look, change, caplog, monkeypatch):
    """Look at a host with other pages, and forget nothing until the test ends."""
    with monkeypatch.context() as patch:
        change(patch)
        with caplog.at_level(logging.WARNING, "torch-compile-kit"):
            assert look().pages is None
            look()
    said = [record.getMessage() for record in caplog.records if "untested ComfyUI version" in record.getMessage()]
    assert len(said) == 1 and "dynamic VRAM" in said[0]


OTHER_PAGES = [with_other_arguments, without_streams, without_quantized_tensors]


@pytest.mark.parametrize("change", [renamed, *OTHER_PAGES])
def test_a_host_with_other_pages_is_known_as_such_and_it_is_said_once(change, look, caplog, monkeypatch):
    looked_at(look, change, caplog, monkeypatch)


@pytest.mark.parametrize("change", [renamed, *(pytest.param(change, marks=pytest.mark.rest) for change in OTHER_PAGES)])
def test_a_host_with_other_pages_samples_in_its_own_way(change, flux, look, caplog, monkeypatch):
    expected = flux.run(flux.patcher)
    looked_at(look, change, caplog, monkeypatch)
    # The host itself goes on with its own functions, as it would under their new names.
    with paged(monkeypatch, flux.patcher.model) as pages:
        pages.resident = set(list(pages.layers)[::2])
        result = flux.run(flux.attach(flux.patcher, only_blocks="single_blocks.*"))
        assert pages.pinned == pages.faults == 0  # on a CPU the host itself takes the weights from where they are
    assert relative_error(result, expected) < 1e-5
    breaks = sum(group.stats.graph_breaks for group in flux.groups)
    assert not flux.failures and breaks > 0, "layers run eager between the graphs of a block"


def test_a_host_that_lists_layers_in_another_way_keeps_its_order(flux, look, caplog, monkeypatch, engine):
    with monkeypatch.context() as patch:
        without_list(patch)
        assert not look().list_of_layers
    attached = flux.attach(flux.patcher)
    with monkeypatch.context() as patch:
        without_list(patch)
        patch.setattr(engine("host.weights.placement"), "_even_by_rank", None)
        assert attached._load_list("units")
    expected = flux.run(flux.patcher)
    assert relative_error(flux.run(attached), expected) < 1e-5


def without_sizes(patch):
    import comfy.model_management

    patch.delattr(comfy.model_management, "module_size")


def test_a_host_that_does_not_tell_sizes_keeps_its_order(look, monkeypatch):
    with monkeypatch.context() as patch:
        without_sizes(patch)
        assert not look().list_of_layers


def test_the_pack_loads_on_a_host_whose_internals_have_other_names(engine, monkeypatch):
    """Each of our modules is imported once more while they are gone."""
    import comfy.model_management
    import comfy.model_prefetch
    import comfy.ops

    folder = Path(engine("host").__file__).parent
    for module, names in (
        (comfy.ops, ("cast_bias_weight", "QuantizedTensor", "cast_modules_with_vbar", "resolve_cast_module_with_vbar")),
        (comfy.model_prefetch, ("cleanup_prefetched_modules",)),
        (comfy.model_management, ("get_offload_stream", "current_stream", "sync_stream", "minimum_inference_memory")),
    ):
        for name in names:
            monkeypatch.delattr(module, name)
    # Made once more, an operator would be another than the one in the code of tests to come.
    operator = types.SimpleNamespace(register_fake=lambda _fake: None)
    monkeypatch.setattr(torch.library, "custom_op", lambda *_, **__: lambda _function: operator)
    files = [file for file in folder.rglob("*.py") if file.name != "__init__.py"]
    assert len(files) > 15
    for file in files:
        name = ".".join([engine("host").__name__, *file.relative_to(folder).with_suffix("").parts])
        spec = importlib.util.spec_from_file_location(f"{name}_once_more", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)


def test_takes(engine):
    takes = engine("host.adapter").takes
    assert takes(lambda a, b, c=1: None, "a", "b") and takes(lambda a, **rest: None, "a")
    assert not takes(lambda b, a: None, "a", "b") and not takes(lambda a, b, c: None, "a", "b")
    assert not takes(lambda a: None, "a", "b") and not takes(None, "a") and not takes(lambda *a: None, "a")


class Seen(Exception):
    """Stands for an error of the model, or for the user's cancel."""


class Planner:
    """Stands for ComfyUI's own compiler, as newer cores have it (comfy/model_prefetch.py, 0.34): it looks at its option in each
    call of a model and records what the forward allocates, from the first block to the end; what is compiled meanwhile is no
    part of its plan. An error leaves it recording until the prompt ends.

    Args:
        model: the network that it plans.
    """

    def __init__(self, model, monkeypatch):
        from torch._dynamo.callback import callback_handler

        self.recordings = self.rogues = 0
        self.records = False
        forward = type(model).forward
        monkeypatch.setattr(type(model), "forward", lambda network, *args, **kwargs: self.plan(forward, network, args, kwargs))
        callback_handler.register_start_callback(self.on_compile)
        self.close = lambda: callback_handler.remove_start_callback(self.on_compile)

    def plan(self, forward, network, args, kwargs):
        import comfy.cli_args

        if comfy.cli_args.args.disable_comfy_compiler:
            return forward(network, *args, **kwargs)
        self.records = True
        self.recordings += 1
        result = forward(network, *args, **kwargs)
        self.records = False
        return result

    def on_compile(self, *_):
        self.rogues += self.records

    def taken(self):
        """(recordings, compilations in them) since the last time; as after a prompt."""
        found, self.recordings, self.rogues, self.records = (self.recordings, self.rogues), 0, 0, False
        return found


@pytest.fixture
def planner(flux, monkeypatch):
    import comfy.cli_args

    monkeypatch.setattr(comfy.cli_args.args, "disable_comfy_compiler", False, raising=False)
    made = Planner(flux.patcher.model.diffusion_model, monkeypatch)
    yield made
    made.close()


def test_nothing_is_compiled_in_what_the_hosts_compiler_records(flux, planner, engine, monkeypatch):
    from contextlib import nullcontext

    expected = flux.run(flux.patcher)
    assert planner.taken() == (flux.steps, 0), "eager: as without us"
    attached = flux.attach(flux.patcher)
    assert relative_error(flux.run(attached), expected) < 1e-5 and flux.graphs == 2
    assert planner.taken() == (0, 0), "not for calls with our blocks"
    assert torch.equal(flux.run(flux.patcher), expected) and planner.taken() == (flux.steps, 0)
    monkeypatch.setattr(engine("host.model.network_calls"), "without_hosts_compiler", nullcontext)
    flux.run(flux.attach(flux.patcher, backend="aot_eager"))
    assert planner.taken()[1] > 0, "else this proves nothing"


@pytest.mark.parametrize("interrupt", [False, True])
def test_the_hosts_compiler_is_on_again_after_an_error(flux, planner, interrupt):
    import comfy.cli_args
    import comfy.model_management

    error = comfy.model_management.InterruptProcessingException if interrupt else Seen
    attached = flux.attach(flux.patcher)

    def stop(_module, _args):
        raise error

    with flux.patcher.model.diffusion_model.double_blocks[0].register_forward_pre_hook(stop), pytest.raises(error):
        flux.run(attached)
    assert planner.taken() == (0, 0) and comfy.cli_args.args.disable_comfy_compiler is False
    flux.run(flux.patcher)
    assert planner.taken() == (flux.steps, 0)


def test_a_host_without_a_compiler_gets_no_option(flux, monkeypatch):
    import comfy.cli_args

    monkeypatch.delattr(comfy.cli_args.args, "disable_comfy_compiler", raising=False)
    flux.run(flux.attach(flux.patcher))
    assert not hasattr(comfy.cli_args.args, "disable_comfy_compiler")


def test_the_host_fetches_no_block_ahead_that_we_fetch(flux, monkeypatch):
    import comfy.model_prefetch

    wanted = []
    network = flux.patcher.model.diffusion_model
    with network.register_forward_hook(
        lambda _m, _a, kwargs, _r: wanted.append(kwargs["transformer_options"].get("prefetch_dynamic_vbars")), with_kwargs=True
    ):
        monkeypatch.setattr(type(flux.patcher), "is_dynamic", lambda _self: True, raising=False)
        monkeypatch.setattr(flux.patcher.model, "dynamic_vbars", {}, raising=False)
        flux.run(flux.patcher)
        assert wanted and all(wanted)
        wanted.clear()
        foreign = patched(flux.patcher, lambda model: model.set_model_attn1_output_patch(lambda out, _options: out))
        for model, are_there_graphs in ((flux.patcher, False), (flux.patcher, True), (foreign, True)):
            if are_there_graphs:
                capture_again(flux.engine, monkeypatch)
            with paged(monkeypatch, flux.patcher.model):
                flux.run(flux.attach(model))
            assert wanted and not any(wanted)
            wanted.clear()
    assert comfy.model_prefetch.PREFETCH_QUEUES == []
