"""The pack in a real server: what the page is told, what the shipped workflow does, what bad input gets."""

import collections
import platform
import re
import urllib.parse
from importlib.metadata import version

import pytest
from PIL import Image

from devtools import prompts
from devtools.server import error_of, outputs_of, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]

SAVE, LOAD = "TorchCompileKitSaveCache", "TorchCompileKitLoadCache"
MODEL_INPUTS = {
    "model": None, "mode": "auto", "compile_when": "in background", "backend": "inductor", "dynamic": "auto",
    "fullgraph": False, "cache_limit": 0, "block_swap": "auto", "attention": "auto", "on_failure": "run uncompiled",
    "allow_tf32": False, "cudnn_benchmark": False, "only_blocks": "",
}  # fmt: skip
ADVANCED = set(MODEL_INPUTS) - {"model", "mode", "compile_when"}
SAMPLING = {
    **dict.fromkeys(("model", "positive", "negative")),
    **{"width": 1024, "height": 1024, "length": 1, "batch_size": 1, "cfg": 1.0},
}
WARMUP_INPUTS = {**SAMPLING, "extra_sizes": "", "latent_image": None}
BENCHMARK_INPUTS = {**SAMPLING, "steps": 20, "trace": False, **dict.fromkeys(("latent_image", "vae", "clip"))}
CHOICES = {
    "backend": ["inductor", "cudagraphs", "aot_eager", "eager", "none"],
    "mode": ["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
    "dynamic": ["auto", "true", "false"],
    "block_swap": ["auto", "uncompiled linears", "off"],
    "attention": ["auto", "comfyui", "cudnn", "flash", "efficient"],
    "on_failure": ["run uncompiled", "stop"],
    "compile_when": ["in background", "before first image"],
}


@pytest.fixture(scope="module")
def object_info(server):
    return server.get("/object_info")


@pytest.fixture(scope="module")
def shipped(object_info):
    return prompts.shrink(prompts.to_api(prompts.load(), object_info), width=64, height=64, steps=2)


@pytest.mark.parametrize(
    ("node", "title", "inputs", "outputs"),
    [
        (prompts.MODEL_NODE, "Torch Compile", MODEL_INPUTS, ["MODEL"]),
        (prompts.WARMUP_NODE, "Torch Compile Warmup", WARMUP_INPUTS, ["MODEL", "STRING"]),
        (prompts.BENCHMARK_NODE, "Torch Compile Benchmark", BENCHMARK_INPUTS, ["STRING"]),
        (SAVE, "Save Compile Cache", ("model", "filename"), ["MODEL", "STRING"]),
        (LOAD, "Load Compile Cache", ("model", "file"), ["MODEL", "STRING"]),
    ],
)
def test_the_page_is_told_the_fixed_inputs_in_order_with_a_tooltip_each(object_info, node, title, inputs, outputs):
    info = object_info[node]
    described = {name: options for name, _, options in prompts.inputs_in_order(info)}
    assert list(described) == list(inputs)
    if isinstance(inputs, dict):
        assert {name: options.get("default") for name, options in described.items()} == inputs
    assert all(len(options.get("tooltip", "")) > 10 for options in described.values())
    assert info["output"] == outputs
    assert len(info["output_tooltips"]) == len(outputs) and all(info["output_tooltips"])
    assert (info["display_name"], info["category"]) == (title, "torch compile")


def test_combo_values_and_advanced_inputs_are_the_fixed_ones(object_info):
    described = list(prompts.inputs_in_order(object_info[prompts.MODEL_NODE]))
    assert {name: options["options"] for name, kind, options in described if kind == "COMBO"} == CHOICES
    assert {name for name, _, options in described if options.get("advanced")} == ADVANCED


def test_only_what_reports_is_an_output_node_and_has_an_optional_latent(object_info):
    """Its text is shown in a page that is loaded anew, too."""
    assert object_info[prompts.MODEL_NODE]["output_node"] is False
    assert object_info[SAVE]["output_node"] is object_info[LOAD]["output_node"] is True
    assert "code" in object_info[LOAD]["description"]
    for node, others in ((prompts.WARMUP_NODE, []), (prompts.BENCHMARK_NODE, ["vae", "clip"])):
        assert object_info[node]["output_node"] is True
        assert object_info[node]["input_order"]["optional"] == ["latent_image", *others]


@pytest.mark.parametrize("template", prompts.TEMPLATES, ids=lambda file: file.stem)
def test_a_template_holds_a_value_the_server_accepts_and_says_where_its_models_are(object_info, template):
    workflow = prompts.load(template)
    api = prompts.to_api(workflow, object_info)
    for node in workflow["nodes"]:
        if str(node["id"]) not in api:
            continue
        offered = {model["name"]: model for model in node["properties"].get("models", [])}
        given = api[str(node["id"])]["inputs"]
        for name, kind, options in prompts.inputs_in_order(object_info[node["type"]]):
            assert name in given or name in object_info[node["type"]]["input_order"].get("optional", []), (node["type"], name)
            value = given.get(name)
            if str(value).endswith(".safetensors"):
                model = offered.pop(value)
                assert model["url"].startswith("https://") and model["url"].endswith(value) and model["directory"]
            elif kind == "COMBO" and value is not None:
                assert value in options["options"], (node["type"], name)
            elif kind in ("INT", "FLOAT"):
                assert options.get("min", value) <= value <= options.get("max", value), (node["type"], name)
        assert not offered
    assert template.with_suffix(".jpg").is_file(), "no thumbnail"
    assert next(node for node in workflow["nodes"] if node["type"] == "MarkdownNote")["widgets_values"][0]


def test_shipped_workflow_runs_and_reports(server, shipped):
    entry = server.queue(shipped)
    assert error_of(entry) is None
    assert len(outputs_of(entry, "images")) == 1
    report = "\n".join(entry["outputs"][prompts.find(shipped, prompts.WARMUP_NODE)]["text"])
    assert report.startswith("Ready for ")
    assert "DoubleStreamBlock: 2 blocks" in report and "SingleStreamBlock: 4 blocks" in report
    line = server.get("/torch-compile-kit/status")[prompts.find(shipped, prompts.MODEL_NODE)]
    assert line["state"] in ("ready", "faster", "unclear", "slower") and line["says"][0] in ("ready", "readyBut")


def test_image_is_the_same_with_and_without_the_nodes(server, shipped):
    import safetensors.torch
    import torch

    prompt = prompts.with_latent(prompts.change(shipped, "KSampler", seed=5), "same")
    paths = []
    for variant in (prompt, prompts.without_kit(prompt)):
        entry = server.queue(variant)
        assert error_of(entry) is None
        paths += outputs_of(entry, "latents")
    compiled, eager = (safetensors.torch.load_file(server.base / "output" / path)["latent_tensor"] for path in paths)
    tolerance = 5e-2 if torch.cuda.is_available() else 1e-4
    assert (compiled - eager).norm() / eager.norm() < tolerance


def test_another_seed_adds_no_graph(server, shipped):
    def graphs():
        """Of each model; those of earlier tests may go meanwhile."""
        return collections.Counter(model["graphs"] for model in server.get("/torch-compile-kit/report")["models"])

    assert error_of(server.queue(prompts.only_warmup(shipped))) is None
    before = graphs()
    assert max(before) > 0
    for seed in (11, 12):
        assert error_of(server.queue(prompts.change(shipped, "KSampler", seed=seed))) is None
    assert graphs() <= before


def test_the_server_tells_what_compiling_lacks_here(server):
    told = server.get("/torch-compile-kit/machine")
    assert re.match(rf"Torch Compile Kit \d+\.\d+\.\d+, ComfyUI \d+\.\d+\.\d+, {platform.system()}, ", told["here"])
    assert f"PyTorch {'.'.join(version('torch').split('.')[:2])} (tested)," in told["here"]
    assert [line[:19] for line in told["missing"]] == ["PyTorch sees no GPU"], "these tests compile, so nothing else is"


def test_benchmark_shows_its_table_and_writes_traces(server, shipped):
    import json

    others = {"vae": [prompts.find(shipped, "VAELoader"), 0], "clip": [prompts.find(shipped, "CLIPLoader"), 0]}
    prompt = prompts.with_benchmark(shipped, trace=True, **others)
    entry = server.queue(prompt)
    assert error_of(entry) is None
    shown = entry["outputs"]["benchmark"]
    table = "\n".join(shown["text"])
    for words in ("Flux, 64x64 batch 1", "2 steps", "a step, median", "Relative error of the final latent", "operators a step"):
        assert words in table
    limits = table.partition("What limits this workflow")[2].partition("\n\n")[0].splitlines()
    for words in ("matrix products", "decoding (VAE)", "encoding the text"):
        assert any(words in line for line in limits), limits
    assert any(limits[1:] == model["limits"][1:] for model in server.get("/torch-compile-kit/report")["models"])
    traces = [line.strip() for line in table.splitlines() if line.strip().endswith(".json")]
    assert len(traces) == 2
    for path in traces:
        assert json.loads((server.base / "output" / path).read_text())["traceEvents"]


def test_the_page_whose_prompt_runs_is_told_what_compiled_while_sampling_and_no_other(server):
    """With the workflow: node ids say nothing, as others have the same ones. The notice names the node that helps."""
    prompt = prompts.shrink(prompts.to_api(prompts.load(), server.get("/object_info")), 80, 112, 2)
    model, warmup = (prompts.find(prompt, node) for node in (prompts.MODEL_NODE, prompts.WARMUP_NODE))
    prompt[model]["inputs"].update(backend="eager", dynamic="false", cache_limit=7, compile_when="before first image")
    prompt[warmup]["inputs"].update(width=64, height=64)
    prompt[warmup]["inputs"].pop("latent_image", None)
    extra = {"extra_pnginfo": {"workflow": {"id": "this workflow"}}}

    def of(kind, events, workflow="this workflow"):
        """Prompts of before may still be told of, with a workflow of their own or none."""
        told = [data for event, data in events if event == f"torch-compile-kit.{kind}"]
        return [data for data in told if workflow is None or data["workflow"] == workflow]

    with server.heard() as mine, server.heard("somebody-else") as theirs:
        assert error_of(server.finished(server.start(prompt, extra))) is None
        wait_until(lambda: of("compiled", mine) and any(line["says"][:1] == ["ready"] for line in of("status", mine)), "news")
    (notice,) = of("compiled", mine)
    assert notice["model"] == "Flux" and notice["text"].startswith("Waited ") and notice["size"] == "80x112"
    assert notice["warmups"] == [warmup]
    assert {line["node"] for line in of("status", mine)} == {model}
    assert not of("status", theirs, None) and not of("compiled", theirs, None)

    def lines(**asked):
        return list(server.get(f"/torch-compile-kit/status?{urllib.parse.urlencode(asked)}"))

    assert lines(client_id=server.client_id, workflow="this workflow") == [model]
    assert lines(client_id="somebody-else") == lines(client_id=server.client_id, workflow="another") == []


def test_whoever_asked_to_wait_is_not_told_that_an_image_waited(server):
    prompt = prompts.shrink(prompts.to_api(prompts.load(), server.get("/object_info")), 96, 112, 2)
    model = prompts.find(prompt, prompts.MODEL_NODE)
    prompt[prompts.find(prompt, "KSampler")]["inputs"]["model"] = [model, 0]
    prompt.pop(prompts.find(prompt, prompts.WARMUP_NODE))
    prompt[model]["inputs"].update(backend="eager", dynamic="false", cache_limit=8, compile_when="before first image")
    with server.heard() as mine:
        assert error_of(server.finished(server.start(prompt, {"extra_pnginfo": {"workflow": {"id": "waits"}}}))) is None
        told = lambda kind: [data for event, data in mine if event == f"torch-compile-kit.{kind}"]  # noqa: E731
        wait_until(lambda: any(line["says"][:1] == ["ready"] for line in told("status") if line["workflow"] == "waits"), "news")
    assert not [notice for notice in told("compiled") if notice["workflow"] == "waits"]


def test_a_vae_that_gains_nothing_here_decodes_the_same_and_the_page_is_told_why(server, shipped):
    plain = prompts.without_kit(shipped)
    given = {
        "vae node": {"class_type": "TorchCompileKitVAEChannelsLast", "inputs": {"vae": [prompts.find(plain, "VAELoader"), 0]}}
    }
    images = []
    for prompt in (plain, {**prompts.change(plain, "VAEDecode", vae=["vae node", 0]), **given}):
        entry = server.queue(prompts.change(prompt, "KSampler", seed=77))
        assert error_of(entry) is None
        (path,) = outputs_of(entry, "images")
        with Image.open(server.base / "output" / path) as image:
            images.append(image.tobytes())
    assert images[0] == images[1]
    told = {"state": "unclear", "says": [["leftAsIs", ["vaeNoGpu"]]], "seconds": None, "begins": None}
    assert server.get("/torch-compile-kit/status")["vae node"] == told
    other = {"of another workflow": given["vae node"]}
    server.queue({**prompts.change(plain, "VAEDecode", vae=["of another workflow", 0]), **other})
    assert server.get("/torch-compile-kit/status")["of another workflow"] == told
