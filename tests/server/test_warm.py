"""Warm means warm, in a real server through its queue: after the warmup node nothing compiles, and cancel stops it."""

import copy

import pytest
from tiny_workflows import EMPTY, LENGTHS, workflow

from devtools.server import error_of, outputs_of, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]


EDITED_SIZES = {"wan": "64x64x5 batch 2\n96x64x5"}


def changed(prompt, **nodes):
    """A copy with other inputs on the nodes of these ids."""
    prompt = copy.deepcopy(prompt)
    for node, inputs in nodes.items():
        prompt[node]["inputs"].update(inputs)
    return prompt


def with_lora(prompt, name, strength, before):
    """A copy with a LoRA in the model that `before` gets."""
    prompt = copy.deepcopy(prompt)
    inputs = {"model": prompt[before]["inputs"]["model"], "lora_name": f"tiny-{name}.safetensors", "strength_model": strength}
    prompt["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
    prompt[before]["inputs"]["model"] = ["lora", 0]
    return prompt


@pytest.fixture(scope="module")
def loras(server, tiny):
    """A LoRA file for each model, where the server looks."""
    import safetensors.torch
    from patch_kinds.weights import lora_file

    folder = server.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    for name in EMPTY:
        layers = ("linear1", "img_attn.qkv", "self_attn.q", "attn.to_q")
        safetensors.torch.save_file(lora_file(tiny.build_patcher(name), layers=layers), folder / f"tiny-{name}.safetensors")


def models(server):
    return server.get("/torch-compile-kit/report")["models"]


def graphs(server):
    return sum(model["graphs"] for model in models(server))


def notices(server):
    return {text for model in models(server) for text in model["compiled_outside_warmup"]}


def real_work(name, prompt, cfg):
    """What a session does after the warmup, each way of changing a prompt once: (what, prompt)."""
    yield "seed, denoise", changed(prompt, sampler={"seed": 2, "denoise": 0.5})
    # The host's own Warmup input stays connected: as when the prompt is edited, the warmup node runs again ...
    for tokens, sampler, scheduler in ((5, "dpmpp_2m", "karras"), (400, "ddim", "normal")):
        how = {"sampler_name": sampler, "scheduler": scheduler}
        yield f"{tokens} tokens, {sampler}", changed(prompt, prompts={"positive_tokens": tokens}, sampler=how)
    # ... and with a prompt that the warmup never sees.
    other = copy.deepcopy(prompt)
    other["others"] = copy.deepcopy(other["prompts"])
    other["sampler"]["inputs"] |= {"positive": ["others", 0], "negative": ["others", 1]}
    for pair, sampler in (((5, 5), "heun"), ((200, 77), "lms"), ((400, 400), "euler")):
        tokens = dict(zip(("positive_tokens", "negative_tokens"), pair, strict=True))
        unseen = changed(other, others={**tokens, "seed": 5}, sampler={"sampler_name": sampler, "steps": 3})
        yield f"unseen prompts {pair}, {sampler}", unseen
    for width, height, batch in ((96, 64, 1), (64, 64, 2), (64, 64, 1)):
        size = {"width": width, "height": height, "batch_size": batch}
        yield f"{width}x{height} batch {batch}", changed(prompt, latent=size, sampler={"seed": 3})
    yield "cfg", changed(prompt, sampler={"cfg": 1.0})
    yield "cfg back", changed(prompt, sampler={"cfg": cfg + 1})
    for before, strength in (("sampler", 1.0), ("compile", 1.0), ("compile", 1.7)):
        yield f"LoRA {strength} before {before}", with_lora(prompt, name, strength, before)
    yield "LoRA off", changed(prompt, sampler={"seed": 20})
    yield "edit of the warmup", changed(prompt, warmup={"extra_sizes": EDITED_SIZES.get(name, "64x64 batch 2\n96x64")})


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("flux", "eager"),
        pytest.param("wan", "eager", marks=pytest.mark.rest),
        pytest.param("qwen_image", "inductor", marks=pytest.mark.rest),
    ],
)
def test_nothing_compiles_after_the_warmup(server, loras, name, backend):
    cfg = 4.0
    sizes = "96x64x5\n64x64x5 batch 2" if name in LENGTHS else "96x64\n64x64 batch 2"
    prompt = workflow(name, cfg, backend, sizes)
    only_warmup = {node: prompt[node] for node in ("loader", "prompts", "compile", "warmup")}
    entry = server.queue(only_warmup)
    assert error_of(entry) is None
    before, told = graphs(server), notices(server)  # those of other tests' models in this server
    assert before > 0, entry["outputs"]["warmup"]
    added = {}
    for what, variant in real_work(name, prompt, cfg):
        assert error_of(server.queue(variant)) is None, what
        now = graphs(server)
        if now > before:  # fewer: the model of an earlier test was collected, which the report still counted
            added[what] = now - before
        before = now
    assert not added
    assert not notices(server) - told


def lines_of(events):
    """The lines that the page was told to show in nodes, by node."""
    return [(data["node"], data["text"]) for event, data in events if event == "torch-compile-kit.progress"]


def wait_for_line(events, words):
    wait_until(lambda: any(words in text for _, text in lines_of(events)), words, 300)


def test_the_node_tells_what_is_compiled_and_which_of_how_many(server):
    prompt = changed(workflow("flux", 1.0, "aot_eager", "112x64", width=80, height=80), compile={"dynamic": "false"})
    with server.heard() as events, server.heard("another-page") as elsewhere:
        assert error_of(server.queue(prompt)) is None
        wait_for_line(events, "Warm: ")
    assert not lines_of(elsewhere), "it may have a node with the same id"
    lines = [text for node, text in lines_of(events) if node == "warmup"]
    assert any(line.startswith("80x80 batch 1 (1 of 2): compiling DoubleStreamBlock (1 of 2), ") for line in lines), lines
    assert any(line.startswith("112x64 batch 1 (2 of 2): compiling SingleStreamBlock (2 of 2), ") for line in lines), lines
    assert lines[-1].startswith("Warm: ") and lines[-1].endswith(" s")
    moved = [data for event, data in events if event == "progress" and data["node"] == "warmup"]
    parts = [data["value"] / data["max"] for data in moved]
    assert parts == sorted(parts) and parts[-1] == 1 and len(set(parts)) > 4, parts


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rest)])
def test_cancel_stops_a_warmup_after_the_graph_in_flight_and_the_next_run_is_right(server, backend):
    import safetensors.torch

    prompt = workflow("flux", 4.0, backend, "112x80", width=80, height=112)
    prompt = changed(prompt, compile={"cache_limit": 41})  # code of its own
    only_warmup = {node: prompt[node] for node in ("loader", "prompts", "compile", "warmup")}
    with server.heard() as events:
        number = server.start(only_warmup)
        wait_for_line(events, "compiling")
        server.interrupt()
        before = graphs(server)
        entry = server.finished(number)
        wait_for_line(events, "Stopped")
    assert "execution_interrupted" in [kind for kind, _ in entry["status"]["messages"]]
    stopped = graphs(server)
    assert stopped - before <= 1, "only the graph in flight may be finished"

    paths = []
    for variant in (prompt, changed(prompt, sampler={"model": ["loader", 0]})):
        entry = server.queue(variant)
        assert error_of(entry) is None
        paths += outputs_of(entry, "latents")
    assert graphs(server) > stopped + 1, "the first warmup had more to compile"
    compiled, eager = (safetensors.torch.load_file(server.base / "output" / path)["latent_tensor"] for path in paths)
    assert (compiled - eager).norm() / eager.norm() < 1e-4
