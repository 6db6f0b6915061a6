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
def block(engine):
    """The options of a call as they are, what a block gets of them, and the patch in them."""
    patch = Told()
    host = {"block": ("input", 4), "sigmas": 3, "shared": 1, "optimized_attention_override": patch, "patches": {}}

    def put(**patches):
        kept = {"patches": {}, "patches_replace": {}, "block": ("block", 0), "shared": 1}
        engine("transformer_options.outside").HostOptions(host).put_into(kept, patches, patch)
        return kept

    return host, put, patch


def test_it_gets_the_hosts_own_options(engine, block):
    host, put, patch = block
    kept = put()
    kept["of the block"] = 2
    got = kept["optimized_attention_override"](1, transformer_options=kept)
    assert got is host and patch.options["block"] == ("input", 4) and patch.options["sigmas"] == 3
    assert patch.options["of the block"] == 2 and patch.options["optimized_attention_override"] is patch
    assert kept["written"] == "by a patch" and "torch_compile_kit" not in host
    engine("transformer_options.filter").OptionsFilter.write_back(host, kept)
    assert host["optimized_attention_override"] is patch and "torch_compile_kit" not in host


def test_what_it_removes_is_gone(engine, block):
    host, put, patch = block
    patch.__class__ = Removes
    kept = put()
    kept["optimized_attention_override"](1, transformer_options=kept)
    engine("transformer_options.filter").OptionsFilter.write_back(host, kept)
    assert "shared" not in host and "shared" not in kept


class Removes(Told):
    def __call__(self, *_args, transformer_options):
        del transformer_options["shared"]


def test_what_options_hold_does_not_outlive_the_call(engine, block):
    """Without a collection of garbage, which comes late: they hold models and tensors."""
    host, put, patch = block
    host["held"] = Held()
    held = weakref.ref(host["held"])
    gc.disable()
    try:
        kept = put(attn1_output_patch=[patch])
        outside = kept["patches"]["attn1_output_patch"][0]
        outside(1, transformer_options=kept)
        host.clear()
        kept.clear()
        patch.options = None
        assert held() is None
    finally:
        gc.enable()
    assert outside(1, transformer_options={"of another call": 1})["written"] == "by a patch"


def test_it_gets_a_copy_that_a_block_makes(block):
    """The host's UNets: without the patches, with entries of their own (ldm/modules/attention.py)."""
    _host, put, patch = block
    kept = put()
    made = {k: v for k, v in kept.items() if not k.startswith("patches")} | {"n_heads": 8}
    kept["optimized_attention_override"](1, extra_options=made)
    assert patch.options == {
        "block": ("input", 4),
        "sigmas": 3,
        "shared": 1,
        "optimized_attention_override": patch,
        "n_heads": 8,
    }
    assert made["written"] == "by a patch" and "written" not in made["optimized_attention_override"]._options()._host


def test_it_gets_one_dict_of_arguments(block):
    """Wan's blocks (ldm/wan/model.py)."""
    host, put, _patch = block
    kept, seen = put(), []
    held = {"in": put(attn1_patch=[lambda arguments: seen.append(arguments) or 5])}
    (outside,) = held["in"]["patches"]["attn1_patch"]
    assert outside({"x": 1, "transformer_options": held["in"]}) == 5
    assert seen == [{"x": 1, "transformer_options": host}] and kept


def test_its_attributes_are_those_of_the_patch(block):
    """A newer host asks an override for `container_function`."""
    _host, put, patch = block
    override = put()["optimized_attention_override"]
    assert not hasattr(override, "container_function")
    patch.container_function = print
    assert override.container_function is print and callable(override)


def test_an_error_of_a_patch_is_told_from_errors_of_compiling(engine, block):
    _host, put, _patch = block

    def fails(*_args):
        raise ZeroDivisionError

    (outside,) = put(attn1_patch=[fails])["patches"]["attn1_patch"]
    with pytest.raises(ZeroDivisionError) as raised:
        outside(1)
    assert engine("ownership").is_of_another(raised.value)
    assert not engine("ownership").is_of_another(ZeroDivisionError())
