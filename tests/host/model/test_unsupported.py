"""A PyTorch that lacks what compiling needs: the nodes load, models pass through, and the node's line says why."""

import pytest
import torch
from patch_kinds.conditions import controlnet, with_options
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def lacking(engine, monkeypatch):
    private = engine("torch_compat.private")
    renamed = private.PrivateName("torch._guards:renamed_by_a_newer_version")
    monkeypatch.setitem(private.NAMES, "tracing", renamed)
    private.unsupported.cache_clear()
    yield "torch._guards.renamed_by_a_newer_version"
    private.unsupported.cache_clear()


ELSEWHERE = "left as it is: another node compiles it; remove one of the two"


def said_by_nodes(engine, runs, model):
    """What Warmup, Benchmark and Save Compile Cache say of a model, each sentence once."""
    size = engine("host.nodes.warmup_plan").Size(64, 64)
    warmed = engine("host.nodes.warmup").warm_up(model, runs.positive, runs.negative, 1.0, [size])
    compared = engine("host.nodes.benchmark").benchmark(model, runs.positive, runs.negative, size, 1.0, 2)
    _path, saved = engine("host.nodes.cache_files").save_cache(model, "mine")
    return list(dict.fromkeys([warmed, compared, saved]))


def test_nodes_after_a_node_that_compiles_nothing_say_why_in_the_users_language(tiny, engine, lacking):
    runs, words = Runs(tiny, engine, "flux", cfg=1.0), engine("messages.words")
    attached = engine("host.model.attach").attach(runs.patcher, engine("settings").CompileSettings(), "7")
    with words.speaking("de"):
        sentences = said_by_nodes(engine, runs, attached)
        without = said_by_nodes(engine, runs, runs.patcher)
    assert len(sentences) == 1 and lacking in sentences[0] and "unkompiliert" in sentences[0]
    assert "Nichts aufzuwärmen: Torch Compile (backend nicht none) vor diesen Node setzen." in without


@pytest.mark.parametrize("order", ["other node first", "other node last"])
def test_nodes_after_a_model_that_another_node_compiles_say_so(tiny, engine, order):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    runs, settings = Runs(tiny, engine, "flux", cfg=1.0), engine("settings").CompileSettings(backend="eager")
    model = runs.patcher.clone()
    if order == "other node first":
        set_torch_compile_wrapper(model, "eager")
    model = engine("host.model.attach").attach(model, settings, "7").clone()
    if order == "other node last":
        set_torch_compile_wrapper(model, "eager")
    assert said_by_nodes(engine, runs, model) == [f"Torch Compile: {ELSEWHERE}"]


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", None])
def test_pytorchs_compiler_is_switched_off(tiny, engine, monkeypatch, variable):
    """By a launch file, or by another pack."""
    switch = f"{variable}=1" if variable else "torch._dynamo.config.disable"
    if variable:
        monkeypatch.setenv(variable, "1")
    runs, settings = Runs(tiny, engine, "flux", cfg=1.0), engine("settings").CompileSettings()
    with torch._dynamo.config.patch(disable=variable != "TORCHDYNAMO_DISABLE"):
        attached = engine("host.model.attach").attach(runs.patcher, settings, "7")
        left = engine("host.model.controlnet").attach_control(controlnet(tiny, "flux", 1), settings, "8")
        same(runs.run(attached), runs.plain(), "with the node")
        assert said_by_nodes(engine, runs, attached) == [f"Torch Compile: left as it is: {switch}"]
        lines = engine("messages.status").lines_of()
        assert left is not None
        assert lines["7"].says == lines["8"].says == [["leftAsIs", switch]]
        assert switch in engine("failures.machine").preflight_here(False)[1][0]


@pytest.mark.parametrize("stance", ["fail_on_recompile", "force_eager"])
def test_a_stance_that_another_pack_has_set_for_the_process_ends_no_prompt(tiny, engine, stance):
    runs, settings = Runs(tiny, engine, "flux", cfg=1.0), engine("settings").CompileSettings()
    expected = runs.plain()
    with torch.compiler.set_stance(stance):
        attached = engine("host.model.attach").attach(runs.patcher, settings, "7")
        same(runs.run(attached), expected, "with the node")
        said = f'torch.compiler.set_stance("{stance}")'
        assert said_by_nodes(engine, runs, attached) == [f"Torch Compile: left as it is: {said}"]
    assert engine("torch_compat.private").switched_off() is None


def test_pytorchs_compiler_is_switched_off_meanwhile(tiny, engine):
    """Nothing was compiled from then on, without a word."""
    runs, settings = Runs(tiny, engine, "flux", cfg=1.0), engine("settings").CompileSettings(backend="eager")
    control = engine("host.model.controlnet").attach_control(controlnet(tiny, "flux", 1), settings, "8")
    attached = engine("host.model.attach").attach(runs.patcher, settings, "7")
    hint = torch.full((1, 3, 64, 64), 0.5)
    positive = with_options(runs.positive, control=control.copy().set_cond_hint(hint, 0.8, (0.0, 1.0)))
    lines, switch = engine("messages.status").lines_of, "torch._dynamo.config.disable"
    with torch._dynamo.config.patch(disable=True):
        runs.run(attached, positive)
        assert lines()["7"].says == lines()["8"].says == ["leftAsIs", switch] and not runs.graphs
    runs.run(attached, positive)
    assert switch not in str(lines())


@pytest.mark.parametrize("compile_when", ["in background", "before first image"])
def test_a_network_that_is_no_module_passes_through(tiny, engine, compile_when):
    """As ComfyUI_TensorRT's loader makes a model (tensorrt_loader.py, TrTUnet)."""

    class Engine:
        dtype = torch.float32

        def __call__(self, *args, **kwargs):
            return network(*args, **kwargs)

        def load_state_dict(self, state_dict, strict=False):
            pass

        def state_dict(self):
            return {}

    runs = Runs(tiny, engine, "flux", cfg=1.0)
    expected, network = runs.plain(), runs.patcher.model._modules.pop("diffusion_model")
    runs.patcher.model.diffusion_model = Engine()
    settings = engine("settings").CompileSettings(compile_when=compile_when)
    attached = engine("host.model.attach").attach(runs.patcher, settings, "7")
    same(runs.run(attached), expected, "with the node")
    assert said_by_nodes(engine, runs, attached) == [f"Torch Compile: {ELSEWHERE}"]
    status = engine("messages.status")
    assert status.lines_of()["7"].says == [["leftAsIs", ["compiledElsewhere"]]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "owner_now", lambda: ("a page opened later", "workflow"))
        runs.run(attached)
    assert status.lines_of("a page opened later")["7"].says == [["leftAsIs", ["compiledElsewhere"]]]


def test_a_model_passes_through_and_its_line_says_why(tiny, engine, lacking):
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    attached = engine("host.model.attach").attach(runs.patcher, engine("settings").CompileSettings(), "7")
    same(runs.run(attached), runs.plain(), "with the node")
    assert not runs.graphs
    line = engine("messages.status").lines_of()["7"]
    assert line.state == "unclear" and line.says == [["pytorchLacks", torch.__version__, lacking, "2.9", "2.15"]]
    assert lacking in engine("failures.machine").preflight_here(False)[1][0]
    assert said_by_nodes(engine, runs, attached) == [
        f"Torch Compile: uncompiled: PyTorch {torch.__version__} has no {lacking}; use PyTorch 2.9 to 2.15"
    ]
