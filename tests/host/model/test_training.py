"""ComfyUI's TrainLoraNode behind Torch Compile: trains compiled, and what was compiled for sampling stays."""

import gc
import inspect
import re
import textwrap
import weakref
from types import SimpleNamespace

import comfy.model_patcher
import pytest
import torch
from patch_kinds.weights import quantised
from patching import Runs
from tiny_workflows import TRAINING

pytestmark = [pytest.mark.host]


def train(patcher, runs, bypass, depth=1, steps=4, **other):
    """Losses and the LoRA, of the host's node as the host runs it; `depth` of checkpointing, None without.

    Args:
        other: inputs of the node.
    """
    from comfy_extras.nodes_train import TrainLoraNode

    torch.manual_seed(7)
    latents = [{"samples": torch.randn(runs.latent.shape, generator=torch.Generator().manual_seed(n))} for n in range(2)]
    inputs = {**TRAINING, "model": patcher, "batch_size": 1, "steps": steps, "learning_rate": 1e-3, "bypass_mode": bypass}
    inputs |= {"gradient_checkpointing": depth is not None, "checkpoint_depth": depth or 1, **other}
    with torch.inference_mode():
        given = {name: [value] for name, value in inputs.items()}
        lora, losses, _steps = TrainLoraNode.execute(**given, latents=latents, positive=[runs.positive]).args
    return losses["loss"], lora


@pytest.fixture
def flux(tiny, engine, model_files):
    import comfy.sd

    runs = Runs(tiny, engine, "flux", cfg=1.0)
    runs.patcher = comfy.sd.load_diffusion_model(str(model_files["flux"]))
    return runs


@pytest.fixture
def compiled_groups(engine, monkeypatch):
    """Groups of the trainer's model, which is freed with it."""
    found, registry = {}, engine("compile.registry")
    own = registry.ModelCode.group_of

    def group_of(self, *args):
        group, state = own(self, *args)
        found[id(group)] = group
        return group, state

    monkeypatch.setattr(registry.ModelCode, "group_of", group_of)
    return found


def with_sums_out_of_place(monkeypatch, names=("DoubleStreamBlock", "SingleStreamBlock")):
    """The host's Flux blocks as autograd can go back through them; checkpointing hides `img += ...` from its check."""
    import comfy.ldm.flux.layers as layers

    for block in (getattr(layers, name) for name in names):
        source = textwrap.dedent(inspect.getsource(block.forward))
        changed = re.sub(r"^(\s+)(img|txt|x) \+= (.*)$", r"\1\2 = \2 + \3", source, flags=re.M)
        assert changed != source
        names = dict(vars(layers))
        exec(changed, names)  # noqa: S102
        monkeypatch.setattr(block, "forward", names["forward"])


def far(one, other):
    """How far two trainings are apart at most: losses, LoRA."""
    assert one[1].keys() == other[1].keys()
    losses = max(abs(a - b) for a, b in zip(one[0], other[0], strict=True))
    return losses, max(float((one[1][key] - other[1][key]).abs().max()) for key in one[1])


def check_groups(groups, count):
    assert len(groups) == count and not [g.failure.message() for g in groups.values() if g.failure]
    assert all(g.stats.graphs == 1 and g.stats.graph_breaks == 0 for g in groups.values())


@pytest.mark.parametrize(
    "depth, bypass",
    [
        (3, True),
        *(pytest.param(*case, marks=pytest.mark.rest) for case in [(1, False), (2, False)]),
    ],
)
def test_flux_trains_as_with_sums_out_of_place(flux, monkeypatch, compiled_groups, depth, bypass):
    compiled = flux.attach(flux.patcher, backend="eager")
    ours = train(compiled, flux, bypass, depth)
    check_groups(compiled_groups, 2)
    with monkeypatch.context() as patch:
        with_sums_out_of_place(patch)
        expected = train(flux.patcher, flux, bypass, depth)
    assert max(far(ours, expected)) < 1e-6 and len(set(ours[0])) > 1
    assert not any("_orig_mod" in key for key in ours[1]) and any(value.any() for value in ours[1].values())
    assert "Training: blocks run compiled, forwards and backwards." in flux.engine("host.model.attach").notes_about(compiled)


def test_an_adapter_that_breaks_graphs_in_each_layer_is_told(flux, compiled_groups):
    compiled, traces = flux.attach(flux.patcher, backend="eager"), []
    for steps in (2, 4):
        compiled_groups.clear()
        train(compiled, flux, False, algorithm="OFT", steps=steps)
        traces.append(sum(group.code.traces for group in compiled_groups.values()))
    assert traces[0] == traces[1], "more steps need no more"
    said = [note for note in flux.engine("host.model.attach").notes_about(compiled) if note.startswith("Training: ")]
    graphs, breaks = (sum(getattr(g.stats, name) for g in compiled_groups.values()) for name in ("graphs", "graph_breaks"))
    assert breaks and len(said) == 1 and f"in {graphs} graphs with {breaks} breaks, so little is gained. " in said[0]


@pytest.mark.rest  # half a minute; with the backend aot_eager, and both kinds of blocks: test_without_checkpointing_too
def test_backwards_are_compiled_by_inductor_too(flux, monkeypatch, compiled_groups):
    with monkeypatch.context() as patch:
        with_sums_out_of_place(patch, ["DoubleStreamBlock"])
        ours = train(flux.attach(flux.patcher, backend="inductor", only_blocks="single_blocks.*"), flux, False, 2)
    check_groups(compiled_groups, 1)
    with monkeypatch.context() as patch:
        with_sums_out_of_place(patch)
        expected = train(flux.patcher, flux, False, 2)
    losses, lora = far(ours, expected)
    assert losses < 1e-5 and lora < 1e-3, "a step of AdamW is 1e-3"


@pytest.mark.rest
@pytest.mark.parametrize("bypass", [False, True])
def test_a_model_in_fp8_trains_with_quantised_products_both_ways(flux, monkeypatch, compiled_groups, bypass):
    import comfy.model_management
    import comfy.sd

    state_dict = quantised(flux.patcher.model.diffusion_model.state_dict(), "float8_e4m3fn")

    def load(_name="", disable_dynamic=False):
        return comfy.sd.load_diffusion_model_state_dict({key: value.clone() for key, value in state_dict.items()})

    monkeypatch.setattr(comfy.model_management, "supports_fp8_compute", lambda *_: True)
    with torch.inference_mode():
        flux.patcher = load()
    flux.patcher.cached_patcher_init = (load, ("",))
    inputs = {"training_dtype": "none", "quantized_backward": True}
    ours = train(flux.attach(flux.patcher, backend="eager"), flux, bypass, 2, **inputs)
    check_groups(compiled_groups, 2)
    with monkeypatch.context() as patch:
        with_sums_out_of_place(patch)
        expected = train(flux.patcher, flux, bypass, 2, **inputs)
    assert max(far(ours, expected)) < 1e-6 and len(set(ours[0])) > 1


@pytest.mark.rest
def test_without_checkpointing_too(flux, monkeypatch, compiled_groups):
    """The host's own Flux cannot be trained so: blocks write into what a backward needs."""
    with pytest.raises(RuntimeError, match="inplace"):
        train(flux.patcher, flux, False, None, steps=2)
    ours = train(flux.attach(flux.patcher, backend="aot_eager"), flux, False, None, steps=2)
    check_groups(compiled_groups, 2)
    with monkeypatch.context() as patch:
        with_sums_out_of_place(patch)
        expected = train(flux.patcher, flux, False, None, steps=2)
    assert max(far(ours, expected)) < 1e-4


@pytest.mark.parametrize(
    ("name", "bypass"),
    [
        ("wan", True),
        pytest.param("sdxl", False, marks=pytest.mark.rest),
    ],
)
def test_other_models_train_as_the_host_trains_them(tiny, engine, compiled_groups, name, bypass):
    runs = Runs(tiny, engine, name, cfg=1.0)
    runs.patcher.cached_patcher_init = (lambda name, disable_dynamic=False: tiny.build_patcher(name), (name,))
    compiled = runs.attach(runs.patcher)
    ours = train(compiled, runs, bypass, steps=3)
    groups = compiled_groups.values()
    assert groups and not [group.failure.message() for group in groups if group.failure]
    graphs = sum(group.stats.graphs for group in groups)
    assert graphs and all(group.stats.graph_breaks == 0 for group in groups)
    assert max(far(ours, train(runs.patcher, runs, bypass, steps=3))) < 1e-5 and len(set(ours[0])) > 1
    assert any(value.any() for value in ours[1].values())
    runs.latent = tiny.empty_latent(name, 96, 128)
    assert max(far(train(compiled, runs, bypass, steps=3), train(runs.patcher, runs, bypass, steps=3))) < 1e-5
    assert sum(group.stats.graphs for group in groups) == graphs, "another size needs another graph"
    assert not [group.failure.message() for group in groups if group.failure]


def test_sampling_between_two_trainings_runs_compiled(flux):
    compiled, results = flux.attach(flux.patcher, only_blocks="single_blocks.*"), []
    for _ in range(2):
        results.append(train(compiled, flux, False, steps=2)[0])
        with torch.inference_mode():
            assert torch.allclose(flux.run(compiled), flux.run(flux.patcher), atol=1e-6)
        assert not flux.failures
    assert results[0] == results[1]


def test_weights_of_a_training_that_is_over_are_free_for_a_sampler_in_its_prompt(flux, monkeypatch):
    """The host collects garbage after the prompt."""
    compiled, trained = flux.attach(flux.patcher, only_blocks="single_blocks.*"), weakref.WeakSet()
    clone = type(compiled).clone

    def noted(patcher, **how):
        made = clone(patcher, **how)
        if made.model is not patcher.model:
            trained.add(made.model.diffusion_model)
        return made

    monkeypatch.setattr(type(compiled), "clone", noted)
    gc.collect()
    gc.disable()
    try:
        train(compiled, flux, False, steps=1)
        assert trained, "else there is nothing to free"
        with torch.inference_mode():
            flux.run(compiled)
        assert not trained
    finally:
        gc.enable()


def test_a_copy_for_sampling_is_not_trained(flux, monkeypatch, engine):
    """For another GPU, say; it lives as long as the session, and each run would collect garbage for it."""
    compiled, collected = flux.attach(flux.patcher), []
    monkeypatch.setattr(engine("host.model.training").gc, "collect", lambda *_: collected.append(1))
    with torch.inference_mode():
        again = compiled.clone(force_deepcopy=True)
        flux.run(compiled)
    assert not any("forward" in vars(module) for module in again.model.diffusion_model.modules())
    assert not collected


def test_a_trainer_that_does_not_copy_the_model_runs_uncompiled(flux, engine):
    compiled = flux.attach(flux.patcher)
    network = flux.patcher.model.diffusion_model
    said = engine("host.model.training").begin_step(network, torch.zeros(1))
    assert "uncompiled" in said and not any("forward" in vars(m) for m in network.modules())
    assert compiled.clone().model is flux.patcher.model


def test_with_weights_elsewhere_blocks_run_uncompiled_and_it_is_said(flux, engine, compiled_groups):
    again = flux.attach(flux.patcher).clone(force_deepcopy=True)
    network, begin_step = again.model.diffusion_model, engine("host.model.training").begin_step
    block = next(module for module in network.modules() if "forward" in vars(module))
    told = begin_step(network, torch.zeros(1, device="meta"))
    assert told.startswith("Training: blocks run uncompiled, since weights are offloaded") and "--disable-dynamic-vram" in told
    with pytest.raises(TypeError):
        block()
    assert not compiled_groups
    assert begin_step(network, torch.zeros(1)) == "Training: blocks run compiled, forwards and backwards."
    with pytest.raises(TypeError):
        block()
    assert compiled_groups


def under_dynamic_vram(runs, monkeypatch, free):
    """The host's patcher of dynamic VRAM, which does not page on a CPU; `free`: memory, as a multiple of the model's."""
    import comfy_aimdo.host_buffer

    class Paged(comfy.model_patcher.ModelPatcherDynamic):
        def __new__(cls, *_args, **_kwargs):
            return object.__new__(cls)

        def get_free_memory(self, _device):
            return free * self.model_size()

    monkeypatch.setattr(comfy_aimdo.host_buffer, "HostBuffer", lambda *_sizes: SimpleNamespace(size=0))
    monkeypatch.setattr(comfy.model_patcher, "ModelPatcherDynamic", Paged)
    hosts, weights = runs.patcher, runs.patcher.cached_patcher_init
    runs.patcher = Paged(hosts.model, hosts.load_device, hosts.offload_device)
    runs.patcher.cached_patcher_init = weights


@pytest.mark.parametrize(
    "free, samples, dtype, paged",
    {
        "much memory": (4, False, torch.float32, False),
        "little memory": (2, False, torch.float32, True),
        "a copy for another GPU": (4, True, torch.float32, True),
        "a file in another dtype": (4, False, torch.bfloat16, True),
    }.values(),
)
def test_a_trainers_model_is_kept_out_of_dynamic_vram_where_it_leaves_memory(flux, monkeypatch, free, samples, dtype, paged):
    under_dynamic_vram(flux, monkeypatch, free)
    monkeypatch.setattr(comfy.model_patcher.ModelPatcherDynamic, "model_dtype", lambda _patcher: dtype)
    compiled = flux.attach(flux.patcher)
    with torch.inference_mode(samples):
        again = compiled.clone(force_deepcopy=True)
    assert (again.is_dynamic(), compiled.is_dynamic(), compiled.clone().is_dynamic()) == (paged, True, True)


def test_a_model_that_dynamic_vram_would_page_trains_compiled(flux, monkeypatch, compiled_groups):
    expected = train(flux.attach(flux.patcher, backend="eager"), flux, False)
    compiled_groups.clear()
    under_dynamic_vram(flux, monkeypatch, free=4)
    compiled = flux.attach(flux.patcher, backend="eager")
    assert max(far(train(compiled, flux, False), expected)) < 1e-6
    check_groups(compiled_groups, 2)
    assert "Training: blocks run compiled, forwards and backwards." in flux.engine("host.model.attach").notes_about(compiled)


def test_only_the_last_training_is_told(flux):
    compiled = flux.attach(flux.patcher)
    (wrapper,) = compiled.get_wrappers("apply_model", "torch-compile-kit")
    training = flux.engine("host.model.training").TRAINING
    wrapper.notes.add(f"{training}blocks run uncompiled, since weights are offloaded.")
    train(compiled, flux, False, steps=1)
    found = [line for line in flux.engine("host.model.attach").notes_about(compiled) if line.startswith(training)]
    assert found == [f"{training}blocks run compiled, forwards and backwards."]


def test_a_copy_of_the_model_for_another_gpu_samples_compiled(flux):
    """ComfyUI's multi-GPU nodes load it again; what waits there for a trainer is not in the way."""
    compiled = flux.attach(flux.patcher)
    with torch.inference_mode():
        expected = flux.run(flux.patcher)
        again = compiled.clone(force_deepcopy=True)
        assert again.model is not flux.patcher.model
        flux.patcher = again
        assert torch.allclose(flux.run(again), expected, atol=1e-6)
    assert flux.graphs == 2 and not flux.failures
