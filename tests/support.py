"""Shared by the tests: blocks and models of plain PyTorch, and ways to look at the engine."""

import functools
import gc
import importlib.util
import itertools
import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


class Block(nn.Module):
    """A small residual block with an option, as DiT blocks have."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x, scale=None, transformer_options={}):  # noqa: B006  as the host writes it
        y = self.outer(torch.relu(self.inner(self.norm(x))))
        if scale is not None:
            y = y * scale
        for patch in transformer_options.get("patches", {}).get("attn1_output_patch", []):
            y = patch(y, transformer_options)
        return x + y


class Plain(nn.Module):
    """A block without a kernel of inductor's own, which a C++ compiler would take seconds to build."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x)


class Counting(Block):
    """Keeps a sum in a tensor that is no buffer."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = torch.zeros(())

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class CountingInAList(Block):
    """Keeps it in a list, where nothing that looks through a module's attributes finds it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = [torch.zeros(())]

    def forward(self, x):
        self.seen[0] += 1
        return super().forward(x)


class Net(nn.Module):
    """A model in which `count` blocks repeat."""

    def __init__(self, block=Block, count: int = 3, width: int = 8):
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(count))
        self.requires_grad_(False)

    def forward(self, x, **kwargs):
        x = self.entry(x)
        for i, block in enumerate(self.blocks):
            if "transformer_options" in kwargs:
                kwargs["transformer_options"]["block_index"] = i
            x = block(x, **kwargs)
        return x


class Held:
    """A backend of torch.compile that stands still: compiling has begun, and goes on when it may.

    Args:
        compile: what the backend does then; the graph as it is, if left out.
    """

    def __init__(self, compile=lambda graph, _inputs: graph):
        self.compile, self.calls = compile, 0
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, graph, inputs):
        self.calls += 1
        self.begun.set()
        assert self.go_on.wait(60)
        return self.compile(graph, inputs)


_numbers = itertools.count()


@functools.cache
def _unchecked(settings: type) -> type:
    return type("UncheckedSettings", (settings,), {"__post_init__": lambda self: None})


def eager_blocks(code):
    """The blocks that run eager, by class, by the name of the reason."""
    return {reason.name: dict(blocks) for reason, blocks in code.eager.items() if blocks}


def lower_here(engine, name):
    """Have the worker thread lower graphs of a backend, as the compile process does those of inductor: from what is written
    down of them, with settings that hold there. No C++ is compiled. See `_lowered`."""
    traced_graph, wire = engine("compile.traced_graph"), engine("compile_process.wire")
    settings = engine("compile_process.lowering_settings")

    def anew(text, backend):
        described = json.loads(text)
        with engine("inductor.kitchen").products_as_operators():
            graph, inputs, mode = wire.loads(described["graph"])
            functions = settings.cacheable_functions(graph)
            with torch._inductor.config.patch(unsafe_marked_cacheable_functions=functions, freezing=False):
                torch._functorch._aot_autograd.autograd_cache.check_cacheable(graph)  # else it could not be sent back
            with settings.for_graph(described["settings"]), torch._guards.tracing(torch._guards.TracingContext(mode)):
                code = backend(graph, list(inputs))
        return code, wire.guards_of(inputs, mode)

    def lower(request, _block, _patient):
        backend = torch._dynamo.lookup_backend(name)
        if not backend.__module__.startswith("torch."):  # a test's, which is called for each graph
            code, guards = anew(request.text, backend)
        else:
            if (name, request.text) not in _lowered:
                _lowered[name, request.text] = anew(request.text, backend)
            code, guards = _lowered[name, request.text]
        return code, engine("compile_process.artefact").Code(b"", guards)

    traced_graph.LOWERERS[name] = lower


# By backend of PyTorch's and what is written down of a graph: its code and guards. Tests have the same few models, and to read
# a graph takes half as long as to trace it.
_lowered: dict[tuple[str, str], tuple] = {}


def prebuild_command():
    """prebuild.py, as a module."""
    spec = importlib.util.spec_from_file_location("prebuild", ROOT / "prebuild.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_compile_process(engine, patch):
    """Have graphs be lowered in the call that traced them."""
    client = engine("compile_process.client")
    patch.setattr(client.compile_process, "refusal", client.Refusal(client.Unavailable, "it is not for this test"))


class NoCompiler:
    """In place of the compile process: its artefact is the graph that it was sent, and no C++ is compiled.

    The store, claims and the worker thread are as with inductor.

    Args:
        replace: `setattr`, or pytest's.
        seconds: that lowering takes.
    """

    def __init__(self, engine, replace=setattr, seconds=0.0):
        self._code, self._loads = engine("compile_process.artefact").Code, engine("compile_process.wire").loads
        self.lowered, self.loaded, self.seconds = 0, 0, seconds
        traced_graph = engine("compile.traced_graph")
        process = engine("compile_process.obtain").compile_process
        replace(process, "lower", self.lower)
        replace(process, "start", nothing)
        replace(traced_graph, "load", self.load)
        replace(traced_graph, "import_ahead", threading.Thread)

    def lower(self, request, _patient=False, _measures=False):
        self.lowered += 1
        time.sleep(self.seconds)
        return self._code(request.encode())

    def load(self, code):
        self.loaded += 1
        graph, _inputs, _mode = self._loads(json.loads(code.artefact)["graph"])
        return graph.forward


def compile_settings(engine, backend="eager", **values):
    """CompileSettings that are not validated: any mode with any backend, also backends of a test's own.

    Args:
        backend: the name of a registered backend, or a function to register as one.
    """
    if callable(backend):
        function, backend = backend, f"backend_of_a_test_{next(_numbers)}"
        torch._dynamo.register_backend(function, name=backend)
    if backend != "inductor":
        lower_here(engine, backend)
    return _unchecked(engine("settings").CompileSettings)(backend=backend, **values)


class CompiledNet:
    """A model of plain PyTorch whose blocks run compiled: a call goes in, its result and the report's counters come out.

    The one place where tests of behaviour know how the engine is driven. Models that a host runs: `patching.Runs`.

    Args:
        net: the model; its blocks are found as those of a real one.
        settings: of `compile_settings`.
    """

    def __init__(self, engine, net, **settings):
        self.engine, self.net, self.settings = engine, net, compile_settings(engine, **settings)

    def __call__(self, *args, **kwargs):
        """A call that waits for no code, as in the default mode; its result, and whether a block ran eager for want of code."""
        return self._call(False, args, kwargs)

    def at_once(self, *args, **kwargs):
        """A call for which the code that is missing is compiled; its result."""
        return self._call(True, args, kwargs)[0]

    def call(self, at_once, *args, **kwargs):
        """A call in either way; its result, when the code for the next call is there."""
        result = self._call(at_once, args, kwargs)[0]
        self.wait()
        return result

    def _call(self, waits, args, kwargs):
        call = self.engine("background.model_call").ModelCall(synchronous=waits)
        blocks = self.engine("compile.binding").Binding(self.net, self.settings, call).bound()
        with self.engine("compile.session").watching, blocks:
            result = self.net(*args, **kwargs)
        return result, call.uncompiled

    def wait(self):
        """Until no code is being made in the background; the number of graphs that there are then."""
        assert self.engine("background.thread").compiler.wait(300), "code is still being made"
        return self.graphs

    def new_run(self):
        """A sampling run begins."""
        self.engine("compile.registry").code_of(self.net).new_run()

    @property
    def is_being_compiled(self):
        return self.engine("background.thread").compiler.busy

    @property
    def _groups(self):
        return list(self.engine("compile.registry").code_of(self.net).groups.values())

    @property
    def graphs(self):
        return sum(group.stats.graphs for group in self._groups)

    @property
    def compiles(self):
        """How often code has come or gone, for CUDA graphs that hold code."""
        return self.engine("compile.registry").code_of(self.net).compiles

    @property
    def graph_breaks(self):
        return sum(group.stats.graph_breaks for group in self._groups)

    @property
    def failures(self):
        """Why groups of blocks run eager, in the words of the report."""
        return [group.failure.message() for group in self._groups if group.failure]


def nothing() -> None:
    """A poll that never interrupts."""


def torch_settings() -> dict:
    """Every setting of dynamo, inductor, fx shapes and the backends that code of ours could have touched."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    import torch.fx.experimental._config as shape_config

    settings = {}
    for config in (torch._dynamo.config, inductor_config, functorch_config, shape_config):
        for name, value in config.get_config_copy().items():
            # Equal sets may be written in different orders.
            settings[f"{config.__name__}.{name}"] = repr(sorted(value, key=repr) if isinstance(value, set) else value)
    settings["tf32"] = torch.backends.cuda.matmul.allow_tf32
    settings["cudnn"] = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)
    settings["folders"] = (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR"))
    settings["libdevice"] = os.environ.get("TRITON_LIBDEVICE_PATH")
    settings["attention_order"] = list(torch._C._get_sdp_priority_order())
    settings["gc"] = gc.isenabled()
    settings["default_dtype"] = torch.get_default_dtype()
    settings["threads"] = torch.get_num_threads()
    settings["stance"] = repr(torch._dynamo.eval_frame._stance)
    dynamo = torch._dynamo
    replaced = dynamo.variables.lists.iter_contains, dynamo.symbolic_convert.get_funcname, dynamo.guards.profile_guard_manager
    settings["tracing"] = repr(replaced)
    settings["callbacks"] = (
        len(torch._dynamo.callback.callback_handler.start_callbacks),
        len(torch._dynamo.callback.callback_handler.end_callbacks),
    )
    return settings


def wait_until_compiled(engine) -> None:
    """Return when nothing is left to compile in the background."""
    assert engine("background.thread").compiler.wait(120), "code is still being made"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def without_codegen(monkeypatch):
    """Until the test ends inductor decomposes graphs, by our table too, and runs them eager: no code is written or compiled.

    Returns:
        The decomposed graphs as text, one for each that was compiled.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx

    graphs = []

    def compiler(graph, _inputs):
        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    def decompose(graph, inputs, **_options):
        return aot_autograd(fw_compiler=compiler, decompositions=compile_fx.select_decomp_table())(graph, inputs)

    monkeypatch.setattr(compile_fx, "compile_fx", decompose)
    return graphs


def brief_codegen():
    """Settings of inductor for a cache of few graphs: compiling C++ headers and vector code takes longer than they save."""
    from torch._inductor import config

    headers = {"cpp_cache_precompile_headers": False} if hasattr(config, "cpp_cache_precompile_headers") else {}
    return {"cpp.simdlen": 1, **headers}


def compiled_code(function, backend, given):
    """PyTorch's caches know the operators of a graph, not what we put in their place: each test has a cache of its own."""
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache, run_and_get_code

    torch._dynamo.reset()
    with fresh_cache(), config.patch(brief_codegen()):
        result, code = run_and_get_code(torch.compile(function, backend=backend, dynamic=False), *given)
    assert len(code) == 1
    return result, "".join(code)
