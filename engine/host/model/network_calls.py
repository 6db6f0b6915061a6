"""Run each call of a network that the host has loaded: compiled, replayed from a CUDA graph, or uncompiled."""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import comfy.model_management
import torch
from torch import nn

from ...background.model_call import ModelCall
from ...background.thread import compiler
from ...channels_last.preparing import norm_kernels
from ...compile.binding import Binding
from ...compile.registry import WaitsFor, code_of
from ...compile.session import watching
from ...compile_process.obtain import get_ready_to_compile, is_imported
from ...cuda_graphs.capture import graphs_of
from ...inductor.kitchen import products_as_operators
from ...messages.recompile_log import is_warming, watch_of
from ...messages.status import Status
from ...settings import CompileSettings
from ...torch_settings import sampling_scope, sampling_switches
from ..adapter import forbids_threads, without_hosts_compiler, without_prefetch
from ..graphs.memory import is_short_of_memory
from ..graphs.policy import Notes, Way, always_replays, measure, way_of_call
from ..graphs.replay import graphed, new_run
from ..weights.blocks import Loaded, forget_weights, weights_of
from ..weights.partial_load import release_buffers
from ..weights.traceable_layers import traceable_casts
from .payback import payback_of

# Whether calls may run while the compiler is being imported: on a CPU the import would take cores from the calls.
imports_beside_calls: Callable[[torch.device], bool] = lambda device: device.type != "cpu"  # noqa: E731
DEADLOCK = "Compiled at once: with --verbose DEBUG ComfyUI's memory manager can deadlock with a second thread."


class NetworkCalls:
    """Run the calls of a network under the settings of one node."""

    def __init__(self, settings: CompileSettings):
        self.settings = settings
        self.notes = Notes()

    @contextmanager
    def prepared(self) -> Iterator[ModelCall]:
        """A context for one call, compiled or not, which applies the settings of PyTorch and of the host."""
        if compiler.awaited:
            compiler.wait(poll=raise_if_interrupted)
        switches = sampling_switches(self.settings.allow_tf32, self.settings.cudnn_benchmark)
        with watching, without_hosts_compiler(), sampling_scope.applied(**switches) if switches else nullcontext():
            if not self.settings.waits and not is_warming() and forbids_threads():
                self.notes.add(DEADLOCK)
            yield ModelCall(is_synchronous(self.settings), raise_if_interrupted)

    def run(self, loaded: Loaded, call: ModelCall, size: int, run: Callable[[], object]) -> object:
        """Make the call `run`, of a latent of `size` numbers.

        No block runs compiled if compiling would not pay off yet (`call.waits`), or while the compiler is being imported.
        """
        network, code = loaded.network, code_of(loaded.network)
        compiles = self.settings.backend != "cudagraphs" and not code.compiles
        if compiles and not (call.waits or call.synchronous) and imports_beside_calls(loaded.device):
            get_ready_to_compile(starts=self.settings.backend == "inductor" and not code.uncalled)
            if not is_imported():
                call.waits, code.waits_for = True, WaitsFor.IMPORT
                if not always_replays(self.settings, network, loaded.device):
                    return eager(network, run)
        with traceable_casts(network), products_as_operators():
            way = way_of_call(self.settings, network, loaded.device, size, self.notes)
            binding = Binding(network, self.settings, call, functools.partial(weights_of, loaded, self.settings))
            if not call.waits and code.waits_for and not code.uncalled and self.settings.backend != "cudagraphs":
                if way is Way.REPLAYED:
                    way = Way.COMPILED  # a replay traces nothing
                if is_short_of_memory(loaded.device):
                    graphs_of(network).forget()  # the graphs hold as much memory as this call needs in addition
            code.replays_operators = way is Way.REPLAYED and (call.waits or code.is_being_compiled)
            call.puts_off &= way is not Way.REPLAYED  # a replay runs no block that could report missing code
            with ExitStack() as scopes:
                if way is Way.REPLAYED:
                    scopes.enter_context(graphed(loaded, binding, self.notes, size))
                else:
                    scopes.enter_context(without_prefetch(network) if binding.paged else nullcontext())
                    scopes.enter_context(binding.bound())
                # If not plain there can be no graph; code that the last call lacked may be lacking in this call.
                if way is Way.MEASURED and binding.plain and watch_of(network).lacks() is None:
                    run = functools.partial(measure, network, loaded.device, size, call, run)
                result = run()
            code.eager_calls += call.uncompiled
            if call.ran and not call.waits:
                code.waits_for = None
            return result


def is_synchronous(settings: CompileSettings) -> bool:
    """Whether calls wait for code: the user or a warmup wants that, or no other thread may work meanwhile."""
    return settings.waits or is_warming() or forbids_threads()


def prepare_replays(settings: CompileSettings, network: nn.Module, device: torch.device) -> None:
    """Start compiling the channels_last kernels before a UNet's first step, which loads weights for seconds. Compiled later,
    the kernels are missing in the first prompt's graphs, and the second prompt's graphs are captured anew."""
    if always_replays(settings, network, device) and not is_synchronous(settings):
        norm_kernels.prepare(device)


def are_training(network: nn.Module, x: torch.Tensor) -> bool:
    """Whether a trainer makes the call (comfy_extras/nodes_train.py): our settings for sampling keep nothing for a backward."""
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in network.parameters()))


def eager(network: nn.Module, run: Callable[[], object]) -> object:
    """Make the call `run` without compiling anything, and count it."""
    result = run()
    code_of(network).eager_calls += 1
    return result


def begin_run(network: nn.Module, *statuses: Status | None) -> None:
    """Called when a sampling run begins; `statuses` are the status lines of the nodes that take part."""
    code_of(network).new_run()
    new_run(network, begins=True)
    for status in filter(None, statuses):
        status.new_run()


def end_run(base_model: nn.Module) -> None:
    """Called when a sampling run of a model is over, also after an error."""
    release_buffers()
    forget_weights(base_model)
    network = getattr(base_model, "diffusion_model", base_model)
    graphs_of(network).model.new_run()
    payback_of(network).end_run(network)


def raise_if_interrupted() -> None:
    """Raise the host's exception if the user has pressed cancel."""
    # The host polls before every layer, but not inside compiled code (comfy/ops.py, run_every_op).
    comfy.model_management.throw_exception_if_processing_interrupted()
