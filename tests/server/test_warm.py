"""Warm means warm, in a real server through its queue: after the warmup node nothing compiles, and cancel stops it."""

import copy
import json
import threading

import pytest
from tiny_workflows import EMPTY, LENGTHS, workflow

from devtools.server import error_of, outputs_of

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


class Texts:
    """The lines that the page shows in nodes while prompts of ours run, and the nodes whose progress bar moves."""

    def __init__(self, server, client=None):
        import websocket

        url = server.url.replace("http", "ws") + f"/ws?clientId={client or server.client_id}"
        self.lines, self.moving, self._arrived = [], {}, threading.Condition()
        self._closed = websocket.WebSocketException, OSError
        self._socket = websocket.create_connection(url, timeout=60)
        self._socket.settimeout(None)
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self):
        self._listener.start()
        return self

    def __exit__(self, *_):
        self._socket.close()
        self._listener.join(5)

    def _listen(self):
        while True:
            try:
                message = self._socket.recv()
            except self._closed:
                return
            if not message:
                return
            if not isinstance(message, str):
                continue  # a preview
            event = json.loads(message)
            if event["type"] == "torch-compile-kit.progress":
                with self._arrived:
                    self.lines.append((event["data"]["node"], event["data"]["text"]))
                    self._arrived.notify_all()
            elif event["type"] == "progress":
                self.moving.setdefault(event["data"]["node"], []).append((event["data"]["value"], event["data"]["max"]))

    def wait_for(self, words, seconds=300):
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(words in text for _, text in self.lines), seconds), self.lines


def test_the_node_tells_what_is_compiled_and_which_of_how_many(server):
    prompt = changed(workflow("flux", 1.0, "aot_eager", "112x64", width=80, height=80), compile={"dynamic": "false"})
    with Texts(server) as texts, Texts(server, "another-page") as elsewhere:
        assert error_of(server.queue(prompt)) is None
        texts.wait_for("Warm: ")
    assert not elsewhere.lines, "it may have a node with the same id"
    lines = [text for node, text in texts.lines if node == "warmup"]
    assert any(line.startswith("80x80 batch 1 (1 of 2): compiling DoubleStreamBlock (1 of 2), ") for line in lines), lines
    assert any(line.startswith("112x64 batch 1 (2 of 2): compiling SingleStreamBlock (2 of 2), ") for line in lines), lines
    assert lines[-1].startswith("Warm: ") and lines[-1].endswith(" s")
    parts = [done / whole for done, whole in texts.moving["warmup"]]
    assert parts == sorted(parts) and parts[-1] == 1 and len(set(parts)) > 4, parts


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rest)])
def test_cancel_stops_a_warmup_after_the_graph_in_flight_and_the_next_run_is_right(server, backend):
    import safetensors.torch

    prompt = workflow("flux", 4.0, backend, "112x80", width=80, height=112)
    prompt = changed(prompt, compile={"cache_limit": 41})  # code of its own
    only_warmup = {node: prompt[node] for node in ("loader", "prompts", "compile", "warmup")}
    with Texts(server) as texts:
        number = server.start(only_warmup)
        texts.wait_for("compiling")
        server.interrupt()
        before = graphs(server)
        entry = server.finished(number)
        texts.wait_for("Stopped")
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
