"""Each private name of PyTorch and each name of ComfyUI that the pack uses is there, and takes what the pack gives it.

A failure says what a newer version has changed, before any model runs. The names are found in the pack's code (`scan.py`);
`names.py` says what more some of them must do, and which versions have them.
"""

import importlib
import inspect
import re
import subprocess
import sys

import pytest
import torch
from support import ROOT

from canaries import names, scan

FOUND = scan.of_pack(ROOT)


def version(text):
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def running(name):
    if name.partition(".")[0] in ("torch", "triton") and not scan.is_of_host(name):
        return version(torch.__version__)
    return version(importlib.import_module("comfyui_version").__version__)


def is_in(use, now):
    """Whether a version is one of those that have what `use` describes; "2.14" stands for all of 2.14."""
    since, until = (version(bound) if bound else None for bound in (use.since, use.until))
    return (since is None or now[: len(since)] >= since) and (until is None or now[: len(until)] <= until)


def resolve(name):
    """(the object of that name, whether it is a method without its first argument)."""
    for prefix, of in names.INSTANCES.items():
        if name.startswith(f"{prefix}."):
            return attribute_of(of, name.removeprefix(f"{prefix}."))
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found, False
    raise ImportError(parts[0])


def attribute_of(owner, attribute):
    """An attribute of the objects of a class: the class has it, or its code gives it to `self`."""
    kind, _ = resolve(owner)
    if hasattr(kind, attribute):
        return getattr(kind, attribute), True
    if re.search(rf"\bself\.{attribute}\b[^=\n]*=", inspect.getsource(kind)):
        return None, False
    raise AttributeError(f"{owner} has no {attribute}, and gives none to its objects")


def check(found, use, calls, without_self=False):
    """That an object can be called as it is."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # no function, or one that is not Python's
        assert not use.takes, f"{found} has no signature"
        return
    if use.takes:
        assert tuple(signature.parameters)[: len(use.takes)] == use.takes
    for given, by_name, more in calls:
        bind = signature.bind_partial if more else signature.bind
        bind(*[None] * (given + without_self), **dict.fromkeys(by_name))


def calls_of(name, use):
    visible = set(FOUND.calls.get(name, ()))
    return visible if use.given is None else visible | {(use.given, use.by_name, False)}


USED = {name for name in FOUND.names if scan.is_private(name) or scan.is_of_host(name)} - names.NO_NAMES
PUT_TOGETHER = {name for name in USED if name.endswith(scan.COMPUTED)}
ALL = dict.fromkeys(sorted(USED - PUT_TOGETHER), names.READ) | names.USES | names.CALLERS
COMPUTED = [f"{owner.removesuffix(scan.COMPUTED)}{name}" for owner, found in names.COMPUTED.items() for name in found]
PATCHER = sorted({*FOUND.patcher, "is_dynamic"} - {"__class__"})  # getattr(patcher, "is_dynamic")
FOREIGN = {name: owner for owner, found in names.FOREIGN.items() for name in found.split()}


@pytest.mark.parametrize("name", ALL)
def test_name(name):
    uses = ALL[name] if isinstance(ALL[name], tuple) else (ALL[name],)
    use = next((use for use in uses if is_in(use, running(name))), None)
    if use is None:
        with pytest.raises((AttributeError, ImportError)):
            resolve(name)
        return
    found, without_self = resolve(name)
    check(found, use, calls_of(name, use), without_self)


@pytest.mark.parametrize("name", COMPUTED)
def test_name_that_is_put_together(name):
    resolve(name)


@pytest.mark.parametrize("name", PATCHER)
def test_attribute_of_patchers(name):
    """The host's class has it, or gives it to `self`; that of patchers under dynamic VRAM, if it is asked of these alone."""
    found, without_self = attribute_of(f"{scan.PATCHER}Dynamic" if name in names.DYNAMIC else scan.PATCHER, name)
    check(found, names.READ, calls_of(f"{scan.PATCHER}.{name}", names.READ), without_self)


@pytest.mark.parametrize("name", FOREIGN)
def test_private_attribute(name):
    owner, _ = resolve(FOREIGN[name])
    there = hasattr(owner, name)
    if not there and FOREIGN[name] not in ("os", "torch.Tensor"):
        there = re.search(rf"\b{name}\b", inspect.getsource(owner)) is not None
    assert there == is_in(names.Use(since=names.FOREIGN_SINCE.get(name)), running(FOREIGN[name]))


def test_every_listed_name_is_used_and_every_name_that_is_put_together_is_listed():
    assert set(names.USES) - USED - set(COMPUTED) == set(), "listed in tests/canaries/names.py, and nothing uses it"
    assert set(names.COMPUTED) == PUT_TOGETHER


def test_private_names_of_pytorch_are_named_in_one_package_alone():
    elsewhere = scan.of_pack(ROOT, private={}).names
    used = {name for name in FOUND.names for listed in scan.PRIVATE_NAMES.values() if f"{name}.".startswith(f"{listed}.")}
    outside = {name: files for name, files in elsewhere.items() if scan.is_private(name) and name.startswith("torch.")}
    assert outside == {}, "look it up in engine/torch_compat/private.py"
    assert [path for path in scan.PRIVATE_NAMES.values() if not any(f"{name}.".startswith(f"{path}.") for name in used)] == []


def test_every_private_attribute_that_is_not_the_packs_own_is_listed(engine):
    in_names = {part for name in [*ALL, *COMPUTED] for part in name.split(".")}
    used = {*FOUND.foreign, *engine("torch_compat.private").STATIC_MARKS}
    assert used - in_names - names.OWN_STRINGS == set(FOREIGN)


PLANTED = {
    "import torch._planted": "torch._planted",
    "from torch._inductor.planted import one as other\nother(1, key=2)": "torch._inductor.planted.one",
    "import torch\n\ndef f():\n    return torch.fx._planted.call": "torch.fx._planted.call",
    "from torch._dynamo import config\nhasattr(config, 'planted')": "torch._dynamo.config.planted",
    "import torch\ngetattr(torch._C, name)": "torch._C.<computed>",
    "late_method('torch._planted', 'Class', 'method')": "torch._planted.Class.method",
    "WAY = ('torch._planted', 'Class', 'method')": "torch._planted.Class.method",
    "import sys\nMODULE = 'torch._planted'\nmodule = sys.modules[MODULE]\nmodule.one()": "torch._planted.one",
    "import comfy.planted as other\nother.one": "comfy.planted.one",
    "ops, more = _module('comfy.ops'), _module('comfy.more')\ngetattr(ops, 'planted', None)": "comfy.ops.planted",
    "import sys\nserver = getattr(sys.modules.get('server'), 'PromptServer')\nserver.planted()": "server.PromptServer.planted",
    "import folder_paths\nfolder_paths.planted()": "folder_paths.planted",
}


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_use_is_found(code):
    found = scan.Found({"planted.py": code})
    assert PLANTED[code] in found.names
    assert scan.is_private(PLANTED[code]) or scan.is_of_host(PLANTED[code])


def test_a_planted_call_and_a_planted_attribute_are_found():
    code = "from torch._a import b\nb(1, *rest, key=2)\nself._patcher.planted(1)\nlayer._planted\nlayer._mine\nself._mine = 1"
    found = scan.Found({"planted.py": code})
    assert found.calls["torch._a.b"] == {(1, ("key",), True)}
    assert found.calls[f"{scan.PATCHER}.planted"] == {(1, (), False)} and set(found.patcher) == {"planted"}
    assert set(found.foreign) == {"_planted", "_patcher"}


def test_a_name_that_is_gone_or_takes_other_arguments_is_found():
    for name in ("torch._planted", "torch._dynamo.planted", "server.PromptServer.instance.planted"):
        with pytest.raises((AttributeError, ImportError)):
            resolve(name)
    with pytest.raises(TypeError):
        check(lambda one: None, names.READ, [(2, (), False)])
    with pytest.raises(TypeError):
        check(lambda one: None, names.READ, [(1, ("key",), True)])
    with pytest.raises(AssertionError):
        check(lambda self, other: None, names.replaced("self", "one"), [])
    assert is_in(names.Use(until="2.14"), (2, 14, 1)) and not is_in(names.Use(until="2.14"), (2, 15, 0))
    assert is_in(names.Use(since="2.13"), (2, 13, 0)) and not is_in(names.Use(since="2.13"), (2, 12, 1))


@pytest.mark.rest
def test_with_any_private_name_renamed_an_image_comes_out():
    done = subprocess.run([sys.executable, ROOT / "tests/canaries/renames.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
