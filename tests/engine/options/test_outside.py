"""A patch called outside of the graphs gets what the host's own options hold, and what it writes is there for later ones."""

import gc
import weakref

import pytest


class Held:
    """A model, say."""


class Told:
    """Keeps what it is told, and writes to it."""

    def __init__(self):
        self.options = None

    def __call__(self, *_args, extra_options=None, transformer_options=None):
        options = transformer_options if extra_options is None else extra_options
        self.options = dict(options)
        options["written"] = "by a patch"
        return options


@pytest.fixture
def block():
    """The options of a call as they are, what a block gets of them, and the patch in them."""
    patch = Told()
    host = {"block": ("input", 4), "sigmas": 3, "shared": 1, "optimized_attention_override": patch, "patches": {}}
    kept = {"patches": {}, "patches_replace": {}, "block": ("block", 0), "shared": 1, "optimized_attention_override": patch}
    return host, kept, patch


def test_it_gets_the_hosts_own_options(engine, block):
    host, kept, patch = block
    engine("options.outside").call_outside([patch], kept, host)
    kept["of the block"] = 2
    got = kept["optimized_attention_override"](1, transformer_options=kept)
    assert got is host and patch.options["block"] == ("input", 4) and patch.options["sigmas"] == 3
    assert patch.options["of the block"] == 2 and patch.options["optimized_attention_override"] is patch
    assert kept["written"] == "by a patch" and "torch_compile_kit" not in host
    engine("options.filter").OptionsFilter.write_back(host, kept)
    assert host["optimized_attention_override"] is patch and "torch_compile_kit" not in host


def test_what_options_hold_does_not_outlive_the_call(engine, block):
    """Without a collection of garbage, which comes late: they hold models and tensors."""
    host, kept, patch = block
    host["held"] = kept["held"] = Held()
    kept["patches"] = {"attn1_output_patch": [patch]}
    held = weakref.ref(host["held"])
    gc.disable()
    try:
        engine("options.outside").call_outside([patch], kept, host)
        outside = kept["patches"]["attn1_output_patch"][0]
        outside(1, transformer_options=kept)
        host.clear()
        kept.clear()
        patch.options = None
        assert held() is None
    finally:
        gc.enable()
    assert outside(1, transformer_options={"of another call": 1})["written"] == "by a patch"


def test_it_gets_a_copy_that_a_block_makes(engine, block):
    """The host's UNets: without the patches, with entries of their own (ldm/modules/attention.py)."""
    host, kept, patch = block
    engine("options.outside").call_outside([patch], kept, host)
    made = {k: v for k, v in kept.items() if not k.startswith("patches")} | {"n_heads": 8}
    kept["optimized_attention_override"](1, extra_options=made)
    assert patch.options == {
        "block": ("input", 4),
        "sigmas": 3,
        "shared": 1,
        "optimized_attention_override": patch,
        "n_heads": 8,
    }
    assert made["written"] == "by a patch" and "written" not in host
