"""Run the host's diffusion model, or a ControlNet, through CUDA graphs where that is safe, and say why where it is not.

Life cycle of a call within `graphed`:

1. `_run_inside` finds the function to capture: the network's forward, or `_forward` inside the wrapper of a step cache.
2. `why_no_graphs` says why the call can have no graph: code of another pack (ownership.py), or options that the model reads at
   each step. `value_key` names the graph by settings, options and inputs. Without a key the call runs block by block.
3. `ModelGraphs.call` runs the call plainly, captures it, or replays it. A plain call or a capture binds the blocks
   (`run_bound`); a replay runs no Python of the model.
4. Under dynamic VRAM a capture or a replay happens only with all weights pinned in their pages (`_pinned`).

Graphs are dropped when weights or modules change (`ModelGraphs.drop_if_stale`), when a replay and a plain call differ
(`ModelGraphs.call`), when graphs do not pay (`judge_for`) or memory is short (`_pinned`), and when the host unloads the model
or needs the memory for another (`watch_unloading`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...channels_last.function_mode import run_channels_last
from ...channels_last.preparing import kernels, norm_kernels
from ...compile.binding import Binding
from ...compile.call_shapes import copied_containers
from ...compile.eager import Eager
from ...compile.registry import code_of
from ...cuda_graphs.capture import ModelGraphs, graphs_of
from ...cuda_graphs.keys import NoKey, value_key
from ...errors import BlockCompileError
from ...failures.describe import in_one_line, never_swallowed
from ...log import logger
from ...messages.recompile_log import is_warming, watch_of
from ...messages.words import ENGLISH, in_words, told
from ...ownership import (
    OwnForward,
    exchanged,
    foreign_around,
    foreign_in_options,
    is_ours,
    is_trusted_wrapper,
    survey_of,
)
from ...per_model import PerModel
from ...torch_settings import modes, numerics
from ...transformer_options.filter import BOOKKEEPING, keys_read
from ..adapter import without_prefetch
from ..weights import packed_lora
from ..weights.blocks import Loaded
from ..weights.dynamic_vram import AllPages, address_of
from .memory import is_short_of_memory, make_room, watch_unloading
from .policy import Notes, has_convolutions, judge_for

INNER = "_forward"  # the method that `forward` of the host's models calls inside other nodes' wrappers
# In one of so many runs the first replay is compared with a plain call.
RUNS_A_CHECK = 10
# After graphs were dropped so often for lack of memory, none is captured for up to RUNS_A_CHECK runs: else each prompt would.
MOST_SQUEEZED = 2
# Options that code below `apply_model` uses only through the patcher's machinery; not part of a graph's key.
_MACHINERY = frozenset({"wrappers", "callbacks", "patches", "patches_replace"})


@contextmanager
def graphed(loaded: Loaded, binding: Binding, notes: Notes, size: int) -> Iterator[None]:
    """A context in which calls of the network, for a latent of `size` numbers, are captured and replayed; `notes` gets the
    reason if a call cannot be captured."""
    watch_unloading()
    network, device = loaded.network, loaded.device
    graphs, state, code = graphs_of(network), state_of(network), code_of(network)
    places = address_of if state.pages else None
    if not binding.plain:
        if state.told_in != code.runs:
            state.told_in, foreign, reason = code.runs, None, "the weights move in each step"
            if not binding.weights_move:
                foreign = code.look(network, lambda: foreign_around() or survey_of(network.modules()).pack, None)
                reason = "a block runs something else than its class"
            _say_off(network, foreign, reason, notes)
        with without_prefetch(network) if binding.paged else nullcontext(), binding.bound():
            yield
        return
    model_options = getattr(getattr(loaded.model, "current_patcher", None), "model_options", {})
    pinned = functools.partial(_pinned, state, graphs) if state.pages else lambda: nullcontext(True)

    def graphed_call(forward, args, kwargs, wrapped=False):
        fixed = {"transformer_options": kwargs.pop("transformer_options") or {}} if "transformer_options" in kwargs else {}
        options = fixed.get("transformer_options", {})
        if binding.paged or state.pages:
            options["prefetch_dynamic_vbars"] = False  # `BlockWeights` prefetches, see adapter.without_prefetch
        convolutional = has_convolutions(network)
        if not graphs.graphs:  # a change would drop the graphs in the middle of a run
            state.norms_ready = norm_kernels.ready
        generation = functools.partial(code.generation, convolutional and state.norms_ready)
        # `fast` is part of the key: a kernel that has never run cannot be captured.
        fast = convolutional and (binding.call.synchronous or generation()[1])

        room = functools.partial(make_room, loaded, (*args, *kwargs.values()))

        def room_for_copies(needed):
            graphs.forget()  # the graphs were captured with another LoRA
            return room(needed)

        def why_no_graphs():
            foreign = foreign_in_options(options, wrapped) or foreign_in_options(model_options) or foreign_around()
            if foreign is None:
                graphs.drop_if_stale(network, device, places)
                foreign = graphs.model.foreign
            if foreign is None and not graphs.model.lora_looked_at and _obstacle(network) is None:
                graphs.model.lora_looked_at = True
                graphs.model.obstacle = packed_lora.keep_on_device(network, device, room_for_copies)
                graphs.release = packed_lora.release_of(network)
                graphs.drop_if_stale(network, device, places)
            reason = _obstacle(network) if foreign is None else None
            if foreign is not None or reason is not None:
                return foreign, reason, None
            try:
                options_key, inputs_key = value_key(kept_options(network, options)), value_key((args, kwargs), inputs=True)
            except NoKey as error:
                return None, f"the call depends on {error}, which may change unseen", None
            return None, None, (binding.settings, modes(), numerics(), fast, options_key, inputs_key)

        foreign, reason, key = code.look(network, why_no_graphs, (None, "the model cannot be looked at", None))
        if key is None:
            _say_off(network, foreign, reason, notes)
            drop_unused(network, device)
            with binding.bound():
                return forward(*args, **fixed, **kwargs)
        state.keyed_in = code.runs
        if state.pages:
            forward = functools.partial(_fetching, state.pages, forward)

        def run_bound(*args, **kwargs):
            with binding.bound():
                convolutions = code.eager[Eager.CONVOLUTIONS]
                if convolutions and fast:
                    norm_kernels.ready = state.norms_ready = True  # this call runs them if it can
                    return _with_fast_convolutions(network, forward, *args, **kwargs)
                if convolutions:
                    binding.call.when_over.append(functools.partial(norm_kernels.prepare, device))
                return forward(*args, **kwargs)

        return graphs.call(
            *(key, run_bound, args, kwargs, fixed, pinned),
            *(room, generation),
            ran_uncompiled=lambda: binding.call.uncompiled,
            lacks_trace=lambda: binding.call.put_off,
            is_compiling=lambda: code.is_being_compiled,
            pays=judge_for(binding.settings, network, size),
        )

    hosts_forward = network.forward

    def forward(*args, **kwargs):
        bound: Any = network.__dict__.get("forward")  # our compiled forward, if the model is one block
        is_block = is_ours(bound) and bound.func is not _run_inside
        return (bound if is_block else hosts_forward)(*args, **kwargs)

    calls = [graphed_call]
    try:
        with exchanged({network: OwnForward(_run_inside, network, calls, forward)}):
            yield
    finally:
        calls.clear()


def drop_unused(network: nn.Module, device: torch.device) -> None:
    """Drop graphs if memory is short, and no call of this run may have one: they were kept for runs without the other pack's
    code. A run may have calls of both kinds: PerturbedAttentionGuidance calls the model again without self-attention."""
    graphs = graphs_of(network)
    if graphs.hold_memory and state_of(network).keyed_in != code_of(network).runs and is_short_of_memory(device):
        graphs.drop()


def _say_off(network: nn.Module, pack: str | None, reason: str | None, notes: Notes) -> None:
    watch_of(network).foreign = pack
    text = f"CUDA graphs are off: {reason}" if pack is None else in_words(told("graphsOff", pack), ENGLISH)
    notes.add(f"{text}.")


def _run_inside(network: nn.Module, calls: list[Callable], forward: Callable, *args, **kwargs) -> object:
    """Call the model through the function in `calls`. Where a step cache wraps the model, only `_forward`, inside the wrapper
    (comfy/patcher_extension.py, `WrapperExecutor`), is called through that function: the cache decides at each step.
    """
    if not calls:  # the context is over, but another node has kept this function
        return forward(*args, **kwargs)
    (call,) = calls
    kind: Any = type(network)
    keyed = (kwargs.get("transformer_options") or {}).get("wrappers", {}).get("diffusion_model", {})
    wrappers = [wrapper for some in keyed.values() for wrapper in some]
    names = _inner_names(kind) if wrappers and all(map(is_trusted_wrapper, wrappers)) else None
    if names is None:
        return call(forward, args, kwargs)
    inner = getattr(network, INNER)

    def run_inner(*args, **kwargs):
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        return call(inner, (), kwargs, wrapped=True) if calls else inner(**kwargs)

    with exchanged({network: run_inner}, INNER):
        return forward(*args, **kwargs)


@functools.cache
def _inner_names(kind: Any) -> tuple[str, ...] | None:
    """Names of the parameters of `_forward`, if `forward` passes `_forward` to wrappers, as in the host's models; else None."""
    forward, inner = kind.forward, getattr(kind, INNER, None)
    if not (isinstance(forward, types.FunctionType) and isinstance(inner, types.FunctionType)):
        return None
    parameters = list(inspect.signature(inner).parameters.values())[1:]
    if INNER not in forward.__code__.co_names or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


@contextmanager
def _pinned(state: NetworkState, graphs: ModelGraphs) -> Iterator[bool]:
    """Pin the weights during a capture or a replay; yields whether all of them are in memory.

    `held` comes after `pin`: dynamic VRAM lowers the watermark if it has no memory for a page, and raises an error if the limit
    that `held` sets prevents that (comfy-aimdo, src/model-vbar.c, `vbar_fault`).
    """
    if state.squeezed >= MOST_SQUEEZED:
        state.lacks_room = True
        yield False
        return
    pages = state.pages
    pinned = pages.pin()
    with pages.held() if pinned else nullcontext():
        try:
            state.missed_calls = 0 if pinned else state.missed_calls + 1
            have_room = pages.have_room()
            state.lacks_room = not pinned and (state.lacks_room or (state.missed_calls > 1 and not have_room))
            if state.lacks_room and graphs.graphs:
                graphs.drop()  # weights need the graphs' memory
                state.squeezed += 1
            elif state.missed_calls > 1 and have_room:  # the model no longer uses a layer that it used before
                graphs.forget()
                pages.learn(anew=True)
            yield pinned is not None
        finally:
            if pinned:
                pages.unpin(pinned)


def _fetching(pages: AllPages, forward: Callable, *args, **kwargs) -> object:
    try:
        result = forward(*args, **kwargs)
    except BaseException:
        pages.clean_up()
        raise
    pages.learn()
    return result


def _with_fast_convolutions(network: nn.Module, forward: Callable, *args, **kwargs) -> object:
    """Call the model with channels_last convolutions; without, if that has failed in this or an earlier call."""
    if not runs_channels_last(network):
        return forward(*args, **kwargs)
    options = {name: value for name, value in kwargs.items() if name == "transformer_options"}  # the model may write to it
    args_copy, kwargs_copy = copied_containers((args, {name: v for name, v in kwargs.items() if name not in options}))
    try:
        return run_channels_last(forward, args_copy, kwargs_copy | options)
    except Exception as error:
        if never_swallowed(error) or isinstance(error, BlockCompileError) or torch.cuda.is_current_stream_capturing():
            raise
        result = forward(*args, **kwargs)  # raises an error of the model itself again
        state_of(network).channels_last_fails = in_one_line(error)
        logger.warning("convolutions keep ComfyUI's layout: %s", in_one_line(error))
        return result


def runs_channels_last(network: nn.Module) -> bool:
    """Whether convolutions that stay eager run channels_last: Triton is installed, and the model has not failed with them."""
    return kernels() is not None and not state_of(network).channels_last_fails


def new_run(network: nn.Module, begins: bool = False) -> None:
    """Called when the host has loaded the model, as weights may have moved, and when a sampling run `begins`."""
    graphs = graphs_of(network)
    graphs.new_run(is_warming())
    is_anew = begins and code_of(network).runs % RUNS_A_CHECK == 0
    graphs.is_check_due |= is_anew  # stays True if the last capture was not checked
    watch_of(network).foreign = None
    if any(getattr(m, "weight_function", None) or getattr(m, "bias_function", None) for m in network.modules()):
        graphs.model.obstacle = "another node changes weights on their way to a layer"
    state_of(network).pages.new_run(network)
    state_of(network).missed_calls = 0
    if is_anew:
        state_of(network).squeezed = 0
    state_of(network).norms_ready = norm_kernels.ready


def graphs_summary(network: nn.Module) -> list[str]:
    graphs = graphs_of(network)
    lines = [f"CUDA graphs: {len(graphs.graphs)} captured"] if graphs.captures else []
    if state_of(network).lacks_room:
        lines.append("CUDA graphs are off: the weights do not all fit into the memory that is free.")
    if reason := state_of(network).channels_last_fails:
        lines.append(f"Convolutions keep ComfyUI's layout: {reason}")
    return lines + [f"CUDA graph not captured: {reason}" for reason in set(graphs.failures.values())]


def _obstacle(network: nn.Module) -> str | None:
    """Why a replay might differ from a call, for a network without code of other packs; None: a replay does not."""
    graphs, state = graphs_of(network), state_of(network)
    if graphs.differences:
        return "a replay gave another result than the model itself"
    if state.functions is not graphs.model.functions:
        state.functions, state.keys = graphs.model.functions, keys_read(network)
    if read := state.keys & {"sigmas", "sample_sigmas", "uuids"}:
        return f"the model reads {', '.join(sorted(read))}"
    return graphs.model.obstacle


def kept_options(network: nn.Module, options: dict) -> dict:
    """The options that a call depends on."""
    ignored = _MACHINERY | (BOOKKEEPING - state_of(network).keys)
    return {name: value for name, value in options.items() if name not in ignored}


@dataclass
class NetworkState:
    """The state of a network, beside its graphs.

    Args:
        keys: the options that the network's code reads; `functions`: those that the layers ran when its code was read.
        missed_calls: calls of this run, in a row, for which not all paged weights were in memory.
        lacks_room: the paged weights do not all fit into memory.
        squeezed: how often graphs were dropped because of `lacks_room` in the last runs.
        channels_last_fails: how the model has failed with channels_last convolutions; empty: it has not.
        norms_ready: the kernels for channels_last are compiled.
        keyed_in: the last sampling run with a call that may be replayed.
        told_in: the last sampling run with a note that blocks are not plain (`Binding.plain`).
    """

    pages: AllPages
    functions: list | None = None
    keys: frozenset[str] = BOOKKEEPING
    missed_calls: int = 0
    lacks_room: bool = False
    squeezed: int = 0
    channels_last_fails: str = ""
    norms_ready: bool = False
    keyed_in: int = -1
    told_in: int = -1


state_of = PerModel(lambda network: NetworkState(AllPages(network)))
