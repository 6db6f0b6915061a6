"""Several compiled models and settings at once: nothing crosses, and no budget is shared."""

import threading

import pytest
import torch
from patching import Runs, patched, same
from patching import shares_code as fresh_dynamo  # noqa: F401

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


ONLY = "single_blocks.*"


@pytest.fixture
def flux(tiny, engine):
    return Runs(tiny, engine, "flux", cfg=1.0, only=ONLY)


@pytest.fixture
def second(tiny, engine):
    """A model of the same architecture with other weights."""
    runs = Runs(tiny, engine, "flux", cfg=1.0, only=ONLY)
    tiny._randomise(runs.patcher.model.diffusion_model, seed=99)
    return runs


def brighter(m):
    m.set_model_attn1_output_patch(lambda n, extra_options: n * 1.5)
    return m


def graphs_by_settings(runs, **settings):
    settings = runs.engine("settings").CompileSettings(backend="eager", only_blocks=ONLY, **settings)
    return runs.engine("messages.report").stats_for(runs.patcher.model.diffusion_model, settings).graphs


def test_two_models_in_turn(flux, second):
    expected, other = flux.run(flux.patcher), flux.run(second.patcher)
    assert not torch.allclose(expected, other, rtol=1e-3)
    first_compiled, second_compiled = flux.attach(flux.patcher), second.attach(second.patcher)
    for _ in range(2):
        same(flux.run(first_compiled), expected)
        same(flux.run(second_compiled), other)
    assert flux.graphs == 1, "one architecture shares its code"


def test_a_model_that_another_pack_calls_with_the_options_of_the_first_runs_as_without(flux, second):
    """As ComfyUI-bleh's refiner: the host knows of no run of it, which would end."""
    calls = []

    def refined(m):
        def refine(apply_model, given):
            calls.append(given)
            other = len(calls) % 2 == 0
            return (second.patcher.model.apply_model if other else apply_model)(given["input"], given["timestep"], **given["c"])

        m.set_model_unet_function_wrapper(refine)

    flux.steps = 4
    expected, network = flux.run(patched(flux.patcher, refined)), second.patcher.model.diffusion_model
    before = {module: dict(vars(module)) for module in network.modules()}
    compiled = flux.attach(flux.patcher)
    for _ in range(2):
        same(flux.run(patched(compiled, refined)), expected)
    assert flux.graphs and not second.groups
    assert {module: set(vars(module)) for module in network.modules()} == {m: set(v) for m, v in before.items()}


def test_two_architectures_in_turn(flux, tiny, engine):
    unet = Runs(tiny, engine, "sdxl")
    expected, other = flux.run(flux.patcher), unet.run(unet.patcher)
    compiled, compiled_unet = flux.attach(flux.patcher), unet.attach(unet.patcher)
    for _ in range(2):
        same(flux.run(compiled), expected)
        same(unet.run(compiled_unet), other)
    assert flux.graphs == 1


def test_two_nodes_in_series_the_last_one_wins(flux):
    series = flux.attach(flux.attach(flux.patcher, dynamic="true"), dynamic="false")
    same(flux.run(series), flux.run(flux.patcher))
    assert graphs_by_settings(flux, dynamic="false") == 1
    assert graphs_by_settings(flux, dynamic="true") == 0


def test_two_nodes_side_by_side_keep_their_own(flux, tiny):
    rigid = flux.attach(flux.patcher, dynamic="false", cache_limit=2)
    flexible = flux.attach(flux.patcher, dynamic="true")
    single = flux.attach(flux.patcher, only_blocks="single_blocks.0", dynamic="auto")
    for size in (32, 64, 96):
        flux.latent = tiny.empty_latent("flux", size, size)
        expected = flux.run(flux.patcher)
        for patcher in (rigid, flexible, single, rigid.clone()):
            same(flux.run(patcher), expected)
    assert graphs_by_settings(flux, dynamic="false", cache_limit=2) == 2
    assert graphs_by_settings(flux, dynamic="true") == 1
    reached = [group.settings.dynamic for group in flux.groups if group.code.limit_reached]
    assert reached == ["false"]


def test_the_limit_of_one_architecture_does_not_count_for_another(flux, tiny, engine):
    wide = Runs(tiny, engine, "z_image", cfg=1.0)
    for model, name in ((flux, "flux"), (wide, "z_image")):
        compiled = model.attach(model.patcher, dynamic="false", cache_limit=2)
        for size in (32, 64):
            model.latent = tiny.empty_latent(name, size, size)
            same(model.run(compiled), model.run(model.patcher))
    assert flux.graphs == 2 and not any(group.code.limit_reached for group in flux.groups)


def test_a_clone_with_and_one_without(flux):
    compiled, plain = flux.attach(flux.patcher), flux.patcher.clone()
    patched, compiled_patched = brighter(plain.clone()), brighter(compiled.clone())
    expected, expected_patched = flux.run(plain), flux.run(patched)
    assert flux.graphs == 0
    for _ in range(2):
        same(flux.run(compiled), expected)
        same(flux.run(compiled_patched), expected_patched)
        before = flux.graphs
        same(flux.run(plain), expected)
        same(flux.run(patched), expected_patched)
        assert flux.graphs == before
    assert flux.graphs == 3


def dual_guider(positive_model, negative_model, runs, cfg=3.0):
    from comfy_extras.nodes_custom_sampler import DualModelGuider

    return DualModelGuider.execute(positive_model, runs.positive, cfg, negative_model, runs.negative).result[0]


def guided(guider, runs, steps=2):
    import comfy.samplers

    noise = torch.randn(runs.latent.shape, generator=torch.Generator().manual_seed(1))
    sampling = runs.patcher.get_model_object("model_sampling")
    sigmas = comfy.samplers.calculate_sigmas(sampling, "simple", steps)
    sampler = comfy.samplers.sampler_object("euler")
    return guider.sample(noise, runs.latent, sampler, sigmas, disable_pbar=True, seed=1)


def test_a_guider_of_two_models(flux, second):
    """The host runs both with the options of the first, ours among them; the second model's weights are its own."""
    expected = guided(dual_guider(flux.patcher, second.patcher, flux), flux)
    swapped = guided(dual_guider(second.patcher, flux.patcher, flux), flux)
    patched = guided(dual_guider(brighter(flux.patcher.clone()), second.patcher, flux), flux)
    assert not torch.allclose(expected, patched, rtol=1e-3) and not torch.allclose(expected, swapped, rtol=1e-3)
    one, two = flux.attach(flux.patcher), second.attach(second.patcher)
    for _ in range(2):
        same(guided(dual_guider(one, two, flux), flux), expected)
        same(guided(dual_guider(two, one, flux), flux), swapped)
        same(guided(dual_guider(brighter(one.clone()), two, flux), flux), patched)
        same(guided(dual_guider(one, second.patcher, flux), flux), expected)
        same(guided(dual_guider(flux.patcher, two, flux), flux), expected)


def test_a_guiders_model_without_the_node_is_left_as_it_is(flux, second):
    """It may be bypassed; the host calls it with the first one's options."""
    expected = guided(dual_guider(flux.patcher, second.patcher, flux), flux)
    compiled = flux.attach(flux.patcher)
    for _ in range(2):
        same(guided(dual_guider(compiled, second.patcher, flux), flux), expected)
    assert (flux.graphs, second.graphs) == (1, 0)


def test_a_guiders_models_each_have_the_settings_of_their_own_node(flux, second, engine):
    first, other = flux.attach(flux.patcher), second.attach(second.patcher, dynamic="false")
    guided(dual_guider(first, other, flux), flux)
    for runs, dynamic in ((flux, "auto"), (second, "false")):
        (group,) = runs.groups
        assert group.settings.dynamic == dynamic


def test_wrappers_of_other_packs_get_the_models_own_method(flux):
    """They ask it for its model."""
    seen = []

    def wrapper(apply_model, given):
        seen.append((apply_model.__self__, apply_model.__name__, apply_model.__func__.__qualname__))
        return apply_model(given["input"], given["timestep"], **given["c"])

    compiled = flux.attach(flux.patcher)
    compiled.set_model_unet_function_wrapper(wrapper)
    same(flux.run(compiled), flux.plain())
    assert set(seen) == {(flux.patcher.model, "apply_model", "BaseModel.apply_model")} and flux.graphs == 1


@pytest.mark.parametrize("mode", ["in background", "before first image"])
def test_a_call_that_has_the_options_by_position(flux, engine, mode):
    """Of code that calls the model itself, as a wrapper of its function may."""

    def by_position(_apply_model, call):
        c = dict(call["c"])
        options, context = {**c.pop("transformer_options"), "wrappers": {}}, c.pop("c_crossattn")
        return flux.patcher.model.apply_model(call["input"], call["timestep"], None, context, None, options, **c)

    compiled = flux.attach(flux.patcher, compile_when=mode)
    compiled.set_model_unet_function_wrapper(by_position)
    for _ in range(2):
        same(flux.run(compiled), flux.plain())
        assert engine("background.thread").compiler.wait(100)
    assert flux.graphs == 1 and not flux.failures


def test_the_second_model_of_a_guider_alone(flux, second):
    """Its wrapper is brought to the calls that the host makes with the first one's options, for that run."""
    expected = guided(dual_guider(flux.patcher, second.patcher, flux), flux)
    compiled = second.attach(second.patcher)
    for _ in range(2):
        same(guided(dual_guider(flux.patcher, compiled, flux), flux), expected)
    assert second.graphs == 1 and flux.graphs == 0
    assert not any("apply_model" in runs.patcher.model.__dict__ for runs in (flux, second))
    alone = guided(dual_guider(flux.patcher, flux.attach(flux.patcher), flux), flux)
    same(alone, guided(dual_guider(flux.patcher, flux.patcher, flux), flux))
    assert flux.graphs == 0, "one model for both: the first one's options say how it runs"


def test_what_another_pack_has_put_over_the_models_method_is_called_and_stays(flux):
    base_model, calls = flux.patcher.model, []

    def counted(*args, **kwargs):
        calls.append(1)
        return type(base_model).apply_model(base_model, *args, **kwargs)

    base_model.__dict__["apply_model"] = counted
    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    assert len(calls) == flux.steps and flux.graphs == 1 and base_model.__dict__.pop("apply_model") is counted


def test_worker_threads_as_for_several_gpus(own_code, flux, second, engine):
    """comfy/samplers.py runs each device's conditions in a thread under no_grad; a prompt runs under inference_mode."""
    import comfy.samplers

    def apply(patcher, seed):
        model = patcher.model
        x = torch.randn(flux.latent.shape, generator=torch.Generator().manual_seed(seed))
        text, options = flux.positive[0]
        conds = {"pooled_output": options["pooled_output"], "cross_attn": text, "guidance": 3.5}
        extra = {k: v.cond for k, v in model.extra_conds(**conds, noise=x, device=x.device).items()}
        transformer_options = dict(patcher.model_options["transformer_options"])
        transformer_options["wrappers"] = comfy.patcher_extension.copy_nested_dicts(patcher.wrappers)
        return model.apply_model(x, torch.full((1,), 0.5), c_crossattn=extra.pop("c_crossattn"), **extra,
                                 transformer_options=transformer_options)  # fmt: skip

    expected = {seed: (apply(flux.patcher, seed), apply(second.patcher, seed)) for seed in range(4)}
    compiled = flux.attach(flux.patcher), second.attach(second.patcher)
    results, errors = {}, []

    def work(index, mode):
        try:
            with mode():
                for seed in range(4):
                    results[index, seed] = apply(compiled[index], seed)
        except Exception as error:
            errors.append(error)

    for modes in ((torch.no_grad, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        results.clear()
        threads = [threading.Thread(target=work, args=(i, mode)) for i, mode in enumerate(modes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for (index, seed), result in results.items():
            same(result, expected[seed][index])
    assert 1 <= flux.graphs <= 2
    assert not any("forward" in module.__dict__ for m in (flux, second) for module in m.patcher.model.modules())


def test_a_split_over_devices_by_the_host(flux, tiny):
    """The host's own multi-GPU path; two names of the processor stand for two devices."""
    flux.cfg = 3.0

    def split(patcher):
        copy = tiny.build_patcher("flux", torch.device("cpu", 0))
        copy.is_multigpu_base_clone = True
        patcher = patcher.clone()
        patcher.set_additional_models("multigpu", [copy])
        threads = set()
        copy.model.diffusion_model.img_in.register_forward_hook(lambda *_: threads.add(threading.current_thread()))
        result = flux.run(patcher)
        assert threads and threading.main_thread() not in threads, "the host did not split the work"
        return result, copy

    expected, _ = split(flux.patcher)
    result, copy = split(flux.attach(flux.patcher))
    same(result, expected)
    groups = flux.engine("compile.registry").code_of(copy.model.diffusion_model).groups.values()
    assert sum(group.stats.graphs for group in groups) and not any(group.failure for group in groups)


@pytest.mark.parametrize("compile_when", ["in background", "before first image"])
def test_a_warmup_waits_for_code_under_a_split(flux, tiny, compile_when):
    """The host calls both models on threads of its own."""
    flux.cfg = 3.0
    copy = tiny.build_patcher("flux", torch.device("cpu", 0))
    copy.is_multigpu_base_clone = True
    compiled = flux.attach(flux.patcher, compile_when=compile_when)
    compiled.set_additional_models("multigpu", [copy])
    watch = flux.engine("messages.recompile_log").watch_of(flux.patcher.model.diffusion_model)
    size = flux.engine("host.nodes.warmup_plan").Size(64, 64)
    flux.engine("host.nodes.warmup").warm_up(compiled, flux.positive, flux.negative, flux.cfg, [size])
    assert flux.graphs and watch.warmed and not watch.notices
    for model in (flux.patcher.model, copy.model):
        assert flux.engine("compile.registry").code_of(model.diffusion_model).eager_calls == 0


@pytest.mark.parametrize("compile_when", ["in background", "before first image"])
def test_a_step_that_is_split_is_one_step(flux, tiny, compile_when):
    """The sampler's thread only waits for the threads of the devices."""
    flux.cfg, flux.steps = 3.0, 8
    settings = flux.engine("settings").CompileSettings
    copy = tiny.build_patcher("flux", torch.device("cpu", 0))
    copy.is_multigpu_base_clone = True
    node = flux.engine("host.model.attach").attach
    compiled = node(flux.patcher, settings(backend="eager", compile_when=compile_when), f"split {compile_when}")
    compiled.set_additional_models("multigpu", [copy])
    for _ in range(2):
        flux.run(compiled)
        assert flux.engine("background.thread").compiler.wait(100)
    lines = flux.engine("messages.status").lines.values()
    (steps,) = next(line for line in lines if line.node == f"split {compile_when}")._steps.values()
    timed = flux.steps - 2  # of a run at most: the first loads weights, and nothing tells when the last is over
    assert timed <= len(steps.uncompiled) + len(steps.fast) <= 2 * timed


def test_steps_that_compute_more_are_not_compared(flux):
    """A negative prompt of another length is a call of its own with the same latent; without CFG there is none."""
    flux.steps = 4
    compiled = flux.engine("host.model.attach").attach(
        flux.patcher, flux.engine("settings").CompileSettings(backend="eager"), "cfg"
    )
    tokens, values = flux.negative[0]
    flux.negative = [[torch.cat([tokens, tokens[:, :3]], 1), values]]
    (steps,) = [line._steps for line in flux.engine("messages.status").lines.values() if line.node == "cfg"]
    for flux.cfg in (3.0, 1.0, 3.0):
        flux.run(compiled)
        assert flux.engine("background.thread").compiler.wait(100)
    assert sorted(len(kind) for kind in steps) == [1, 2]
    flux.positive = flux.negative
    flux.cfg = 1.0
    flux.run(compiled)
    assert sorted(len(kind) for kind in steps) == [1, 1, 2], "a longer prompt takes longer too"


def test_a_compiled_model_inside_hooks(flux, second):
    """One conditioning runs under a LoRA hook, the other without, in both models in turn."""
    import comfy.hooks

    weights = {
        "diffusion_model.single_blocks.0.linear1.lora_A.weight": torch.randn(4, 256) / 4,
        "diffusion_model.single_blocks.0.linear1.lora_B.weight": torch.randn(256 * 7, 4) / 4,
    }

    def hooked():
        group = comfy.hooks.create_hook_lora(weights, 1.0, 0.0)
        return comfy.hooks.set_hooks_for_conditioning(flux.positive, group) + flux.negative

    for runs in (flux, second):
        expected = runs.run(runs.patcher, hooked())
        assert not torch.allclose(expected, runs.run(runs.patcher, flux.positive + flux.negative), rtol=1e-3)
        compiled = runs.attach(runs.patcher)
        for _ in range(2):
            same(runs.run(compiled, hooked()), expected)
    assert flux.graphs <= 2
