"""A part of the fuzz (benchmarks/fuzz.py): random prompts, the same each time, and a server that is well after them."""

from collections import Counter

import pytest

from devtools.fuzz_prompts import Generator
from devtools.fuzzing import Fuzz, run_normal, tracebacks

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]
SEED = 1


@pytest.fixture(scope="module")
def fuzz(server):
    return Fuzz(server, SEED, quick=True)


@pytest.mark.parametrize("numbers", [range(16), pytest.param(range(16, 40), marks=pytest.mark.rest)], ids=["first", "more"])
def test_random_prompts_get_a_clear_error_or_run(fuzz, numbers):
    before = Counter(row["outcome"] for row in fuzz.rows)
    counts = fuzz.run(numbers) - before
    assert fuzz.wrong() == []
    # They reach what they are for: the host's checks, ours, and the sampler.
    assert counts["refused before it runs"] >= len(numbers) // 8 and counts["our error"] >= len(numbers) // 13
    assert counts["ran"] + counts["ran in part"] >= len(numbers) // 4


def test_a_normal_prompt_runs_after_them(fuzz):
    assert run_normal(fuzz) == ""


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
def test_a_value_that_a_switch_lets_through_is_named(fuzz, node, name, value):
    """Nodes whose output is of any type, as many packs have them, pass the host's checks."""
    prompt = fuzz.generator.normal()
    prompt["value"] = {"class_type": "TestValue", "inputs": {"value": value}}
    prompt[node]["inputs"][name] = ["value", 0]
    row = fuzz.judged(prompt)
    assert row["outcome"] == "our error", row
    assert row["message"].startswith(f"InvalidSetting: {name} = ")


def test_a_linked_setting_is_not_judged_before_it_runs(fuzz, server):
    """A switch may hold the backend; the log said "getting ready to compile failed" at each such prompt."""
    prompt = fuzz.generator.normal()
    prompt["value"] = {"class_type": "TestValue", "inputs": {"value": "eager"}}
    prompt["compile"]["inputs"]["backend"] = ["value", 0]
    before = len(server.log())
    assert fuzz.judged(prompt)["outcome"] == "ran"
    assert "getting ready to compile failed" not in server.log()[before:]


def test_the_same_number_is_the_same_prompt(fuzz, server):
    again = Generator(server.get("/object_info"), SEED, quick=True)
    assert repr(again.prompt(7)) == repr(fuzz.generator.prompt(7)) != repr(again.prompt(8))


def test_a_wrong_answer_is_seen(fuzz):
    """The judge can say no: our node raising anything else, and a traceback of ours that nobody was told of."""
    error = {"node_id": "warmup", "node_type": "W", "exception_type": "TypeError", "exception_message": "no", "traceback": []}
    entry = {"status": {"messages": [("execution_error", error)], "status_str": "error"}}
    with pytest.raises(Exception, match="W raises TypeError: no"):
        fuzz._outcome({"warmup": {}}, {"warmup"}, {"prompt_id": "x"}, entry)
    said = 'Traceback (most recent call last):\n  File "/x/torch-compile-kit/engine/watch.py", line 1, in f\nKeyError: 5\nmore'
    assert [error for _, error in tracebacks(said)] == ["KeyError"]
    row = {"log_bytes": len(said), "outcome": "ran"}
    with pytest.raises(Exception, match="a traceback of ours in the log: KeyError"):
        fuzz._check_log(said, 0, row)
    with pytest.raises(Exception, match="bytes of log"):
        fuzz._check_log(said, 0, {**row, "log_bytes": 10**6})
    fuzz._check_log(said.replace("KeyError", "x.engine.errors.InvalidSetting"), 0, row)
