"""Inputs that nobody should give: refused by the host, named by an error of ours, or harmless; the server is well then."""

import math

import pytest
from judging import Judge, tracebacks
from tiny_workflows import workflow

from devtools.prompts import BENCHMARK_NODE, MODEL_NODE

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]
REFUSED, OURS, RAN = "refused before it runs", "our error", "ran"
LONG = 10_000_000
WIDE = "\uff16\uff14"  # 64 in digits that Python reads and our sizes do not
SIZE = {"width": 64, "height": 64, "length": 1, "batch_size": 1, "cfg": 1.0}
GIVEN = {"positive": ["prompts", 0], "negative": ["prompts", 1]}
MORE = {
    "benchmark": (BENCHMARK_NODE, {**SIZE, **GIVEN, "steps": 2, "trace": False}),
    "save": ("TorchCompileKitSaveCache", {"filename": "bad prompts"}),
    "load": ("TorchCompileKitLoadCache", {"file": "none"}),
}
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


def prompt_with(more=None):
    """A prompt in which nothing is wrong: a tiny model, our node, the warmup, and one of `MORE`."""
    nodes = workflow("flux", 1.0)
    nodes["latents"] = nodes.pop("save")
    if more in MORE:
        class_type, inputs = MORE[more]
        nodes[more] = {"class_type": class_type, "inputs": {"model": ["warmup", 0], **inputs}}
        if more != "benchmark":
            nodes["sampler"]["inputs"]["model"] = [more, 0]
    return nodes


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: "-".join(repr(part)[:20] for part in odd[:4]))
def test_an_odd_value_gets_a_clear_error_or_does_no_harm(judge, odd):
    node, name, value, outcome, *said = odd
    nodes = prompt_with(node)
    nodes[node]["inputs"][name] = value
    row = judge.judged(nodes)
    assert row["outcome"].replace("ran in part", REFUSED) == outcome, row
    assert all(words in row["message"] for words in said), row


@pytest.mark.parametrize("way", ["no class", "another class", "no inputs", "a text"])
def test_a_prompt_that_is_none(judge, way):
    """Beside a node that nobody knows, since a node without inputs alone ends the host's worker, with our nodes as without."""
    nodes = {**prompt_with(), "nobody's": {"class_type": "NobodyKnowsThis", "inputs": {}}}
    changes = {"no class": {"inputs": {}}, "another class": {"class_type": "TorchCompileKitNothing", "inputs": {}}}
    nodes["compile"] = {**changes, "no inputs": {"class_type": MODEL_NODE}, "a text": "abc"}[way]
    assert judge.judged(nodes)["outcome"] in ("no prompt", "the host cannot read the prompt")
    assert judge.judged(prompt_with())["outcome"] == RAN


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
def test_a_value_that_a_switch_lets_through_is_named(judge, node, name, value):
    """Nodes whose output is of any type, as many packs have them, pass the host's checks."""
    nodes = prompt_with()
    nodes["value"] = {"class_type": "TestValue", "inputs": {"value": value}}
    nodes[node]["inputs"][name] = ["value", 0]
    row = judge.judged(nodes)
    assert row["outcome"] == "our error", row
    assert row["message"].startswith(f"InvalidSetting: {name} = ")


def test_a_linked_setting_is_not_judged_before_it_runs(judge, server):
    """A switch may hold the backend; the log said "getting ready to compile failed" at each such prompt."""
    nodes = prompt_with()
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
