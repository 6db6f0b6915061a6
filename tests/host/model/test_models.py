"""Six architectures in the real host: found, shared, equal to eager, and warm after the warmup."""

import pytest
import torch
from sampling import sample
from support import relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

# name -> (backend, cfg, size, where the blocks are, graphs after a warmup: one per kind of block, and one more for prompt and
# negative apart from each other, a batch of one, where cfg is above 1)
MODELS = {
    "flux": (
        "aot_eager",
        1.0,
        (64, 64, 1),
        "double_blocks.* (2 DoubleStreamBlock), single_blocks.* (4 SingleStreamBlock)",
        2,
    ),
    "wan": ("aot_eager", 5.0, (64, 64, 5), "blocks.* (4 WanAttentionBlock)", 2),
    "qwen_image": ("aot_eager", 1.0, (64, 64, 1), "transformer_blocks.* (4 QwenImageTransformerBlock)", 1),
    "z_image": (
        "aot_eager",
        1.0,
        (64, 64, 1),
        "noise_refiner.* (2 JointTransformerBlock), context_refiner.* (2 JointTransformerBlock), "
        "layers.* (4 JointTransformerBlock)",
        2,
    ),
    "sd3": ("aot_eager", 5.0, (64, 64, 1), "joint_blocks.* (4 JointBlock)", 4),
    "sdxl": ("aot_eager", 5.0, (64, 64, 1), None, 4),
}


def loaded(name, tiny, model_files):
    """The patcher: through the host's own loader where that knows tiny sizes, else around the host's own class."""
    if name in ("flux", "wan"):
        import comfy.sd

        return comfy.sd.load_diffusion_model(str(model_files[name]))
    return tiny.build_patcher(name)


# Inductor's own code of a whole model; of one kind of block in the first part. Flux and SDXL: test_lowered_elsewhere.py,
# Qwen-Image on a server: server/test_warm.py.
MORE_CODE = [pytest.param("wan", "inductor", marks=pytest.mark.rest)]


# SD3's and Qwen-Image's blocks are like Flux' double ones.
FIRST = [(name, MODELS[name][0]) for name in MODELS if name not in ("sd3", "qwen_image")]
OTHERS = [pytest.param(name, "aot_eager", marks=pytest.mark.rest) for name in ("sd3", "qwen_image")]


@pytest.mark.parametrize(("name", "backend"), [*FIRST, *OTHERS, *MORE_CODE])
def test_compiled_equals_eager_and_stays_warm(name, backend, engine, tiny, model_files):
    _, cfg, (width, height, length), where, graphs = MODELS[name]
    attachment, plan_of_size = engine("host.model.attach"), engine("host.nodes.warmup_plan").Size(width, height, length)
    settings = engine("settings").CompileSettings(backend=backend, compile_when="before first image")
    patcher = loaded(name, tiny, model_files)
    conditioning, latent = tiny.conditioning(name), tiny.empty_latent(name, width, height, length)
    expected = sample(patcher, conditioning, latent, cfg, seed=1)

    compiled = attachment.attach(patcher, settings)
    plan = attachment.compile_plan(compiled, settings)
    if where:
        assert plan.summary() == where
    assert not plan.whole_model and plan.covered_share > 0.5

    report = engine("host.nodes.warmup").warm_up(compiled, *conditioning, cfg, [plan_of_size])
    stats = engine("messages.report").stats_for(attachment.diffusion_model(patcher), settings)
    assert stats.graphs > 0 and stats.graph_breaks == 0, report
    assert stats.graphs == graphs, report
    groups = engine("compile.registry").code_of(attachment.diffusion_model(patcher)).groups_of(settings)
    assert not any(group.failure for group in groups), report

    result = sample(compiled, conditioning, latent, cfg, seed=1)
    assert relative_error(result, expected) < 1e-4
    other = sample(compiled, conditioning, latent, cfg, seed=2)
    assert relative_error(other, sample(patcher, conditioning, latent, cfg, seed=2)) < 1e-4
    assert not torch.equal(other, result)
    after = engine("messages.report").stats_for(attachment.diffusion_model(patcher), settings)
    assert after.graphs == stats.graphs


def test_inductors_own_code_equals_eager(engine, tiny):
    """Of one kind of block, for two sizes: the real compiler takes ten seconds of a core a graph."""
    attachment, size = engine("host.model.attach"), engine("host.nodes.warmup_plan").Size
    settings = engine("settings").CompileSettings(compile_when="before first image", only_blocks="single_blocks.*")
    patcher, conditioning = tiny.build_patcher("flux"), tiny.conditioning("flux")
    compiled = attachment.attach(patcher, settings)
    report = engine("host.nodes.warmup").warm_up(compiled, *conditioning, 1.0, [size(64, 64), size(96, 64)])
    for width in (64, 96):
        latent = tiny.empty_latent("flux", width, 64)
        expected, result = (sample(p, conditioning, latent, 1.0, seed=1) for p in (patcher, compiled))
        assert 0 < relative_error(result, expected) < 1e-4, "inductor's sums are in another order"
    stats = engine("messages.report").stats_for(attachment.diffusion_model(patcher), settings)
    assert (stats.graphs, stats.graph_breaks) == (1, 0), report
