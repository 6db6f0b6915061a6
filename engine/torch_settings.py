"""Set PyTorch's settings, and replace its functions, only while they are needed.

Threads may overlap (several GPUs, compiling in the background), so the first thread in saves the values and the last one out
restores them: for the process, or, where PyTorch keeps its settings for each thread (torch/utils/_config_module.py, from 2.12
on), for that thread.
"""

import functools
import importlib.util
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .torch_compat import private

_lock = threading.RLock()
# The function that each function of this pack has replaced.
_originals: weakref.WeakKeyDictionary[types.FunctionType, object] = weakref.WeakKeyDictionary()


def original(function: Any) -> Any:
    """The function that `function` has replaced in a `SharedScope`; any other object as it is."""
    return _originals.get(function, function) if type(function) is types.FunctionType else function


class _OfThread(threading.local):
    """How often this thread is inside a scope."""

    users = 0


class SharedScope:
    """A set of switches that overlapping users share.

    If another pack replaces a function of this pack meanwhile, the replacement stays, and may go on calling this pack's
    function, which outside of the scope must do what the original does.

    Args:
        switches: name -> (read, write); a name without an entry is ignored.
        of_thread: each thread has values of its own.
    """

    def __init__(self, switches: dict[str, tuple[Callable[[], object], Callable[[Any], None]]], of_thread: bool = False):
        self._switches = switches
        self._of_thread = of_thread
        self._saved: dict[int, dict[str, object]] = {}
        self._functions: dict[str, object] = {}  # replacements by this pack, by name
        self._users: dict[int, int] = {}
        self._own = _OfThread()

    @contextmanager
    def applied(self, **values: object) -> Iterator[None]:
        self.enter(**values)
        try:
            yield
        finally:
            self.exit()

    @contextmanager
    def wrapping(self, **wrappers: Callable[[Any], Any]) -> Iterator[None]:
        """Replace functions by `wrapper(function)` until the block ends; overlapping users share the first one's wrapper."""
        with _lock:
            saved = self._saved.get(self._scope(), {})
            functions = {name: self._read(name) for name in wrappers if name in self._switches and name not in saved}
            self.enter(**{name: wrappers[name](function) for name, function in functions.items() if function is not None})
        try:
            yield
        finally:
            self.exit()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context with the values from before the scope, unless other threads use the scope. Values that are set inside are
        those that `exit` restores later. A user that enters the scope inside counts as its first and last user."""
        with _lock:
            scope, users = self._scope(), self._own.users
            is_only_user = bool(users) and self._users.get(scope) == users
            saved = self._saved.pop(scope) if is_only_user else {}
            now = {name: self._switches[name][0]() for name in saved}
            for name, value in saved.items():
                self._switches[name][1](value)
            if is_only_user:
                del self._users[scope]
                self._own.users = 0
        try:
            yield
        finally:
            with _lock:
                if is_only_user:
                    others = self._users.get(scope, 0)  # threads that have set values meanwhile
                    inside = {name: self._switches[name][0]() for name in saved} if not others else {}
                    self._saved[scope] = {**saved, **inside, **self._saved.get(scope, {})}
                    self._users[scope], self._own.users = others + users, users
                for name, value in now.items():
                    self._switches[name][1](value)

    def _scope(self) -> int:
        return threading.get_ident() if self._of_thread else 0

    def _read(self, name: str) -> Any:
        return original(self._switches[name][0]())

    def enter(self, **values: object) -> None:
        with _lock:
            scope = self._scope()
            values = {name: value for name, value in values.items() if name in self._switches}
            if not self._users.get(scope):
                self._saved[scope] = {name: self._read(name) for name in values}
            self._users[scope] = self._users.get(scope, 0) + 1
            self._own.users += 1
            try:
                for name, value in values.items():
                    if name in self._functions:  # replaced by an overlapping user
                        continue
                    before = self._saved[scope].setdefault(name, self._read(name))
                    if callable(before):
                        self._functions[name] = value
                        if type(value) is types.FunctionType:
                            _originals[value] = before
                    self._switches[name][1](value)
            except BaseException:
                self.exit()
                raise

    def exit(self) -> None:
        with _lock:
            scope = self._scope()
            self._users[scope] -= 1
            self._own.users -= 1
            if not self._users[scope]:
                del self._users[scope]
                for name, value in reversed(self._saved.pop(scope).items()):  # later values may depend on earlier ones
                    if not callable(value) or self._switches[name][0]() is self._functions.pop(name, None):
                        self._switches[name][1](value)


@functools.cache
def _config_is_of_thread() -> bool:
    """Whether PyTorch's settings are per thread: other threads do not see what one thread sets."""
    config, seen = private.dynamo_config, []
    with config.patch(recompile_limit=config.recompile_limit + 1):
        asking = threading.Thread(target=lambda: seen.append(config.recompile_limit))
        asking.start()
        asking.join()
        return seen != [config.recompile_limit]


def attribute(owner: object, name: str) -> tuple:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def attributes(owner: object, names: tuple[str, ...]) -> dict:
    """Switches for those of the attributes that `owner` has."""
    return {name: attribute(owner, name) for name in names if hasattr(owner, name)}


def entry(table: Callable[[], Any], name: str) -> tuple:
    """(read, write) of an entry of a dict; the value None stands for no entry."""

    def write(value: object) -> None:
        if value is None:
            table().pop(name, None)
        else:
            table()[name] = value

    return (lambda: table().get(name)), write


compile_scope = SharedScope(
    {
        **attributes(
            private.dynamo_config,
            (
                "recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit", "fake_tensor_cache_enabled",
                "use_recursive_dict_tags_for_guards", "capture_scalar_outputs", "capture_dynamic_output_shape_ops",
                "automatic_dynamic_shapes", "assume_static_by_default", "specialize_float",
                "skip_guards_on_constant_func_defaults", "skip_tensor_guards_with_matching_dict_tags", "suppress_errors",
                "error_on_recompile", "inline_inbuilt_nn_modules", "install_free_tensors", "prepare_freezing",
                "allow_unspec_int_on_nn_module",
            ),
        ),
        **attributes(private.shape_config, ("use_duck_shape",)),
        **attributes(private.inductor_config, ("freezing",)),
        **attributes(torch.compiler.config, ("dynamic_sources",)),
    },
    of_thread=_config_is_of_thread(),
)  # fmt: skip
lowering_settings = SharedScope(
    attributes(private.functorch_config, ("force_non_lazy_backward_lowering",)),
    of_thread=_config_is_of_thread(),
)


_LIBDEVICE = "TRITON_LIBDEVICE_PATH"


# Folders of inductor and Triton (torch/_inductor/runtime/cache_dir_utils.py), one for the process, so the last user decides.
folder_scope = SharedScope({name: entry(lambda: os.environ, name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")})


def _triton_knobs() -> dict:
    """Settings of Triton that were made in Python (triton/knobs.py)."""
    knobs = sys.modules.get("triton.knobs")
    return {} if knobs is None else vars(knobs.nvidia)


_libdevice = {"variable": entry(lambda: os.environ, _LIBDEVICE), "knob": entry(_triton_knobs, "libdevice_path")}
# NVIDIA's library of functions, which Triton puts into kernels. One is set for the whole process.
libdevice_scope = SharedScope(_libdevice)


@functools.cache
def _tritons_libdevice() -> str | None:
    spec = importlib.util.find_spec("triton")
    file = Path(spec.origin).parent / "backends/nvidia/lib/libdevice.10.bc" if spec is not None and spec.origin else None
    return str(file) if file is not None and file.is_file() else None


def libdevice() -> dict[str, str]:
    """The values for `libdevice_scope`: Triton's own library, unless somebody has chosen one.

    With `emulate_precision_casts`, which we set, PyTorch from 2.13 on sets the CUDA toolkit's library for the process, if there
    is one, when it compiles the first kernel (torch/_inductor/runtime/compile_tasks.py). PyTorch uses a graph on disk only with
    the library that it was made with (codecache.py, `extern_libs_key`): after a restart, the first graph was compiled again.
    """
    file = _tritons_libdevice() if private.extern_libs_key is not None else None
    return {} if file is None or any(read() for read, _write in _libdevice.values()) else dict.fromkeys(_libdevice, file)


def numerics() -> tuple:
    """Settings of PyTorch on which results on a GPU depend; other nodes change some of them for a while."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        *(cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *(getattr(cuda.matmul, f"allow_{name}", None) for name in _REDUCTIONS),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        torch.are_deterministic_algorithms_enabled(),
    )


def modes() -> tuple:
    """Modes of PyTorch in which a model is called; each needs separate code and separate tensors."""
    autocast = ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast


_REDUCTIONS = "fp16_accumulation", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"


def _precision(owner: Any, *operations: Any) -> tuple:
    """(read, write) of the precision of fp32 products: PyTorch's `allow_tf32` and each operation's newer `fp32_precision`.

    PyTorch raises an error where somebody reads the older setting after only the newer was changed. So both are written, the
    older where it can be read. "none" means the precision for all operations, and is written if that is the wanted precision.
    """

    def older() -> bool | None:
        try:
            return owner.allow_tf32
        except RuntimeError:
            return None

    def read() -> tuple:
        return older(), [operation.fp32_precision for operation in operations]

    def write(value: Any) -> None:
        before = older()
        allow, precisions = (None if before is None else True, ["tf32"] * len(operations)) if value is True else value
        if changes := allow not in (None, before):  # else a precision of "medium" would become "high"
            owner.allow_tf32 = allow
        for operation, precision in zip(operations, precisions, strict=True):
            if changes or operation.fp32_precision != precision:
                above = torch.backends.cudnn.fp32_precision
                operation.fp32_precision = "none" if precision == above else precision

    return read, write


sampling_scope = SharedScope(
    {
        "matmul_tf32": _precision(torch.backends.cuda.matmul, torch.backends.cuda.matmul),
        "cudnn_tf32": _precision(torch.backends.cudnn, torch.backends.cudnn.conv, torch.backends.cudnn.rnn),
        "cudnn_benchmark": attribute(torch.backends.cudnn, "benchmark"),
    }
)


def sampling_switches(allow_tf32: bool, cudnn_benchmark: bool) -> dict[str, bool]:
    """The values for `sampling_scope`: only what the user turned on."""
    wanted = {"matmul_tf32": allow_tf32, "cudnn_tf32": allow_tf32, "cudnn_benchmark": cudnn_benchmark}
    return {name: True for name, is_on in wanted.items() if is_on}


def is_nvidia(device: torch.device) -> bool:
    """Whether `device` is an NVIDIA card; PyTorch for AMD's cards calls them cuda as well."""
    return device.type == "cuda" and torch.version.hip is None
