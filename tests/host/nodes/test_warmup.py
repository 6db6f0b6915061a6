"""What a warmup covers. The backend traces only: graphs are counted, not timed."""

import types

import pytest
import torch
import zoo
from patch_kinds.conditions import controlnet, with_options
from patch_kinds.weights import lora_file, scheduled_lora
from patching import Runs, same
from sampling import sample
from support import compile_settings

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


class Warming(Runs):
    """A model behind the node, and the reports of its warmups."""

    def __init__(self, tiny, engine, name="flux", cfg=1.0, **settings):
        super().__init__(tiny, engine, name, cfg=cfg)
        # One kind of block is enough where it is what a warmup looks at.
        self.chosen = {"only_blocks": "single_blocks.*"} if name == "flux" else {}
        self.compiled = self.attach(self.patcher, **{**self.chosen, **settings})

    def warm(self, *sizes, patcher=None, positive=None, negative=None, cfg=None, latent=None):
        sizes = [self.engine("host.nodes.warmup_plan").Size(*size) for size in sizes or [(64, 64)]]
        conditioning = positive or self.positive, negative or self.negative
        return self.engine("host.nodes.warmup").warm_up(patcher or self.compiled, *conditioning, cfg or self.cfg, sizes, latent)

    def sampled(self, width=64, height=64, length=1, batch=1, positive=None, negative=None, cfg=None, patcher=None, **how):
        """Graphs that a run adds."""
        before = self.graphs
        latent = self.tiny.empty_latent(self.name, width, height, length, batch)
        conditioning = positive or self.positive, negative or self.negative
        sample(patcher or self.compiled, conditioning, latent, cfg or self.cfg, 3, **{"steps": 4, **how})
        return self.graphs - before

    def prompts(self, positive, negative):
        """Conditioning of these lengths, in tokens."""
        return {
            "positive": self.tiny.conditioning(self.name, positive)[0],
            "negative": self.tiny.conditioning(self.name, negative)[1],
        }


@pytest.fixture
def warming(tiny, engine):
    return lambda *args, **kwargs: Warming(tiny, engine, *args, **kwargs)


def model_calls(patcher):
    """The calls that a network gets from now on."""
    calls = []
    patcher.model.diffusion_model.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.fixture
def dynamic(monkeypatch, tiny):
    """dynamic(runs): the host samples another model in place of this one if the prompts have hooks, as with dynamic VRAM."""
    import comfy.model_patcher

    def make(runs):
        other, kind = tiny.build_patcher(runs.name), comfy.model_patcher.ModelPatcher
        dynamic = runs.patcher.model
        monkeypatch.setattr(kind, "is_dynamic", lambda patcher: patcher.model is dynamic)

        def instead(patcher):
            patcher.non_dynamic_delegate_model = other.get_clone_model_override()
            return patcher.clone(model_override=patcher.non_dynamic_delegate_model)

        monkeypatch.setattr(kind, "get_non_dynamic_delegate", instead, raising=False)

    return make


def test_prompts_with_lora_hooks_are_warmed_measured_and_saved_with_the_model_that_is_sampled(
    warming, dynamic, engine, monkeypatch
):
    runs = warming()
    dynamic(runs)
    positive, size = scheduled_lora(runs), engine("host.nodes.warmup_plan").Size(64, 64)
    report = runs.warm(positive=positive)
    assert "1 graph compiled" in report, report
    measured = engine("host.nodes.benchmark").benchmark(runs.compiled, positive, runs.negative, size, 1.0, 2)
    assert "Nothing was compiled" not in measured.table()
    files, saved = engine("host.nodes.cache_files"), []
    settings = engine("host.model.attach").settings_for(runs.compiled, "")
    monkeypatch.setattr(files, "_settings_to_save", lambda _patcher: settings)
    monkeypatch.setattr(files, "_write", lambda _name, models, _infos: saved.extend(models))
    files.save_cache(runs.compiled, "mine")
    ((_title, _network, groups),) = saved
    assert sum(group.stats.graphs for group in groups) == 1


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_a_warm_size_takes_two_steps_and_compiles_nothing(warming, cfg):
    runs = warming(cfg=cfg)
    calls = model_calls(runs.patcher)
    first = runs.warm((64, 64), (96, 64, 1, 2))
    assert calls and "Memory since the start: up to " in first
    graphs = runs.graphs
    calls.clear()
    assert "Nothing had to be compiled." in runs.warm((64, 64), (96, 64, 1, 2))
    assert len(calls) == 2 * 2 and runs.graphs == graphs


@pytest.mark.parametrize("mode", ["default", pytest.param("max-autotune-no-cudagraphs", marks=pytest.mark.rest)])
def test_a_warm_unet_compiles_nothing(warming, engine, mode):
    """By default the transformers inside SD 1.5's blocks are compiled, with more tuning whole blocks."""
    setup, runs = zoo.SETUPS["sd15"], warming("sdxl")
    runs.patcher, (runs.positive, runs.negative) = setup.patcher(), setup.conds()
    settings = compile_settings(
        engine, mode=mode, compile_when="before first image"
    )  # inductor would tune twelve kinds, for minutes
    runs.compiled = engine("host.model.attach").attach(runs.patcher, settings)
    runs.warm((128, 128))
    assert "Nothing had to be compiled." in runs.warm((128, 128))
    assert runs.sampled(128, 128) == 0


def test_still_warm_when_unloaded_and_loaded_again_and_behind_a_new_node(warming):
    import comfy.model_management

    runs = warming(cfg=4.0)
    runs.warm()
    comfy.model_management.unload_all_models()
    again = runs.attach(runs.patcher, **runs.chosen)  # the node was executed anew
    assert "Nothing had to be compiled." in runs.warm(patcher=again)
    assert runs.sampled(patcher=again) == 0 and runs.sampled(cfg=1.0) == 0


def output_patch(out, _options):
    return out * 0.5


def changed(runs, tiny, change):
    """The patcher and the inputs of a warmup that is not like the one before."""
    model, inputs = runs.compiled.clone(), {}
    if change == "patch":
        model.set_model_attn1_output_patch(output_patch)
    elif change == "object":
        blocks = runs.patcher.model.diffusion_model.single_blocks
        model.add_object_patch("diffusion_model.single_blocks.0", blocks[1])
    elif change == "settings":
        model = runs.attach(runs.patcher, dynamic="true", **runs.chosen)
    elif change == "prompt":
        inputs["positive"] = tiny.conditioning("flux", 40)[0]
    elif change == "input":
        inputs["positive"] = with_options(runs.positive, reference_latents=[torch.zeros(1, 16, 8, 8)])
    elif change == "cfg":
        inputs["cfg"] = 3.0
    elif change == "block":
        block = runs.patcher.model.diffusion_model.single_blocks[0]
        block.mlp_act = torch.nn.ReLU()
    elif change == "reset":
        torch._dynamo.reset()
        assert runs.sampled(96) > 0  # as much code as before, but not that
    elif change == "wrapper":
        from comfy.patcher_extension import WrappersMP

        model.add_wrapper_with_key(
            WrappersMP.DIFFUSION_MODEL, "other", lambda executor, *args, **kwargs: executor(*args, **kwargs)
        )
    return model, inputs


# The last two stay; the others are of a clone.
CHANGES = ["patch", "object", "settings", "prompt", "input", "cfg", "wrapper", "block", "reset"]


def test_a_change_leaves_nothing_to_compile(warming, tiny):
    runs = warming()
    runs.warm()
    for change in CHANGES:
        model, inputs = changed(runs, tiny, change)
        runs.warm(patcher=model, **inputs)
        assert runs.sampled(patcher=model, **inputs) == 0, change


@pytest.mark.parametrize(
    ("name", "batch", "dynamic"),
    [
        ("flux", 2, "auto"),
        pytest.param("sdxl", 1, "auto", marks=pytest.mark.rest),
        *(
            pytest.param(*case, marks=pytest.mark.rest)
            for case in [("flux", 1, "auto"), ("flux", 1, "true"), ("flux", 1, "false"), ("wan", 1, "false")]
        ),
    ],
)
def test_prompt_and_negative_apart_when_memory_is_short(warming, name, batch, dynamic, monkeypatch):
    runs = warming(name, cfg=4.0, dynamic=dynamic)
    length = 5 if name == "wan" else 1
    runs.warm((64, 64, length, batch), (96, 64, length, batch))
    sizes = [{"width": width, "length": length, "batch": batch} for width in (64, 96)]
    assert [runs.sampled(**size) for size in sizes] == [0, 0]
    seen = []
    runs.patcher.model.diffusion_model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    # So large a need that no memory holds two prompts at once: the host's sampler then runs them one by one.
    monkeypatch.setattr(runs.patcher.model, "memory_required", lambda *_args, **_kwargs: 1 << 60)
    assert [runs.sampled(**size) for size in sizes] == [0, 0]
    assert set(seen) == {batch}


@pytest.mark.parametrize(
    "name", ["flux", *(pytest.param(n, marks=pytest.mark.rest) for n in ("sdxl", "qwen_image", "wan", "sd3", "z_image"))]
)
def test_prompts_of_any_length_in_auto(warming, name):
    runs = warming(name, cfg=4.0)
    length = 5 if name == "wan" else 1
    runs.warm((64, 64, length))
    lengths = ((5, 5), (400, 400), (24, 100), (154, 77))
    assert [runs.sampled(length=length, **runs.prompts(*pair)) for pair in lengths] == [0] * len(lengths)
    assert [runs.sampled(length=length, cfg=1.0, **runs.prompts(*pair)) for pair in lengths] == [0] * len(lengths)


def test_a_length_that_needs_code_of_its_own_is_warmed(warming):
    runs = warming(only_blocks="double_blocks.*")
    layer = runs.patcher.model.diffusion_model.double_blocks[0].txt_attn.proj

    def above_a_hundred_tokens(x):
        return type(layer).forward(layer, x) * (0.5 if x.shape[1] > 100 else 1.0)

    model = runs.compiled.clone()
    model.add_object_patch("diffusion_model.double_blocks.0.txt_attn.proj.forward", above_a_hundred_tokens)
    graphs = []
    for length in (30, 300, 31):
        runs.warm(patcher=model, **runs.prompts(length, 7))
        graphs.append(runs.graphs)
    assert graphs[0] < graphs[1] == graphs[2]


def test_each_length_is_run_where_shapes_are_constants(warming):
    runs = warming(dynamic="false")
    for length in (30, 40, 50):
        prompts = runs.prompts(length, 7)
        if length == 40:
            assert runs.sampled(**prompts) > 0, "an image has compiled it before"
        runs.warm(**prompts)
        assert runs.sampled(**prompts) == 0


def test_unequal_prompts_are_warmed_as_the_sampler_runs_them(warming):
    runs = warming("qwen_image", cfg=4.0, dynamic="false")
    prompts = runs.prompts(30, 7)
    runs.warm(**prompts)
    assert runs.sampled(**prompts) == 0


def test_ranges_of_the_schedule_are_all_run(warming, engine, tiny):
    runs = warming(cfg=3.0, dynamic="false")
    other = tiny.conditioning("flux", 77)[0]
    scheduled = with_options(runs.positive, start_percent=0.0, end_percent=0.3)
    scheduled += with_options(other, start_percent=0.3, end_percent=0.8) + with_options(other, start_percent=0.75)
    control = controlnet(tiny, "flux", 1)
    control.set_cond_hint(torch.zeros(1, 3, 64, 64), 0.8, (0.5, 0.6))
    scheduled += with_options(runs.positive, control=control, start_percent=0.9)
    assert engine("host.nodes.sampling").ranges_of((scheduled, runs.negative)) == 7
    runs.warm(positive=scheduled)
    assert runs.sampled(positive=scheduled, steps=30) == 0


@pytest.mark.parametrize("name", [pytest.param("flux", marks=pytest.mark.rest), "sdxl"])
def test_a_controlnet_and_a_lora_in_the_graph(warming, tiny, name):
    import comfy.sd

    runs = warming(name, cfg=3.0)
    control = controlnet(tiny, name, 1)

    def hinted(brightness):
        """As Apply ControlNet hands both on."""
        applied = control.copy().set_cond_hint(torch.full((1, 3, 64, 64), brightness), 0.8)
        return {
            "positive": with_options(runs.positive, control=applied),
            "negative": with_options(runs.negative, control=applied),
        }

    layers = ("linear1", "img_attn.qkv", "attn1.to_q")
    model = comfy.sd.load_lora_for_models(runs.compiled, None, lora_file(runs.patcher, layers=layers), 1.0, 0)[0]
    runs.warm(patcher=model, **hinted(0.2))
    assert runs.sampled(patcher=model, **hinted(0.9)) == 0
    assert runs.sampled(patcher=model) == 0 and runs.sampled(**hinted(0.5)) == 0
    assert "Nothing had to be compiled." in runs.warm(patcher=model, **hinted(0.7))


def test_a_mask_on_the_latent_is_warmed_too(warming, tiny):
    runs = warming()
    masked = {"samples": tiny.empty_latent("flux"), "noise_mask": torch.ones(1, 1, 64, 64)}
    assert "(latent_image)" in runs.warm(latent=masked)
    assert runs.sampled() == 0


def test_a_latent_of_video_and_sound_is_warmed(warming, engine):
    setup, runs = zoo.SETUPS["ltxav"], warming()
    runs.patcher, (runs.positive, runs.negative) = setup.patcher(), setup.conds()
    runs.compiled = engine("host.model.attach").attach(runs.patcher, compile_settings(engine))
    calls = model_calls(runs.patcher)
    for size in range(2):
        assert "batch 1 (latent_image)" in runs.warm(latent={"samples": setup.latent(size)}) and calls, "another size"
        assert "Nothing had to be compiled." in runs.warm(latent={"samples": setup.latent(size)})
        calls.clear()


def test_a_size_between_two_latents_is_named_by_what_is_sampled(warming):
    runs = warming()
    runs.warm()
    report = runs.warm((65, 69))
    assert "64x64 batch 1 (rounded from 65x69): " in report and "Nothing had to be compiled." in report
    assert "64x64x5 batch 1 (rounded from 64x64x7): " in warming("wan").warm((64, 64, 7))


def test_latents_are_made_one_by_one_after_all_sizes_were_looked_at(warming, engine, monkeypatch):
    runs, heights = warming(), []
    zeros = torch.zeros

    def noted(*shape, **kwargs):
        if shape[0][:-2] == [1, 16]:
            heights.append(8 * shape[0][-2])
        return zeros(*shape, **kwargs)

    monkeypatch.setattr(engine("host.nodes.sampling").torch, "zeros", noted)
    calls = []
    runs.patcher.model.diffusion_model.register_forward_pre_hook(lambda *_: calls.append(list(heights)))
    with pytest.raises(engine("errors").InvalidSetting, match="extra_sizes = '4x64': too small"):
        runs.warm((64, 64), (96, 64), (4, 64))
    with pytest.raises(engine("errors").InvalidSetting, match=r"extra_sizes = '64x96x9': .* not video; write 64x96\."):
        runs.warm((64, 64), (64, 96, 9))
    with pytest.raises(engine("errors").InvalidSetting, match=r"length = 9: .* not video; set length to 1\."):
        runs.warm((64, 96, 9))
    assert not calls and not heights
    runs.warm(*((64, 64 * n) for n in (1, 2, 3)))
    assert [seen for seen, before in zip(calls, [None, *calls], strict=False) if seen != before] == [
        [64],
        [64, 128],
        [64, 128, 192],
    ]


def test_a_latent_larger_than_memory_is_refused_before_it_is_made(warming, engine):
    with pytest.raises(engine("errors").InvalidSetting, match=r"16384x16384 batch 4096.*GiB"):
        warming().warm((64, 64), (16384, 16384, 1, 4096))


def test_a_stopped_warmup_leaves_a_model_that_samples_as_ever(warming, engine):
    import comfy.model_management

    runs = warming(cfg=4.0)
    expected = runs.run(runs.patcher)
    monitor = engine("compile.session").monitor
    compiled = []

    def press_cancel(args):
        compiled.append(args)
        comfy.model_management.interrupt_current_processing()

    callbacks = engine("torch_compat.private").callback_handler
    callbacks.register_start_callback(press_cancel)
    try:
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            runs.warm((64, 64), (96, 64))
    finally:
        callbacks.remove_start_callback(press_cancel)
    assert len(compiled) == 1 == runs.graphs
    assert not monitor.calls and monitor.listener is None and not engine("messages.recompile_log").is_warming()
    same(runs.run(runs.compiled), expected)
    runs.warm((64, 64), (96, 64))
    assert runs.sampled() == 0 == runs.sampled(width=96)


def test_seconds_in_the_node_are_those_of_the_size_at_work_and_at_the_end_those_of_all(engine, monkeypatch):
    progress_of, clock, lines = engine("host.nodes.progress"), [0.0], []
    monkeypatch.setattr(progress_of, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(progress_of, "tell_page", lambda _owner, _node, text: lines.append(text))
    progress = progress_of.WarmupProgress(2, 4, 1, False, "7")
    progress.begin("64x64", 0)
    clock[0] = 50.0
    progress.begin("96x64", 1)
    clock[0] = 54.0
    progress._tell()
    progress.__exit__(None, None, None)
    assert lines[1:] == [
        "96x64 (2 of 2): loading the model, 0 s",
        "96x64 (2 of 2): loading the model, 4 s",
        "Warm: nothing to compile, 54 s",
    ]


def test_an_extra_size_of_a_video_with_sound_has_sound(engine, tiny):
    """Without sound LTX-2's blocks run other code (comfy/ldm/lightricks/av_model.py)."""
    from comfy.nested_tensor import NestedTensor

    patcher, size = tiny.build_patcher("wan"), engine("host.nodes.warmup_plan").Size(64, 64, 9, 2)
    labelled = engine("host.nodes.sampling").labelled_latent
    video = labelled(patcher, size)[1]["samples"]
    like = {"samples": NestedTensor([torch.zeros(1, *video.shape[1:]), torch.ones(1, 8, 5, 4)])}
    parts = labelled(patcher, size, None, like)[1]["samples"].unbind()
    assert [part.shape for part in parts] == [video.shape, (2, 8, 5, 4)] and not any(part.any() for part in parts)
    assert labelled(patcher, size, None, {"samples": video})[1]["samples"].shape == video.shape
