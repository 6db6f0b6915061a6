"""Decode and encode with images channels_last in memory, where that is faster for a VAE.

cuDNN's convolutions for 16-bit numbers want that layout and else convert at each call. Nothing is compiled: compiling the whole
decoder gave less and took a minute (benchmarks/results/h200-2026-11-23-vae.json at b2f2b61). `Trial` measures which layout is
faster on calls that are made anyway: nothing is computed twice.
"""

import copy
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP
from torch import nn

from ...channels_last.function_mode import DTYPES, run_channels_last
from ...channels_last.preparing import kernels, norm_kernels
from ...errors import InvalidSetting
from ...failures.describe import in_one_line, never_swallowed
from ...log import logger
from ...messages.status import Line
from ...messages.words import told
from ...ownership import is_compiled_elsewhere, is_of_class
from ..adapter import forbids_threads, set_callbacks

KEY = "torch-compile-kit"
# The methods of a VAE's network that the host calls (comfy/sd.py), and the word for them.
FUNCTIONS = {"decode": "decoding", "encode": "encoding", "decode_tiled": "decoding", "encode_tiled": "encoding"}
# Whether the first calls of a shape run channels_last: the plain way first, which needs no kernels, and each once untimed.
TURNS = (False, True, True, False)
WORTH = 0.95  # channels_last stays if a call needs at most this share of the plain way's time


@dataclass
class Trial:
    """Time calls in the order of TURNS, then take the faster way for all shapes."""

    device: torch.device
    other: bool | None = None  # whether the other way is taken; None: not decided
    plain_seconds: float = 0.0
    other_seconds: float = 0.0
    _seconds: dict[Hashable, list[float]] = field(default_factory=dict)  # of each shape, in the order of TURNS

    def next(self, shape: Hashable, possible: bool) -> bool:
        """Whether this call goes the other way. If the other way is not `possible` now, its turn comes later."""
        if self.other is None:
            return TURNS[len(self._seconds.setdefault(shape, []))] and possible
        return self.other and possible

    @contextmanager
    def timed(self, shape: Hashable, way: bool) -> Iterator[None]:
        """Around a call; a call that ends with an error is not counted."""
        seconds = self._seconds.get(shape)
        if seconds is None or TURNS[len(seconds)] != way:
            yield
            return
        began = self._time()
        yield
        seconds.append(self._time() - began)
        if len(seconds) == len(TURNS):
            *_untimed, self.other_seconds, self.plain_seconds = seconds
            self.decide(self.other_seconds <= WORTH * self.plain_seconds)

    def decide(self, other: bool) -> None:
        self.other = other
        self._seconds.clear()

    def _time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return time.perf_counter()


class LaidOut:
    """Call one function of a VAE's network in the layout that is faster."""

    def __init__(self, name: str, function: Callable, device: torch.device, line: Line):
        # This object is set on the network: a reference to the network would keep both until garbage is collected.
        self._function = weakref.WeakMethod(function) if isinstance(function, types.MethodType) else lambda: function
        self._word, self.line = FUNCTIONS[name], line
        self.trial = Trial(device)
        self._told = False
        self._too_large: set[tuple] = set()

    @property
    def function(self) -> Callable:
        function: Any = self._function()  # alive: a LaidOut is called as its network's method
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        if not args:  # by name, and VAEs name it differently
            return self.function(**kwargs)
        x = args[0]
        # By a later node, whose code would be compiled anew for each `ChannelsLast`.
        if _is_compiled(getattr(self.function, "__self__", None)):
            if self.trial.other is not False:
                self.trial.decide(False)
                self.line.put(self._word, told("leftAsIs", told("compiledElsewhere")))
            return self.function(*args, **kwargs)
        shape = (tuple(x.shape), x.dtype)
        # Our kernels have no backward.
        possible = x.dtype in DTYPES and norm_kernels.ready and not torch.is_grad_enabled() and shape not in self._too_large
        channels_last = self.trial.next(shape, possible)
        self._tell()
        why = None
        if channels_last:
            try:
                with self.trial.timed(shape, True):
                    return run_channels_last(kernels(), self.function, args, kwargs, video=True)
            except comfy.model_management.InterruptProcessingException:
                raise
            except Exception as error:
                why = "" if never_swallowed(error) else in_one_line(error)
                if not why:  # at once: the plain call may have no memory either
                    self._too_large.add(shape)
        with self.trial.timed(shape, False):
            result = self.function(*args, **kwargs)
        if why:  # and the plain call raised no error, so the layout was the cause
            self.trial.decide(False)
            logger.warning("VAE: %s channels last failed, runs as without this pack from now on (%s)", self._word, why)
        elif why is not None:
            logger.warning("VAE: no memory for %s channels last, images of this size run as without this pack", self._word)
        return result

    def _tell(self) -> None:
        trial = self.trial
        if self._told or trial.other is None or not trial.plain_seconds:
            return
        self._told = True
        before, now = f"{trial.plain_seconds:.3f}", f"{trial.other_seconds:.3f}"
        is_decoding, gained = self._word == "decoding", f"{1 - trial.other_seconds / trial.plain_seconds:.0%}"
        text = told("decodingSame" if is_decoding else "encodingSame", before, now)
        if trial.other:
            text = told("decodingFaster" if is_decoding else "encodingFaster", gained, before, now)
        self.line.put(self._word, text, good=trial.other)


def attach_vae(vae: Any, node: str | None = None) -> Any:
    """A copy of `vae` (comfy.sd.VAE) with its functions laid out; weights are shared.

    The page shows in the node whose id is `node` which layout is faster.

    Raises:
        InvalidSetting: `vae` is no VAE of the host.
    """
    network: Any = getattr(vae, "first_stage_model", None)
    patcher: Any = getattr(vae, "patcher", None)
    if not isinstance(network, nn.Module) or not hasattr(patcher, "add_object_patch"):
        raise InvalidSetting("vae", vae, "connect a VAE, such as that of Load VAE.")
    laid_out = copy.copy(vae)
    laid_out.torch_compile_kit_line = line = Line(node)
    if (reason := left_alone(vae)) is not None:
        line.put("decoding", told("leftAsIs", reason))
        return laid_out
    if not forbids_threads():
        norm_kernels.prepare(vae.device)
    laid_out.patcher = patcher.clone()
    set_callbacks(laid_out.patcher, KEY, {CallbacksMP.ON_CLONE: _bind_to_copy, CallbacksMP.ON_DETACH: _remove_own_methods})
    for name in FUNCTIONS:
        function = patcher.object_patches.get(name) or getattr(network, name, None)
        if isinstance(function, LaidOut):  # of a node before
            function = function.function
        if callable(function):
            laid_out.patcher.add_object_patch(name, LaidOut(name, function, vae.device, line))
    line.put("decoding", told("vaeReady"))
    return laid_out


def _bind_to_copy(patcher: Any, clone: Any) -> None:
    """An ON_CLONE callback: a clone may have a network of its own (comfy/sd.py, `deepclone_multigpu`)."""
    if clone.model is patcher.model:
        return
    for name in FUNCTIONS:
        laid_out = clone.object_patches.get(name)
        if isinstance(laid_out, LaidOut):
            clone.add_object_patch(name, LaidOut(name, getattr(clone.model, name), clone.load_device, laid_out.line))


def _remove_own_methods(patcher: Any, *_: object) -> None:
    """An ON_DETACH callback, also called when a patcher is freed: where the host takes a LaidOut off a network, a bound method
    stays on the network and keeps it in memory until garbage is collected."""
    for name in FUNCTIONS:
        if is_of_class(patcher.model, name, vars(patcher.model).get(name)):
            delattr(patcher.model, name)


def left_alone(vae: Any) -> list | None:
    """Why channels_last is not tried for the VAE (see `words.told`), or None."""
    if vae.device.type != "cuda" or kernels() is None:
        return told("vaeNoGpu")
    if vae.vae_dtype not in DTYPES:
        return told("vaeWide", str(vae.vae_dtype).removeprefix("torch."))
    return told("compiledElsewhere") if _is_compiled(vae.first_stage_model) else None


def _is_compiled(network: Any) -> bool:
    modules = network.modules() if isinstance(network, nn.Module) else ()
    return any(map(is_compiled_elsewhere, modules))
