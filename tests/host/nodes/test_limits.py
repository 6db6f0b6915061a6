"""What limits a workflow, as the benchmark says it: the parts of a prompt's time, whose they are, and what to do."""

import re
import tempfile

import pytest
import torch
from patching import Runs
from patching import shares_code as fresh_dynamo  # noqa: F401

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
LINE = re.compile(r"[\d.]+ m?s \((\d+)%\): (.+)")


class Limited(Runs):
    """A tiny model behind Torch Compile, and what its benchmark says."""

    def __init__(self, tiny, engine, name="flux", **settings):
        super().__init__(tiny, engine, name, cfg=1.0)
        self.compiled = self.attach(self.patcher, **settings)

    def limits(self, steps=3, **options):
        size = self.engine("host.nodes.warmup_plan").Size(64, 64)
        run = self.engine("host.nodes.benchmark").benchmark
        return run(self.compiled, self.positive, self.negative, size, self.cfg, steps, **options).limits

    def said(self, seconds, steps=10, skipped=0, on_gpu=True, **profile):
        """What is said of a step that was profiled so, of a model as it has run."""
        limits, span = self.engine("host.nodes.limits"), sum(seconds.values())
        found = self.engine("benchmark.step_profile").StepProfile(span, seconds, on_gpu=on_gpu, **profile)
        settings = self.engine("host.model.attach").attached_settings(self.compiled)
        described = self.compiled, settings, found
        parts = limits.parts_of_model(*described, span, steps - skipped)
        return limits.limits(parts, limits.sentences_about_model(*described, steps, skipped), span * (steps - skipped), steps)


@pytest.fixture
def limited(tiny, engine):
    return lambda *args, **settings: Limited(tiny, engine, *args, **settings)


def parts(lines):
    """(percent, sentence) of the lines with a time."""
    return [(int(match[1]), match[2]) for line in lines if (match := LINE.fullmatch(line))]


class Decoder:
    """A VAE that takes the model's memory, and one that cannot decode such latents."""

    def __init__(self, works, runs):
        self.works, self.runs = works, runs

    def decode(self, _latent):
        self.runs.compiled.loaded_size = lambda: 0
        if not self.works:
            raise RuntimeError("a latent of another model")


@pytest.mark.parametrize("works", [True, False])
def test_a_vae_neither_changes_what_is_said_of_the_model_nor_ends_the_benchmark(limited, engine, monkeypatch, works):
    nodes, loaded = engine("host.nodes.benchmark"), []
    runs, parts_of_model = limited(backend="eager"), nodes.parts_of_model

    def parts_as_loaded(patcher, *args):
        loaded.append(patcher.loaded_size())
        return parts_of_model(patcher, *args)

    monkeypatch.setattr(nodes, "parts_of_model", parts_as_loaded)
    lines = runs.limits(vae=Decoder(works, runs))
    assert lines and ("decoding" in " ".join(lines)) <= works and loaded[0] > 0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_prompt_on_the_cpu_is_told_in_parts_the_most_first(limited, engine, backend, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the machine's own folder is other processes' too
    runs = limited(backend=backend)
    lines = runs.limits()
    assert re.fullmatch(r"What limits this workflow: [\d.]+ m?s a prompt of 3 steps, the most first", lines[0]), lines
    told = parts(lines)
    assert len(told) >= 3 and lines[1 : len(told) + 1] == [line for line in lines if LINE.fullmatch(line)]
    assert told == sorted(told, key=lambda part: -part[0])
    assert 90 <= sum(percent for percent, _ in told) <= 105
    words = " ".join(sentence for _, sentence in told)
    assert "matrix products" in words and "Python between the operators" in words and "GPU waits" not in words
    assert re.search(r"\d+% of the computing is in compiled blocks", "\n".join(lines))
    assert not any(tmp_path.iterdir()) or backend == "inductor"
    network = runs.patcher.model.diffusion_model
    assert not any(module._forward_hooks for module in network.modules())
    models = engine("messages.report").report_json()["models"]
    assert lines in [model["limits"] for model in models], "the panel shows them"


def test_outside_of_the_benchmark_nothing_is_profiled(limited):
    runs = limited()
    profiling = []

    def look(executor, *args, **kwargs):
        profiling.append(torch.autograd._profiler_enabled())
        return executor(*args, **kwargs)

    runs.compiled.add_wrapper_with_key("apply_model", "test", look)
    runs.limits(steps=1)
    assert profiling[-1] and not any(profiling[:-2]), "the step before the last starts the profiler"
    runs.run(runs.compiled)
    assert not any(profiling[-runs.steps :])


def test_a_block_that_cannot_be_compiled_is_told_with_its_time_and_its_reason(limited):
    runs = limited(backend="inductor")
    network = runs.patcher.model.diffusion_model
    hooks = [block.linear1.register_forward_hook(lambda *_: None) for block in network.single_blocks]
    try:
        lines = runs.limits()
    finally:
        for hook in hooks:
            hook.remove()
    graphed = runs.said({"products": 1.0})  # in a CUDA graph nothing tells blocks apart
    assert "forward hook on linear1" in "\n".join(graphed)
    told = [sentence for _, sentence in parts(lines) if sentence.startswith("blocks that run uncompiled")]
    assert len(told) == 1 and "SingleStreamBlock" in told[0] and "forward hook on linear1" in told[0]
    assert "\n".join(lines).count("forward hook") == 1


def test_attention_is_told_by_whose_it_is(limited, engine):
    runs, attention = limited(), {"attention": 1.0}
    assert re.search(r"attention, by ComfyUI's attention_\w+\. Nothing to do", runs.said(attention)[1])
    runs.compiled = runs.attach(runs.patcher, attention="comfyui")
    assert "Set attention to auto" in runs.said(attention)[1]
    kept = engine("host.model.attention_choice")._chosen(runs.patcher.model.diffusion_model)
    runs.compiled, kept["auto"] = runs.attach(runs.patcher), "cudnn"
    assert "attention, by cudnn, the fastest kernel here" in runs.said(attention)[1]

    def sparse_attention(func, *args, **kwargs):
        return func(*args, **kwargs)

    runs.compiled.model_options["transformer_options"]["optimized_attention_override"] = sparse_attention
    said = runs.said(attention)[1]
    assert "by another node" in said and "sparse_attention (test_limits.py)" in said, said


def test_transfers_are_told_in_gigabytes_and_seconds(limited):
    said = limited().said({"transfers": 0.5, "products": 0.1}, transferring=0.6, transferred=16_300_000_000)[1]
    assert said.startswith("6.00 s (100%): transfers") and "16.3 GB and 600 ms a step" in said, said


def test_launching_is_told_with_what_keeps_cuda_graphs_off(limited):
    seconds = {"waiting": 0.8, "products": 0.2}
    assert "Set mode to auto" in limited(mode="default", backend="inductor").said(seconds)[1]
    runs = limited(mode="auto", backend="inductor")
    assert "Set mode to reduce-overhead" in runs.said(seconds)[1]
    (wrapper,) = runs.compiled.get_wrappers("apply_model", runs.engine("host.model.attach").KEY)
    wrapper.notes.append("CUDA graphs are off: another node wraps the model.")
    assert "launching: the GPU waits for the CPU. CUDA graphs are off: another node" in runs.said(seconds)[1]
    watch = runs.engine("messages.recompile_log").watch_of(runs.patcher.model.diffusion_model)
    watch.foreign = "a_pack"
    assert "CUDA graphs are off because of another node: a_pack. Bypass it to have them." in runs.said(seconds)
    graphs = runs.engine("host.graphs.replay").graphs_of(runs.patcher.model.diffusion_model).graphs
    graphs["kept for runs without that node"] = None
    assert "although CUDA graphs are used" not in "".join(runs.said(seconds))
    watch.foreign = None
    assert "although CUDA graphs are used" in "".join(runs.said(seconds))
    graphs.clear()
    wrapper.notes.clear()


@pytest.mark.parametrize("kind", ["EasyCache", "LazyCache"])
def test_steps_that_a_cache_skips_are_counted(limited, kind):
    import comfy_extras.nodes_easycache as nodes

    runs = limited()
    node = getattr(nodes, f"{kind}Node")
    runs.compiled = node.execute(runs.compiled, 100.0, 0.0, 1.0, False).args[0]
    runs.compiled.add_wrapper("predict_noise", lambda executor, *args, **options: executor(*args, **options))  # CFGOverride's
    lines = runs.limits(steps=6)
    (said,) = [line for line in lines if line.startswith("Cache of steps")]
    skipped = int(re.search(r"It skipped (\d+) of 6 steps", said)[1])
    assert 0 < skipped < 6 and kind.lower() in said.lower() and "test_limits" not in said
    assert not any("Cache of steps" in line for line in limited().limits(steps=1))


def test_the_vae_and_the_text_encoder_are_parts_of_the_prompt(limited, tiny):
    class Takes:
        """A model's node gives any object with these methods to ours; each takes a part of a second."""

        calls = 0

        def decode(self, latent):
            type(self).calls += 1
            torch.ones(4000, 4000).sin()

        tokenize, encode_from_tokens_scheduled = str, decode

    lines = limited().limits(steps=1, vae=Takes(), clip=Takes())
    words = " ".join(sentence for _, sentence in parts(lines))
    assert "decoding (VAE)" in words and "encoding the text" in words and Takes.calls == 4


def given(self, *args, **kwargs):
    return type(self).forward(self, *args, **kwargs)


def test_blocks_that_run_another_nodes_code_are_counted(limited):
    runs = limited()
    block = runs.patcher.model.diffusion_model.double_blocks[0]
    block.forward = given.__get__(block)
    try:
        runs.run(runs.compiled)
        said = runs.said({"products": 1.0})
    finally:
        del block.forward
    assert "1 blocks run code of another node: given (test_limits.py). Bypass it to have them compiled." in said


def test_code_without_a_module_is_named(limited):
    """As `exec` makes it from the text of a node."""
    runs, namespace = limited(), {}
    exec("def scaled(self, *args, **kwargs):\n    return type(self).forward(self, *args, **kwargs)", namespace)  # noqa: S102
    block = runs.patcher.model.diffusion_model.double_blocks[0]
    block.forward = namespace["scaled"].__get__(block)
    try:
        runs.run(runs.compiled)
        assert "1 blocks run code of another node: scaled (code without a module)" in "\n".join(runs.said({"products": 1.0}))
    finally:
        del block.forward
