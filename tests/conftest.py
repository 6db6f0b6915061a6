"""Runs the tests inside the real host: its modules, its options, its way of loading the pack. Nothing is mocked."""

import asyncio
import atexit
import gc
import importlib
import importlib.util
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = Path(tempfile.mkdtemp(prefix="torch-compile-kit-tests-"))
atexit.register(shutil.rmtree, BASE, ignore_errors=True)

# `python -m pytest` puts ROOT there, and then our nodes/ and tests/ shadow ComfyUI's modules of those names.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() != ROOT]
# Tiny tensors are slower on two threads than on one, and progress bars fill the log.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
# Without vector code: with it, each process tries the CPU's vector units with up to six C++ programs, and a Python with PyTorch
# for each: 15 s of a core.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# After each graph PyTorch else looks for garbage, 3 ms.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Each source is compiled by g++ once in the session, also in processes whose caches are their own, and in xdist's workers; CI
# gives all its sessions one folder.
os.environ.setdefault("TORCH_COMPILE_KIT_COMPILED", str(BASE / "compiled"))
COMPILERS = f"{ROOT / 'tests' / 'compilers'}{os.pathsep}"
if shutil.which("g++") and not os.environ["PATH"].startswith(COMPILERS):
    os.environ["PATH"] = COMPILERS + os.environ["PATH"]
# One cache for the session: no test profits from an earlier session, and each graph is built only once.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(BASE / "inductor")


sys.path.append(str(ROOT / "tests"))  # `support` and `zoo`
from not_looked_at import pytest_terminal_summary  # noqa: E402, F401


def load_devtools():
    folder = ROOT / "devtools"
    spec = importlib.util.spec_from_file_location("devtools", folder / "__init__.py", submodule_search_locations=[str(folder)])
    sys.modules["devtools"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


load_devtools()
from devtools import inprocess  # noqa: E402

try:
    inprocess.enter_host(BASE)
except RuntimeError as error:
    pytest.exit(str(error), returncode=2)

from tqdm import tqdm  # noqa: E402

# Its own is shared with processes that are forked: one that is killed may keep it for ever.
tqdm.set_lock(threading.RLock())


def pytest_configure(config):
    # The default ends this process at once and leaves its server running.
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))


def pytest_collection_finish(session):
    """What there is now stays: looking through it for garbage again and again takes a twentieth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 25, 50)
    # pytest captures the messages of each logger that does not propagate. While this one has such a handler, PyTorch writes
    # each graph, its guards and stacks as text for a trace that nobody asked for.
    logging.getLogger("torch.__trace").propagate = True


def pytest_collection_modifyitems(config, items):
    """Without a CUDA device its tests do not count, not even as skipped; `pytest -m gpu` runs them where there is one."""
    # The first process gets the first tests: those that share a server.
    items.sort(key=lambda item: item.get_closest_marker("server") is None)
    if inprocess.has_gpu():
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing:
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in set(needing)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """pytest lists all loggers after each test, to which the thread that imports the compiler adds some."""
    try:
        return (yield)
    finally:
        for thread in threading.enumerate():
            if thread.name == "torch-compile-kit import":
                thread.join()


# The name under which the host's loader puts the pack (nodes.py, `load_custom_node`).
PACKAGE = str(ROOT).replace(".", "_x_")


@pytest.fixture(scope="session")
def pack(engine):
    """The pack as the host's own loader loads it: a package named by its path."""
    import nodes

    assert asyncio.run(nodes.load_custom_node(str(ROOT))), "the host did not load the pack; see its log above"
    # The host collects garbage whenever it loads a model: a second among two million objects of imports.
    gc.collect()
    gc.freeze()
    return sys.modules[PACKAGE]


@pytest.fixture(scope="session")
def pack_module(pack):
    """A function: pack_module("nodes.model") is that module of the loaded pack."""
    return lambda name: importlib.import_module(f".{name}", PACKAGE)


@pytest.fixture(scope="session")
def engine():
    """A function: engine("settings") is the module engine/settings.py. Does not load the host; engine("host. ...") does."""

    def load(name):
        if PACKAGE not in sys.modules:
            # The host's loader finds these modules loaded: there is one copy of the engine in the process either way.
            sys.modules[PACKAGE] = package = types.ModuleType(PACKAGE)
            package.__path__ = [str(ROOT)]
        module = importlib.import_module(f".engine.{name}", PACKAGE)
        without_bounds()
        return module

    return load


def without_bounds():
    """On a machine that is busy blocks would be traced in later calls than those of a test; see `test_trace_limits.py`."""
    binding = sys.modules.get(f"{PACKAGE}.engine.compile.binding")
    if binding is not None and not hasattr(binding, "bounds_taken_off"):
        binding.bounds_taken_off = True
        binding.CALL_SECONDS = binding.RUN_SECONDS = math.inf


@pytest.fixture(scope="module", autouse=True)
def survivors_frozen():
    """What the modules before have left stays, too: tests and the host collect all garbage often, up to a second each time."""
    if len(gc.get_objects()) > 300_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def in_the_host(request):
    """Tests marked `host` run with the pack loaded, as in a server."""
    if request.node.get_closest_marker("host"):
        request.getfixturevalue("pack")
    yield
    if "comfy.model_management" in sys.modules:
        # For each model in this list that is alive without its patcher the host collects all garbage in every run: a second.
        sys.modules["comfy.model_management"].current_loaded_models.clear()


@pytest.fixture(scope="session")
def tiny(pack):
    """The module that builds tiny models of the host's classes."""
    from devtools import tiny_models

    return tiny_models


@pytest.fixture(scope="session")
def model_files():
    """Paths of the tiny model files by name, in the folders where the host's loaders look."""
    return inprocess.write_models(BASE)


@pytest.fixture(scope="session")
def server(model_files):
    """A real server with the pack, the tiny models, and nodes that load those which the host's loaders do not."""
    from devtools.server import Server

    (BASE / "custom_nodes").mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests" / "tiny_nodes.py", BASE / "custom_nodes")
    environment = {"TINY_MODELS": str(ROOT / "devtools" / "tiny_models.py")}
    with Server(inprocess.host_folder(), BASE, inprocess.has_gpu(), environment=environment) as running:
        yield running


@pytest.fixture
def inference_mode():
    """As the host runs prompts."""
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture
def everywhere(engine, monkeypatch):
    """Our inductor, which does on the CPU what it does on CUDA devices, the host's kernels in the open."""
    import comfy_kitchen  # noqa: F401  the host's kernels

    module = engine("inductor.backend")
    engine("inductor.rotary_norms").register()
    monkeypatch.setattr(module, "is_nvidia", lambda device: True)
    return module


CONFIGS = "torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"


def compiler_settings():
    """Every setting of PyTorch's compiler; a test that imported none of it has none."""
    modules = [sys.modules[name] for name in CONFIGS if name in sys.modules]
    return {(module.__name__, name): value for module in modules for name, value in module.get_config_copy().items()}


def wait_for_the_compiler():
    """A reset beside a thread that compiles ends the process, and its settings hold meanwhile."""
    thread = sys.modules.get(f"{PACKAGE}.engine.background.thread")
    if thread is not None:
        assert thread.compiler.wait(120), "the test left something being compiled"


@pytest.fixture(autouse=True)
def settings_restored():
    """No test leaves a setting of PyTorch changed: the tests after it would fail, or pass, for no reason of their own."""
    before = compiler_settings()
    yield
    wait_for_the_compiler()
    after = compiler_settings()
    assert {name: value for name, value in after.items() if name in before and value != before[name]} == {}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No test sees the compiled code of another. Only after tests that compiled something."""
    yield
    wait_for_the_compiler()
    if "torch._dynamo" not in sys.modules:
        return
    import torch._dynamo

    if torch._dynamo.convert_frame.input_codes.seen or torch._dynamo.utils.counters:
        registry = sys.modules.get(f"{PACKAGE}.engine.compile.registry")
        if registry is not None:
            # A model that a traceback keeps alive would share its compiled code with the next one of its structure.
            registry._groups.clear()
            registry._recent.clear()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
