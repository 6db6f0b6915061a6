"""What compiling leaves alone: keys, files, PyTorch's settings, the random state, memory; and what it keeps."""

import gc
import re
import weakref

import pytest
import torch
from patching import Runs
from patching import shares_code as fresh_dynamo  # noqa: F401
from sampling import sample
from support import torch_settings

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def flux(tiny, engine):
    return Runs(tiny, engine, "flux", cfg=1.0).patcher


@pytest.fixture
def conditioning(tiny):
    return tiny.conditioning("flux")


@pytest.fixture
def latent(tiny):
    return tiny.empty_latent("flux")


@pytest.fixture
def attach(engine):
    """attach(patcher, **settings): the patcher as the node returns it. The default backend traces only."""
    return lambda patcher, **chosen: engine("host.model.attach").attach(
        patcher, engine("settings").CompileSettings(**{"backend": "eager", "compile_when": "before first image", **chosen})
    )


@pytest.fixture
def graphs(engine):
    """graphs(patcher): all graphs compiled for its model so far."""

    def count(patcher):
        model = engine("host.model.attach").diffusion_model(patcher)
        return sum(group.stats.graphs for group in engine("compile.registry").code_of(model).groups.values())

    return count


def keys_of(model):
    return list(model.state_dict()), [(name, type(module)) for name, module in model.named_modules()]


def test_keys_are_the_same_before_inside_and_after(flux, attach, conditioning, latent):
    seen = []
    block = flux.model.diffusion_model.single_blocks[1]
    hook = block.register_forward_pre_hook(lambda *_: seen.append(keys_of(flux.model)))
    before = keys_of(flux.model)
    sample(attach(flux), conditioning, latent, 1.0, seed=1)
    hook.remove()
    assert seen and all(keys == before for keys in seen)
    assert keys_of(flux.model) == before
    assert not any("forward" in module.__dict__ for module in flux.model.modules())


def test_a_model_saved_from_a_compiled_graph_loads_again(attach, model_files, conditioning, latent, tmp_path):
    import comfy.sd
    import comfy_extras.nodes_model_merging as merging

    patcher = comfy.sd.load_diffusion_model(str(model_files["flux"]))
    compiled = attach(patcher)
    expected = sample(compiled, conditioning, latent, 1.0, seed=1)
    merging.ModelSave().output_dir = str(tmp_path)
    saver = merging.ModelSave()
    saver.output_dir = str(tmp_path)
    saver.save(compiled, "saved")
    (file,) = tmp_path.glob("*.safetensors")
    again = comfy.sd.load_diffusion_model(str(file))
    assert torch.equal(sample(again, conditioning, latent, 1.0, seed=1), expected)


def test_torch_settings_are_as_found(flux, attach, conditioning, latent):
    before = torch_settings()
    compiled = attach(flux, allow_tf32=True, cudnn_benchmark=True)
    sample(compiled, conditioning, latent, 1.0, seed=1)
    assert torch_settings() == before

    def fail(*_):
        raise KeyError("inside a block")

    hook = flux.model.diffusion_model.single_blocks[1].register_forward_hook(fail)
    with pytest.raises(KeyError):
        sample(compiled, conditioning, latent, 1.0, seed=1)
    hook.remove()
    assert torch_settings() == before
    assert not any("forward" in module.__dict__ for module in flux.model.modules())


def test_the_warmup_leaves_the_random_state(flux, attach, engine, conditioning, latent):
    compiled, size = attach(flux), engine("host.nodes.warmup_plan").Size(64, 64)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine("host.nodes.warmup").warm_up(compiled, *conditioning, 1.0, [size])
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "backend", "cfg"),
    [("flux", "aot_eager", 1.0), pytest.param("flux", "inductor", 1.0, marks=pytest.mark.rest)],
)
def test_the_same_seed_gives_the_same_image_with_and_without_warmup(tiny, engine, name, backend, cfg):
    import comfy.model_management

    chosen = {"backend": backend, "compile_when": "before first image", "only_blocks": "single_blocks.*"}  # one kind is enough
    settings = engine("settings").CompileSettings(**chosen)
    attach, free_all = engine("host.model.attach").attach, comfy.model_management.unload_all_models
    first = attach(tiny.build_patcher(name), settings)
    prompts, empty = tiny.conditioning(name), tiny.empty_latent(name)
    without = sample(first, prompts, empty, cfg, 7, sampler="euler_ancestral")
    # Two models of one structure share code while both live; the second is to compile in its warmup.
    free_all()
    del first
    gc.collect()
    second = attach(tiny.build_patcher(name), settings)
    size = engine("host.nodes.warmup_plan").Size(64, 64)
    assert re.search(r"\d graphs? compiled", engine("host.nodes.warmup").warm_up(second, *prompts, cfg, [size]))
    assert torch.equal(without, sample(second, prompts, empty, cfg, 7, sampler="euler_ancestral"))


def test_deleting_the_model_frees_it(own_code, tiny, attach, engine, conditioning, latent):
    import comfy.model_management

    patcher = tiny.build_patcher("flux")
    compiled = attach(patcher)
    sample(compiled, conditioning, latent, 1.0, seed=1)
    model = weakref.ref(patcher.model)
    network = weakref.ref(patcher.model.diffusion_model)
    groups = [weakref.ref(k) for k in engine("compile.registry").code_of(network()).groups.values()]
    comfy.model_management.unload_all_models()
    gc.collect()
    gc.disable()
    try:
        del patcher, compiled
        assert model() is None and network() is None
        engine("compile.registry")._recent.clear()  # the next model of the structure would have used them
        assert all(group() is None for group in groups)
    finally:
        gc.enable()


def test_executing_again_and_changes_downstream_add_nothing(flux, attach, graphs, conditioning, latent):
    sample(attach(flux), conditioning, latent, 1.0, seed=1)
    once = graphs(flux)
    sample(attach(flux), conditioning, latent, 1.0, seed=2)
    downstream = attach(flux).clone()
    downstream.set_model_sampler_cfg_function(lambda args: args["cond"])
    sample(downstream, conditioning, latent, 1.0, seed=3)
    assert once == 2 and graphs(flux) == once


def test_backend_none_passes_the_model_through(flux, attach):
    assert attach(flux, backend="none") is flux


def test_only_blocks_compiles_only_those(flux, attach, engine, conditioning, latent):
    compiled = attach(flux, only_blocks="single_blocks.*")
    expected = sample(flux, conditioning, latent, 1.0, seed=1)
    assert torch.equal(sample(compiled, conditioning, latent, 1.0, seed=1), expected)
    names = {k.class_name for k in engine("compile.registry").code_of(flux.model.diffusion_model).groups.values()}
    assert names == {"SingleStreamBlock"}


def test_only_blocks_of_a_model_that_cannot_be_searched_ends_no_prompt(flux, attach, engine, conditioning, latent, monkeypatch):
    expected = sample(flux, conditioning, latent, 1.0, seed=1)
    monkeypatch.setattr(engine("compile.binding"), "_searches", lambda _model: 1 / 0)
    compiled = attach(flux, only_blocks="single_blocks.*")
    assert torch.equal(sample(compiled, conditioning, latent, 1.0, seed=1), expected)


def test_a_size_the_model_cannot_take_is_named(flux, attach, engine, conditioning):
    sizes = engine("host.nodes.warmup_plan").Size
    invalid = engine("errors").InvalidSetting
    with pytest.raises(invalid, match=r"width = 4: too small"):
        engine("host.nodes.warmup").warm_up(attach(flux), *conditioning, 1.0, [sizes(4, 64)])
    with pytest.raises(invalid, match=r"length = 9: this model makes images"):
        engine("host.nodes.warmup").warm_up(attach(flux), *conditioning, 1.0, [sizes(64, 64, 9)])


def test_a_warmup_without_a_compiled_model_says_so(flux, engine, conditioning):
    report = engine("host.nodes.warmup").warm_up(flux, *conditioning, 1.0, [engine("host.nodes.warmup_plan").Size(64, 64)])
    assert "put Torch Compile" in report
