"""Inputs that nobody should give: refused by the host, named by an error of ours, or harmless; the server is well then."""

import math

import pytest
from judging import Judge, tracebacks

from devtools.prompts import BENCHMARK_NODE, MODEL_NODE, WARMUP_NODE, inputs_in_order

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]
REFUSED, OURS, RAN = "refused before it runs", "our error", "ran"
LONG = 10_000_000
WIDE = "\uff16\uff14"  # 64 in digits that Python reads and our sizes do not
NODES = {"compile": MODEL_NODE, "warmup": WARMUP_NODE, "benchmark": BENCHMARK_NODE, "save": "TorchCompileKitSaveCache"}
NODES |= {"load": "TorchCompileKitLoadCache"}
GOOD = dict(width=64, height=64, length=1, batch_size=1, cfg=1.0, steps=2, extra_sizes="", filename="bad prompts", file="none")
GOOD |= dict(compile_when="before first image", backend="eager", mode="default")
# Node, input, value, what becomes of the prompt, words of the message.
ODD = [
    ("compile", "backend", "INDUCTOR", REFUSED),
    ("compile", "backend", None, REFUSED),
    ("compile", "backend", "tensorrt", REFUSED, "backend: 'tensorrt' not in ['inductor', "),
    ("compile", "mode", ["loader"], REFUSED),
    ("compile", "mode", ["loader", 7], REFUSED),
    ("compile", "mode", "max-autotune", OURS, "mode = 'max-autotune': backend eager has no modes; set mode to default"),
    ("compile", "attention", "cudnn", OURS, "attention = 'cudnn': this kernel needs an NVIDIA GPU; choose auto or comfyui."),
    ("compile", "fullgraph", "false", RAN),
    ("compile", "cache_limit", -1, REFUSED),
    ("compile", "cache_limit", math.nan, REFUSED),
    ("compile", "cache_limit", 10**4000, REFUSED),
    ("compile", "only_blocks", "[", OURS),
    ("compile", "only_blocks", "triple_blocks.*", OURS, "only_blocks = ", "triple_blocks.*", "double_blocks", "single_blocks"),
    ("compile", "only_blocks", "double_blocks.*, nothing.*", OURS),
    ("compile", "only_blocks", "a*" * 4999, OURS),
    ("compile", "only_blocks", "*" * 9999, RAN),
    ("compile", "only_blocks", "x" * LONG, OURS),
    ("compile", "only_blocks", "\ud83d", OURS),
    ("compile", "only_blocks", {"a": {"b": 1}}, OURS),
    ("compile", "model", ["prompts", 0], REFUSED),
    ("compile", "model", ["nowhere", 0], REFUSED),
    ("compile", "model", ["compile", 0], REFUSED),
    ("warmup", "width", 0, REFUSED),
    ("warmup", "width", "64.0", REFUSED),
    ("warmup", "width", WIDE, RAN),
    ("warmup", "height", 1e308, REFUSED),
    ("warmup", "length", 5, OURS),
    ("warmup", "batch_size", True, RAN),
    ("warmup", "cfg", math.inf, REFUSED),
    ("warmup", "extra_sizes", "99999x99999", REFUSED),
    ("warmup", "extra_sizes", "64x64\n# note\n\n80x64 batch 2", RAN),
    ("warmup", "extra_sizes", "64x64," * 101, REFUSED),
    ("warmup", "extra_sizes", "64x64\n-64x64", REFUSED, "extra_sizes = '-64x64'"),
    ("warmup", "extra_sizes", "64x64\n1024 by 1024", REFUSED, "'1024 by 1024': line 2 is no size; write 1024x768"),
    ("warmup", "extra_sizes", f"{WIDE}x{WIDE}", REFUSED),
    ("warmup", "extra_sizes", "64x64x5", OURS),
    ("warmup", "extra_sizes", "1x1", OURS),
    ("warmup", "extra_sizes", "16384x16384x16384 batch 4096", OURS),
    ("warmup", "extra_sizes", "9" * LONG, REFUSED),
    ("benchmark", "steps", 0.5, REFUSED),
    *(("benchmark", name, value, REFUSED, name) for name, value in {"width": 0, "steps": 0, "cfg": -1.0}.items()),
    ("benchmark", "length", 9, OURS, "length = 9"),
    ("benchmark", "trace", 2, RAN),
    ("save", "filename", "../../etc/passwd", REFUSED),
    ("save", "filename", "CON", REFUSED),
    ("save", "filename", "a" * 101, REFUSED),
    ("load", "file", "../x.tckcache", RAN),
    ("load", "file", "\u202egnp.exe", RAN),
]


@pytest.fixture(scope="module")
def judge(server):
    return Judge(server)


@pytest.fixture
def prompt(server):
    """prompt("load"): a prompt in which nothing is wrong, with a tiny model, our node, the warmup and Load Compile Cache."""
    info = server.get("/object_info")
    size = {"width": 64, "height": 64, "batch_size": 1}
    tokens = {"name": "flux", "positive_tokens": 24, "negative_tokens": 24, "seed": 0}
    given = {"positive": ["prompts", 0], "negative": ["prompts", 1], "latent_image": ["latent", 0]}
    sampler = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0, **given}

    def make(*more):
        nodes = {
            "loader": {"class_type": "TestTinyModel", "inputs": {"name": "flux"}},
            "prompts": {"class_type": "TestTinyPrompts", "inputs": tokens},
            "latent": {"class_type": "EmptySD3LatentImage", "inputs": size},
            "sampler": {"class_type": "KSampler", "inputs": dict(sampler)},
            "saved": {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": "bad"}},
        }
        model = ["loader", 0]
        for name in dict.fromkeys(["compile", "warmup", *more]):
            inputs = {"model": model}
            for given_name, kind, options in inputs_in_order(info[NODES[name]]):
                if kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
                    inputs[given_name] = GOOD.get(given_name, options.get("default"))
                elif kind == "CONDITIONING":
                    inputs[given_name] = ["prompts", 1 if given_name == "negative" else 0]
            nodes[name] = {"class_type": NODES[name], "inputs": inputs}
            model = model if name == "benchmark" else [name, 0]
        nodes["sampler"]["inputs"]["model"] = model
        return nodes

    return make


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: "-".join(repr(part)[:20] for part in odd[:4]))
def test_an_odd_value_gets_a_clear_error_or_does_no_harm(judge, prompt, odd):
    node, name, value, outcome, *said = odd
    nodes = prompt(node)
    nodes[node]["inputs"][name] = value
    row = judge.judged(nodes)
    assert row["outcome"].replace("ran in part", REFUSED) == outcome, row
    assert all(words in row["message"] for words in said), row


@pytest.mark.parametrize("way", ["no class", "another class", "no inputs", "a text"])
def test_a_prompt_that_is_none(judge, prompt, way):
    """Beside a node that nobody knows, since a node without inputs alone ends the host's worker, with our nodes as without."""
    nodes = {**prompt(), "nobody's": {"class_type": "NobodyKnowsThis", "inputs": {}}}
    changes = {"no class": {"inputs": {}}, "another class": {"class_type": "TorchCompileKitNothing", "inputs": {}}}
    nodes["compile"] = {**changes, "no inputs": {"class_type": MODEL_NODE}, "a text": "abc"}[way]
    assert judge.judged(nodes)["outcome"] in ("no prompt", "the host cannot read the prompt")
    assert judge.judged(prompt())["outcome"] == RAN


@pytest.mark.parametrize(
    ("node", "name", "value"),
    [
        ("compile", "model", "nothing"),
        ("compile", "fullgraph", "latent of nothing"),
        ("compile", "cache_limit", "fraction"),
        ("compile", "only_blocks", "list"),
        ("compile", "mode", "tensor"),
        ("warmup", "model", "word"),
        ("warmup", "positive", "conditioning of text"),
        ("warmup", "negative", "nan"),
        ("warmup", "width", "word"),
        ("warmup", "height", "huge number of digits"),
        ("warmup", "cfg", "nan"),
        ("warmup", "extra_sizes", "empty latent"),
        ("warmup", "extra_sizes", "long text"),
        ("warmup", "latent_image", "tensor"),
        ("warmup", "latent_image", "flat latent"),
        ("warmup", "latent_image", "latent of nothing"),
    ],
)
def test_a_value_that_a_switch_lets_through_is_named(judge, prompt, node, name, value):
    """Nodes whose output is of any type, as many packs have them, pass the host's checks."""
    nodes = prompt()
    nodes["value"] = {"class_type": "TestValue", "inputs": {"value": value}}
    nodes[node]["inputs"][name] = ["value", 0]
    row = judge.judged(nodes)
    assert row["outcome"] == "our error", row
    assert row["message"].startswith(f"InvalidSetting: {name} = ")


def test_a_linked_setting_is_not_judged_before_it_runs(judge, prompt, server):
    """A switch may hold the backend; the log said "getting ready to compile failed" at each such prompt."""
    nodes = prompt()
    nodes["value"] = {"class_type": "TestValue", "inputs": {"value": "eager"}}
    nodes["compile"]["inputs"]["backend"] = ["value", 0]
    before = len(server.log())
    assert judge.judged(nodes)["outcome"] == "ran"
    assert "getting ready to compile failed" not in server.log()[before:]


def test_a_wrong_answer_is_seen(judge):
    """The judge can say no: our node raising anything else, and a traceback of ours that nobody was told of."""
    error = {"node_id": "warmup", "node_type": "W", "exception_type": "TypeError", "exception_message": "no", "traceback": []}
    entry = {"status": {"messages": [("execution_error", error)], "status_str": "error"}}
    with pytest.raises(Exception, match="W raises TypeError: no"):
        judge._outcome({"warmup": {}}, {"warmup"}, {"prompt_id": "x"}, entry)
    said = 'Traceback (most recent call last):\n  File "/x/torch-compile-kit/engine/watch.py", line 1, in f\nKeyError: 5\nmore'
    assert [error for _, error in tracebacks(said)] == ["KeyError"]
    row = {"log_bytes": len(said), "outcome": "ran"}
    with pytest.raises(Exception, match="a traceback of ours in the log: KeyError"):
        judge._check_log(said, 0, row)
    with pytest.raises(Exception, match="bytes of log"):
        judge._check_log(said, 0, {**row, "log_bytes": 10**6})
    judge._check_log(said.replace("KeyError", "x.engine.errors.InvalidSetting"), 0, row)
