"""Weights under dynamic VRAM in another dtype than the model computes in: layers cast these weights, as the host's do."""

import comfy.model_management
import pytest
import sweep
import torch
import zoo
from paging import paged
from patching import Runs
from support import relative_error, wait_until_compiled
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


SMALL = 2**11  # bytes, for tiny models; the host's limit is 16 KiB
NAMES = sorted(zoo.SETUPS.keys() - {"wan_causal_cached"})  # whose inputs have a cache in fp32


def to_bf16(network):
    """Have the network compute in bf16, by classes that cast no weights, as the host builds a model for a dtype."""
    network.to(torch.bfloat16).dtype = torch.bfloat16
    comfy.model_management.archive_model_dtypes(network)


class MixedDtypes(TorchDispatchMode):
    """Note operators that get floating-point tensors of several dtypes, which their CUDA kernels refuse and those of a CPU do
    not all."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        dtypes = {value.dtype for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()}
        if len(dtypes) > 1 and any(word in function.overloadpacket.__name__ for word in ("norm", "mm", "linear", "conv")):
            self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_small_weights_in_the_dtype_of_the_file(name, engine, monkeypatch):
    """The host loads layers of at most 16 KiB as in the file, norms for instance, whatever dtype the model computes in."""
    setup = zoo.SETUPS[name]
    model = setup.build()
    setup.patcher(model)  # leaves what the host keeps on a model
    network = model.diffusion_model
    to_bf16(network)
    for module in network.modules():
        if hasattr(type(module), "comfy_cast_weights") and sum(p.nbytes for p in module.parameters(recurse=False)) <= SMALL:
            module.float()

    def mixed(*compiler):
        sweep.clear_state(network)
        with paged(monkeypatch, model) as pages, MixedDtypes() as mode:
            pages.resident = set(pages.layers)
            sweep.call(model, setup.inputs(model=model, size=0, batch=1), *compiler)
        return mode.names

    settings = engine("settings").CompileSettings(backend="eager", compile_when="before first image")
    assert mixed() == mixed(engine("host.model.wrapper").BlockCompiler(model, settings)) == set()


@pytest.mark.parametrize("when", ["in background", "before first image"])
def test_a_compute_dtype_that_a_node_has_chosen(tiny, engine, monkeypatch, when):
    """As ModelComputeDtype (comfy_extras/nodes_model_advanced.py) does; under dynamic VRAM the host forces no cast."""
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    to_bf16(runs.patcher.model.diffusion_model)
    patcher = runs.patcher.clone()
    patcher.add_object_patch("manual_cast_dtype", torch.float32)
    with paged(monkeypatch, patcher.model) as pages:
        pages.resident = set(pages.layers)
        expected = runs.run(patcher)
        compiled = runs.attach(patcher, compile_when=when)
        for _ in range(2):
            assert relative_error(runs.run(compiled), expected) < 1e-5
            wait_until_compiled(engine)
    assert runs.graphs and not runs.failures
