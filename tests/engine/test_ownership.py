"""Whose code something is."""

import copy
import dataclasses
import functools
import logging
import os
import sys
import sysconfig
import types
import weakref
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from support import Net
from torch import nn

HERE = Path(__file__).name
LIBRARY = sysconfig.get_path("stdlib")
PACKAGES = sysconfig.get_path("purelib")
FILES = {
    "/opt/ComfyUI/custom_nodes/IPAdapter_plus/IPAdapterPlus.py": "IPAdapter_plus",
    "/opt/ComfyUI/custom_nodes/IPAdapter_plus/src/custom/nodes.py": "IPAdapter_plus",
    "/opt/ComfyUI/custom_nodes/one_file.py": "one_file.py",
    "/mnt/more/custom_nodes/KJNodes/__init__.py": "KJNodes",
    "/opt/ComfyUI/custom_nodes/ComfyUI-GGUF/ops.py": None,
    f"{PACKAGES}/nunchaku/models.py": "nunchaku",
    "/home/me/tries/patch.py": "patch.py",
    "/home/me/tries/__init__.py": "tries",
    torch.nn.functional.__file__: None,
    functools.__file__: None,
    os.path.join(LIBRARY, "collections", "__init__.py"): None,
}


@pytest.mark.parametrize("file, pack", FILES.items())
def test_a_file_belongs_to_a_pack_or_to_the_host(engine, file, pack):
    assert engine("ownership").pack_of_file(file) == pack


@pytest.fixture
def comfy(monkeypatch, tmp_path):
    """The folder of a ComfyUI with the environment of its Python inside, where `comfy` is from."""
    for name in ("comfy", "comfy.fake"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["comfy"].__path__ = [str(tmp_path / "comfy")]
    sys.modules["comfy.fake"].__file__ = str(tmp_path / "comfy" / "fake.py")
    return tmp_path


@pytest.mark.parametrize(
    "file, pack",
    {
        "comfy/ops.py": None,
        "comfy_extras/nodes_flux.py": None,
        "execution.py": None,
        "custom_nodes/a_pack/b.py": "a_pack",
        "venv/lib/python3.12/site-packages/other/b.py": "other",
        "comfy_user/custom_nodes/a_pack/b.py": "a_pack",
        "comfy-env/lib/python3.12/site-packages/other/b.py": "other",
        "user/x.py": "x.py",
    }.items(),
)
def test_of_comfyuis_folder_only_its_own_code_is_the_hosts(engine, comfy, file, pack):
    ownership = engine("ownership")
    ownership.pack_of_file.cache_clear()
    assert ownership.pack_of_file(str(comfy / file)) == pack


def test_a_folder_that_comfyui_is_in_may_be_called_as_that_of_packs(engine, comfy, monkeypatch):
    ownership, inside = engine("ownership"), comfy / "custom_nodes" / "ComfyUI" / "comfy"
    monkeypatch.setattr(sys.modules["comfy"], "__path__", [str(inside)])
    ownership.pack_of_file.cache_clear()
    assert ownership.pack_of_file(str(inside / "ops.py")) is None


def test_the_copy_of_a_module_has_a_forward_of_its_own(engine):
    """Trainers copy a model to average its weights."""
    block = nn.Linear(1, 1)
    forward = engine("ownership").OwnForward(
        lambda reference, x: nn.functional.linear(x, reference().weight), weakref.ref(block)
    )
    block.__dict__["forward"] = forward
    copied = copy.deepcopy(nn.Sequential(block))[0]
    with torch.no_grad():
        copied.weight.fill_(7)
    assert copied(torch.ones(1)).item() == 7 and block(torch.ones(1)).item() == block.weight.item()
    assert copy.deepcopy(forward).args == forward.args, "alone it is of the same module"


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Params:
    theta: float = 1.0


def by_exec(module):
    names = {"__name__": module}
    exec("def made(): pass", names)  # noqa: S102
    return names["made"]


OWNERS = {
    "a function": (nn.functional.linear, None),
    "one of C": (torch.relu, None),
    "a class": (nn.Linear, None),
    "an object": (nn.Linear(1, 1), None),
    "a method": (nn.Linear(1, 1).forward, None),
    "a method here": (Params().__init__, HERE),
    "a partial": (functools.partial(nn.functional.linear, 1), None),
    "a partial here": (functools.partial(functools.partial(by_exec), 1), HERE),
    "a function here": (by_exec, HERE),
    "a class here": (Params, HERE),
    "its generated method": (Params.__init__, HERE),
    "an object here": (Params(), HERE),
    "a function without a file": (by_exec("torch.nn"), None),
    "one that names a pack": (by_exec("/x/custom_nodes/a_pack"), "a_pack"),
    "one of nowhere": (by_exec("nowhere"), "nowhere"),
}


@pytest.mark.parametrize("value, pack", OWNERS.values(), ids=OWNERS)
def test_functions_classes_and_objects(engine, value, pack):
    assert engine("ownership").pack_of(value) == pack


def net():
    made = nn.Sequential(nn.Linear(4, 4))
    made.blocks = nn.ModuleList([nn.LayerNorm(4), nn.Linear(4, 4)])
    return made.requires_grad_(False)


def on_class(cls, name, value):
    def change(_net, monkeypatch):
        monkeypatch.setattr(cls, name, value, raising=False)

    return change


def on_layer(name, value):
    return lambda net, _monkeypatch: setattr(net.blocks[1], name, value)


def foreign(*_args, **_kwargs): ...


def as_a_class(net, _monkeypatch):
    net.blocks[1].__class__ = type("Mine", (nn.Linear,), {})


def on_an_object_behind_a_name(_net, monkeypatch):
    names = {"__name__": "torch.made", "act": nn.ReLU()}
    names["act"].forward = foreign
    exec(compile("def layer_norm(*args, act=act): return args[0]", torch.__file__, "exec"), names)  # noqa: S102
    monkeypatch.setattr(nn.functional, "layer_norm", names["layer_norm"])


FOREIGN = {
    "a forward": on_layer("forward", foreign),
    "a private attribute": on_layer("_call", foreign),
    "a partial": on_layer("forward", functools.partial(nn.functional.linear, foreign)),
    "a method of an object": on_layer("forward", Params(1.0).__eq__),
    "in a container": on_layer("weight_function", [("x", {"y": foreign})]),
    "in a closure of the host's": on_layer("forward", torch.no_grad()(foreign)),
    "behind a cache": on_layer("forward", functools.lru_cache(foreign)),
    "an object": on_layer("params", Params()),
    "an object of a plain class": on_layer("params", types.SimpleNamespace(inner=types.SimpleNamespace(f=foreign))),
    "a module that is no child": on_layer("others", [Net()]),
    "a hook": lambda net, _: net.blocks[1].register_forward_hook(foreign),
    "a hook before": lambda net, _: net.register_forward_pre_hook(foreign),
    "a class": as_a_class,
    "a class of another layer": lambda net, _: setattr(net, "entry", Net()),
    "a method of a class": on_class(nn.Linear, "forward", foreign),
    "of a base class": on_class(nn.Module, "_call_impl", foreign),
    "a class method": on_class(nn.LayerNorm, "made", classmethod(foreign)),
    "a static method": on_class(nn.LayerNorm, "made", staticmethod(foreign)),
    "a property": on_class(nn.LayerNorm, "made", property(foreign)),
    "a function that a layer names": on_class(nn.functional, "layer_norm", foreign),
    "on an object behind a name": on_an_object_behind_a_name,
    "a method of tensors": on_class(torch.Tensor, "made", foreign),
    "a tensor's class": lambda net, _: setattr(net.blocks[1], "weight", nn.Parameter(torch.ones(4, 4).as_subclass(Mine))),
    "a tensor that is held": on_layer("mask", torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {}))),
}


class Mine(torch.Tensor): ...


def test_a_plain_network_is_the_hosts(engine):
    assert engine("ownership").survey_of(net().modules()).pack is None


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_what_is_foreign_in_a_network_is_named(engine, monkeypatch, change):
    network = net()
    change(network, monkeypatch)
    assert engine("ownership").survey_of(network.modules()).pack in (HERE, "support.py")


def test_a_hook_for_all_modules_is_foreign(engine):
    handle = nn.modules.module.register_module_forward_pre_hook(foreign)
    try:
        assert engine("ownership").survey_of(net().modules()).pack == HERE
    finally:
        handle.remove()


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_is_foreign(engine):
    with Mode():
        assert engine("ownership").survey_of(net().modules()).pack == HERE


def test_what_the_hosts_code_holds_is_told_by_value(engine):
    network, survey_of = net(), engine("ownership").survey_of
    layer = network.blocks[1]
    layer.strength, layer.scales, layer.mask, layer.cache = 1.0, [{"a": 0.0}], torch.zeros(3), {}
    values = survey_of(network.modules()).values
    assert survey_of(network.modules()).values == values
    assert [name for _, name in survey_of(network.modules()).tensors] == ["cache", "mask"]
    changes = [
        lambda: setattr(layer, "strength", 1),
        lambda: layer.scales[0].update(a=-0.0),
        lambda: setattr(layer, "mask", torch.zeros(3)),
        lambda: layer.cache.update(k=torch.zeros(1)),
    ]
    kept = [layer.mask]
    for change in changes:
        change()
        kept.append(layer.mask)
        assert survey_of(network.modules()).values != values
        values = survey_of(network.modules()).values
    layer.mask.fill_(1.0)
    del layer.strength
    layer.strength = 1
    assert survey_of(network.modules()).values == values, "data of tensors, and the order of attributes, do not count"


def test_what_a_patcher_notes_on_its_model_is_no_state_of_the_model(engine):
    """A ControlNet's patcher holds the network itself (comfy/model_patcher.py, `ModelPatcherDynamic`)."""
    network, survey_of = net(), engine("ownership").survey_of
    network.dynamic_pins, network.dynamic_patchers, network.model_loaded_weight_memory = {"cuda": [[], 0]}, {1}, 0
    values = survey_of(network.modules()).values
    network.dynamic_pins["cuda"] = [[1], 4096]
    network.dynamic_patchers.add(2)
    network.model_loaded_weight_memory = 4096
    assert survey_of(network.modules()).values == values


def test_options_are_foreign_by_what_they_hold(engine):
    in_options = engine("ownership").foreign_in_options
    ours = engine("attention_kernels").override_for("flash")
    host = torch.nn.functional.silu
    assert (
        in_options({"sigmas": torch.ones(1), "cond_or_uncond": [0], "optimized_attention_override": ours, "x": {"y": host}})
        is None
    )
    for options in (
        {"x": [{"y": foreign}]},
        {"x": Params()},
        {"patches": {"attn1_patch": [foreign]}},
        {"patches": {"attn1_patch": [functools.partial(host, foreign)]}},
        {"wrappers": {"apply_model": {"key": [foreign]}}},
        {"callbacks": {"on_pre_run": {None: [Params().__eq__]}}},
        {"transformer_options": {"patches_replace": {"dit": {("double_block", 0): foreign}}}},
    ):
        assert in_options(options) == HERE, options
    assert in_options({"patches": {"attn1_patch": [host]}}) == "functional", "patches of the host keep state as well"
    assert in_options({"patches": {"attn1_patch": []}}) is None


def test_a_module_that_another_node_compiles(engine):
    is_compiled = engine("ownership").is_compiled_elsewhere
    layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    other.compile()
    assert [is_compiled(value) for value in (layer, other, torch.compile(layer), object())] == [False, True, True, True]


def test_pythons_own_library_may_lie_in_a_zip_file(engine, monkeypatch):
    """As in Windows portable: code has relative paths, and modules are inside of an archive."""
    ownership = engine("ownership")
    code = logging.warning.__code__.replace(co_filename=os.path.join("logging", "__init__.py"))
    assert ownership.pack_of(types.FunctionType(code, vars(logging))) is None
    monkeypatch.setattr(logging, "__file__", r"C:\ComfyUI\python_embeded\python313.zip\logging\__init__.pyc")
    assert ownership.pack_of(logging.Logger) is None
    monkeypatch.setattr(logging, "__file__", os.path.join(os.sep, "ComfyUI", "custom_nodes", "pack", "logging.py"))
    assert ownership.pack_of(logging.Logger) == "pack"
