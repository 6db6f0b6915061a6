"""The faults that need no process of their own; see `table.HERE`. Each on a whole model of the host."""

import threading
import weakref

import comfy.model_management
import pytest
import torch
from patching import Runs
from support import compile_settings, relative_error, torch_settings

BACKEND = "as_planned"


class Compiler:
    """A backend of torch.compile that does as planned: an action for each call, then it compiles.

    Args:
        plan: what to do in the next calls; an action that is None does nothing.
    """

    def __init__(self):
        self.plan, self.calls, self.always = [], 0, None
        self.after_code = lambda: None

    def __call__(self, graph, _inputs):
        self.calls += 1
        action = self.plan.pop(0) if self.plan else self.always
        if action is not None:
            action()

        def code(*args):
            result = graph(*args)
            self.after_code()
            return result

        return code


class Case(Runs):
    """A model, whose code is made in the background or at once, by a compiler that does as planned."""

    def __init__(self, tiny, engine, name, moment, monkeypatch, caplog):
        super().__init__(tiny, engine, name, cfg=4.0)
        self.moment, self.monkeypatch, self.caplog = moment, monkeypatch, caplog
        self.behind = moment == "background"
        self.thread = engine("background.thread").compiler
        self.compiler = Compiler()
        self.network = self.patcher.model.diffusion_model
        self.expected = self.plain()
        self.keys = list(self.network.state_dict())
        torch._dynamo.register_backend(self.compiler, name=BACKEND)
        self.settings_before = torch_settings()
        self.compiled = self.attached()

    def attached(self, **chosen):
        if self.name == "flux":  # one kind of block is enough; SDXL runs with all of its kinds
            chosen["only_blocks"] = "single_blocks.*"
        compile = "in background" if self.behind else "before first image"
        settings = compile_settings(self.engine, backend=BACKEND, compile_when=compile, **chosen)
        return self.engine("host.model.attach").attach(self.patcher, settings)

    def close(self):
        comfy.model_management.interrupt_current_processing(False)
        assert self.thread.wait(60)
        torch._dynamo.backends.registry._COMPILER_FNS.pop(BACKEND)

    @property
    def eager_calls(self):
        code = self.engine("compile.registry").code_of(self.network)
        found, code.eager_calls = code.eager_calls, 0
        return found

    def is_right(self, compiled=None):
        """A run, and all that it asked for: eager's image."""
        result = self.run(compiled or self.compiled)
        assert self.thread.wait(60)
        assert relative_error(result, self.expected) < 1e-5
        self.is_as_found()
        return True

    def is_as_found(self):
        assert not any("forward" in vars(module) for module in self.network.modules())
        assert list(self.network.state_dict()) == self.keys
        assert torch_settings() == self.settings_before
        monitor = self.engine("compile.session").monitor
        assert not monitor.calls and monitor.listener is None

    def is_compiled(self, compiled=None):
        """The next run is right and compiled; in the background its code may be made by the one before."""
        if self.behind:
            self.is_right(compiled)
        self.eager_calls  # noqa: B018  starts anew
        assert self.is_right(compiled) and self.eager_calls == 0
        assert self.graphs > 0 and any(group.code.variants() for group in self.groups)

    def warmed(self):
        """Samples compiled."""
        self.is_compiled()
        self.eager_calls  # noqa: B018
        return self.graphs

    def needs_nothing_new(self, graphs):
        self.is_compiled()
        assert self.graphs == graphs and not self.failures

    def raises(self, error, words=None):
        with pytest.raises(error, match=words) as raised:
            self.run(self.compiled)
        self.is_as_found()
        return raised.value


def raising(error):
    def action():
        raise error

    return action


def cancel():
    comfy.model_management.interrupt_current_processing()


INTERRUPTED = comfy.model_management.InterruptProcessingException


# Rows of the table


def refused(case):
    case.compiler.always = raising(RuntimeError("no kernel for this"))
    for _ in range(3):
        case.is_right()
    failures = case.failures
    assert failures and case.compiler.calls == len(failures)
    for failure in failures:
        said = [record.getMessage() for record in case.caplog.records].count(failure)
        assert "no kernel for this" in failure and "only_blocks" in failure
        assert said == failures.count(failure), "SDXL has two kinds of one name"
    case.compiler.always = None
    case.is_compiled(case.attached(dynamic="true"))


def passes(case):
    case.compiler.plan = [raising(OSError(5, "Input/output error"))]
    case.is_right()
    assert case.failures
    case.is_compiled()
    assert not case.failures


def model_raises(case):
    graphs, conditioning = case.warmed(), (case.positive, case.negative)
    case.positive, case.negative = ([[text[..., 1:], options] for text, options in given] for given in conditioning)
    with pytest.raises(RuntimeError) as plain:
        case.run(case.patcher)
    assert str(case.raises(RuntimeError)) == str(plain.value)
    case.positive, case.negative = conditioning
    assert case.thread.wait(60)
    case.needs_nothing_new(graphs)


def no_memory_to_compile(case):
    case.monkeypatch.setattr(case.engine("background.thread"), "RETRY_SECONDS", 0.01)
    case.compiler.plan = [raising(torch.OutOfMemoryError("no memory"))]
    case.is_right()
    assert bool(case.failures) is not case.behind
    case.is_compiled()
    assert not case.failures


def _no_copies(case):
    clones = []

    def memory_of(_tensor):
        clones.append(1)
        raise torch.OutOfMemoryError("no memory for a copy")

    case.monkeypatch.setattr(case.engine("compile.call_shapes"), "memory_of", memory_of)
    return clones


def no_copies(case):
    tried = _no_copies(case)
    case.is_right()
    assert tried and not case.failures
    case.is_compiled()


def copies_fill_memory(case):
    changed, copies, refused = case.engine("compile.call_shapes").Changed, [], []
    keep = changed.keep

    def counted(self):
        keep(self)
        copies.extend(weakref.ref(copy) for _, copy in self._kept)

    def after_code():
        if is_short and any(copy() is not None for copy in copies):
            refused.append(1)
            raise torch.OutOfMemoryError("no memory beside the copies")

    case.monkeypatch.setattr(changed, "keep", counted)
    case.monkeypatch.setattr(case.engine("compile.traced_graph"), "written_by", lambda node: [node])  # else nothing is copied
    case.compiler.after_code = after_code
    is_short = [True]
    for _ in range(3):
        case.is_right()
    assert refused and not case.failures
    is_short.clear()


def no_copies_nor_compiler(case):
    tried = _no_copies(case)
    case.compiler.plan = [raising(torch.OutOfMemoryError("no memory to compile"))]
    case.is_right()
    assert tried and case.failures
    torch._dynamo.reset()  # asserts that PyTorch counts no compilation any more
    case.is_compiled()


def no_memory_to_sample(case):
    graphs = case.warmed()
    last = list(case.network.children())[-1]
    handle = last.register_forward_pre_hook(lambda *_: raising(torch.OutOfMemoryError("no memory in the last layer"))())
    try:
        case.raises(torch.OutOfMemoryError, "in the last layer")
    finally:
        handle.remove()
    case.needs_nothing_new(graphs)


def cancelled_meanwhile(case):
    entered, go_on = threading.Event(), threading.Event()

    def meanwhile():
        entered.set()
        assert go_on.wait(60)

    case.compiler.plan = [meanwhile]
    result = case.run(case.compiled)
    assert relative_error(result, case.expected) < 1e-5
    try:
        assert entered.wait(60)
        cancel()
        with pytest.raises(INTERRUPTED):
            case.run(case.compiled)
        assert not any("forward" in vars(module) for module in case.network.modules())
    finally:
        go_on.set()
    assert case.thread.wait(60)
    case.is_as_found()
    assert case.graphs > 0
    case.is_compiled()


def cancelled_compiling(case):
    case.compiler.plan = [cancel]
    case.raises(INTERRUPTED)
    assert case.compiler.calls == 1 == case.graphs
    case.is_compiled()


def cancelled_behind_another(case):
    lock, held, go_on = case.engine("compile.compiled_code").first_call_lock, threading.Event(), threading.Event()

    def compiling():
        with lock:
            held.set()
            go_on.wait(20)

    other, pressed = threading.Thread(target=compiling), threading.Timer(0.5, cancel)
    other.start()
    assert held.wait(60)
    pressed.start()
    try:
        case.raises(INTERRUPTED)
        assert other.is_alive() and not case.compiler.calls, "it has waited to the end"
    finally:
        go_on.set()
        other.join()
        pressed.join()
    case.is_compiled()


def cancelled_sampling(case):
    graphs = case.warmed()
    first, calls = next(case.network.children()), []
    handle = first.register_forward_pre_hook(lambda *_: calls.append(1) or (len(calls) == 2 and cancel()) or None)
    try:
        case.raises(INTERRUPTED)
    finally:
        handle.remove()
    case.needs_nothing_new(graphs)


def cancelled_waiting(case):
    begun, go_on = threading.Event(), threading.Event()

    def starting():
        begun.set()
        assert go_on.wait(60)

    def cancel_then():
        assert begun.wait(60)
        cancel()

    case.compiler.plan = [starting]
    pressing = threading.Thread(target=cancel_then)
    pressing.start()
    try:
        case.raises(INTERRUPTED)
        assert not go_on.is_set() and case.thread.busy, "it has waited to the end"
    finally:
        go_on.set()
        pressing.join()
    assert case.thread.wait(60)
    case.is_compiled()
