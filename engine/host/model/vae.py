"""Decode and encode with images channels_last in memory, where that is faster for a VAE.

cuDNN's convolutions for 16-bit numbers need that layout, and convert other layouts at each call. Nothing is compiled: compiling
the whole decoder gave less and took a minute (benchmarks/results/h200-2026-11-23-vae.json at b2f2b61). Which layout is faster
is measured on calls that are made anyway: nothing is computed twice.
"""

import copy
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP
from torch import nn

from ...channels_last.function_mode import DTYPES, run_channels_last
from ...channels_last.preparing import kernels, norm_kernels
from ...devices import seconds_when_done
from ...errors import InvalidSetting
from ...failures.describe import in_one_line, never_swallowed
from ...log import logger
from ...messages.status import Line
from ...messages.words import COMPILED_ELSEWHERE, told
from ...ownership import is_compiled_elsewhere, is_of_class
from ..adapter import KEY, forbids_threads, set_callbacks

# The methods of a VAE's network that the host calls (comfy/sd.py), and the word for them.
FUNCTIONS = {"decode": "decoding", "encode": "encoding", "decode_tiled": "decoding", "encode_tiled": "encoding"}
# Whether each of the first calls of a shape runs channels_last. The plain layout is first, as it needs no kernels; the first
# call in each layout does not count.
TURNS = (False, True, True, False)
WORTH = 0.95  # channels_last is taken if a call needs less than this share of the plain layout's time


class LaidOut:
    """Call one function of a VAE's network in the layout that is faster.

    The first calls of a shape are timed in the order of TURNS, then the faster layout is taken for all shapes.
    """

    def __init__(self, name: str, function: Callable, line: Line):
        # This object is set on the network: a reference to the network would be a cycle, which only garbage collection frees.
        self._function = weakref.WeakMethod(function) if isinstance(function, types.MethodType) else lambda: function
        self._word, self.line = FUNCTIONS[name], line
        self.channels_last: bool | None = None  # whether this layout is taken; None: not decided
        self._seconds: defaultdict[Hashable, list[float]] = defaultdict(list)  # of the first calls of each shape
        self._too_large: set[tuple] = set()

    @property
    def function(self) -> Callable:
        function: Any = self._function()  # alive: a LaidOut is called as its network's method
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        self.line.new_run()
        if not args:  # the input is passed by name, and VAEs name it differently
            return self.function(**kwargs)
        x = args[0]
        # Compiled by a later node: PyTorch would recompile that node's code for each `ChannelsLast`.
        if _is_compiled(getattr(self.function, "__self__", None)):
            if self.channels_last is not False:
                self.channels_last = False
                self.line.put(self._word, COMPILED_ELSEWHERE)
            return self.function(*args, **kwargs)
        shape = (tuple(x.shape), x.dtype)
        device = kwargs.get("device") or x.device  # LTX's and MiniMax' encoders move pieces of a video in RAM to the GPU
        # Our kernels have no backward.
        possible = x.dtype in DTYPES and norm_kernels.ready and not torch.is_grad_enabled() and shape not in self._too_large
        turn = TURNS[len(self._seconds[shape])] if self.channels_last is None else self.channels_last
        why = None
        if turn and possible:  # if it is not possible now, the turn comes later
            try:
                return self._timed(shape, device, True, lambda: run_channels_last(self.function, args, kwargs, video=True))
            except Exception as error:
                why = "" if never_swallowed(error) else in_one_line(error)
                if not why:  # noted before the plain call, which may run out of memory too
                    self._too_large.add(shape)
        result = self._timed(shape, device, False, lambda: self.function(*args, **kwargs))
        if why:  # and the plain call raised no error, so the layout was the cause
            self.channels_last = False
            logger.warning("VAE: %s channels last failed, runs as without this pack from now on (%s)", self._word, why)
        elif why is not None:
            logger.warning("VAE: no memory for %s channels last, images of this size run as without this pack", self._word)
        return result

    def _timed(self, shape: Hashable, device: torch.device, channels_last: bool, call: Callable[[], object]) -> object:
        """Make a call, and time it if it is that layout's turn; a call that ends with an error is not counted."""
        if self.channels_last is not None or TURNS[len(self._seconds[shape])] != channels_last:
            return call()
        began = seconds_when_done(device)
        result = call()
        self._seconds[shape].append(seconds_when_done(device) - began)
        if len(self._seconds[shape]) == len(TURNS):
            *_untimed, ours, plain = self._seconds[shape]
            self.channels_last = ours < WORTH * plain
            self._seconds.clear()
            self._tell(plain, ours)
        return result

    def _tell(self, plain: float, ours: float) -> None:
        is_decoding, seconds = self._word == "decoding", (f"{plain:.3f}", f"{ours:.3f}")
        text = told("decodingSame" if is_decoding else "encodingSame", *seconds)
        if self.channels_last:
            text = told("decodingFaster" if is_decoding else "encodingFaster", f"{1 - ours / plain:.0%}", *seconds)
        self.line.put(self._word, text, good=bool(self.channels_last))


def attach_vae(vae: Any, node: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) whose FUNCTIONS are `LaidOut`; weights are shared.

    The page shows in the node whose id is `node` which layout is faster.

    Raises:
        InvalidSetting: `vae` is no VAE of the host.
    """
    network: Any = getattr(vae, "first_stage_model", None)
    patcher: Any = getattr(vae, "patcher", None)
    if not isinstance(network, nn.Module) or not hasattr(patcher, "add_object_patch"):
        raise InvalidSetting("vae", vae, "connect a VAE, such as that of Load VAE.")
    laid_out = copy.copy(vae)
    line = Line(node)
    if (reason := left_alone(vae)) is not None:
        line.put("decoding", reason)
        return laid_out
    if not forbids_threads():
        norm_kernels.prepare(vae.device)
    laid_out.patcher = patcher.clone()
    set_callbacks(laid_out.patcher, KEY, {CallbacksMP.ON_CLONE: _bind_to_copy, CallbacksMP.ON_DETACH: _remove_own_methods})
    for name in FUNCTIONS:
        function = patcher.object_patches.get(name) or getattr(network, name, None)
        if isinstance(function, LaidOut):  # of an earlier node
            function = function.function
        if callable(function):
            laid_out.patcher.add_object_patch(name, LaidOut(name, function, line))
    line.put("decoding", told("vaeReady"))
    return laid_out


def _bind_to_copy(patcher: Any, clone: Any) -> None:
    """An ON_CLONE callback: a clone may have a network of its own (comfy/sd.py, `deepclone_multigpu`)."""
    if clone.model is patcher.model:
        return
    for name in FUNCTIONS:
        laid_out = clone.object_patches.get(name)
        if isinstance(laid_out, LaidOut):
            clone.add_object_patch(name, LaidOut(name, getattr(clone.model, name), laid_out.line))


def _remove_own_methods(patcher: Any, *_: object) -> None:
    """An ON_DETACH callback, also called when a patcher is freed. Where the host took a LaidOut off a network, it left a bound
    method in its place, which keeps the network in memory until garbage collection: remove that method."""
    for name in FUNCTIONS:
        if is_of_class(patcher.model, name, vars(patcher.model).get(name)):
            delattr(patcher.model, name)


def left_alone(vae: Any) -> list | None:
    """What the line says of a VAE for which channels_last is not tried (see `words.told`), or None."""
    if vae.device.type != "cuda" or kernels() is None:
        return told("leftAsIs", told("vaeNoGpu"))
    if vae.vae_dtype not in DTYPES:
        return told("leftAsIs", told("vaeWide", str(vae.vae_dtype).removeprefix("torch.")))
    return COMPILED_ELSEWHERE if _is_compiled(vae.first_stage_model) else None


def _is_compiled(network: Any) -> bool:
    modules = network.modules() if isinstance(network, nn.Module) else ()
    return any(map(is_compiled_elsewhere, modules))
