"""Stand in for graphics cards in a process that must not touch them: the compile process lowers for cards that are described.

So that process makes no CUDA context, which would take some 600 MiB of the card's memory, and needs neither a card nor a
driver: `CUDA_VISIBLE_DEVICES` hides the cards, and this module answers what lowering asks a driver. The answers come from
`describe`, which runs where the cards are. Nothing can be launched, so nothing is measured. Constants are folded on the CPU.
"""

import functools
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

# In a cubin: the section on all kernels, the attribute with registers per thread, and the form of attributes with a payload
# (docs.nvidia.com/cuda/cuda-binary-utilities; seen with `cuobjdump -elf`: EIATTR_REGCOUNT, EIFMT_SVAL).
_INFO, _REGISTERS, _WITH_PAYLOAD = b".nv.info", 0x2F, 4


def describe() -> list[dict[str, Any]]:
    """The properties of the NVIDIA cards that this process uses, as JSON."""
    if torch.version.cuda is None or not torch.cuda.is_initialized():
        return []
    return [_described(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]


def _described(card: Any) -> dict[str, Any]:
    values = {name: getattr(card, name) for name in dir(card) if not name.startswith("_")}
    return {name: value for name, value in values.items() if isinstance(value, int | str)}


def stand_in(cards: list[dict[str, Any]], make: Callable[..., torch.Tensor] | None = None) -> None:
    """Answer for these cards until the process ends. Call this before inductor is imported.

    Args:
        cards: the result of `describe`.
        make: makes a tensor on a card, given a function of PyTorch's; None: only constants are made, on the CPU.
    """
    properties = [SimpleNamespace(**card) for card in cards]

    def of(device: Any = None) -> Any:
        return properties[(device if isinstance(device, int) else torch.device(device or "cuda").index) or 0]

    def nothing(*_args: Any, **_kwargs: Any) -> None: ...

    def first(*_args: Any) -> int:
        return 0

    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(properties),
            "current_device": first,
            "get_device_properties": of,
            "get_device_capability": lambda device=None: (of(device).major, of(device).minor),
            "get_device_name": lambda device=None: of(device).name,
            "is_bf16_supported": lambda *_args, **_kwargs: of().major >= 8,
            "memory_allocated": first,
            "synchronize": nothing,
            "get_rng_state": lambda *_args: torch.zeros(16, dtype=torch.uint8),
            "set_rng_state": nothing,
            "_lazy_init": nothing,
            "_exchange_device": first,
            "_maybe_exchange_device": first,
        },
        torch._C: {
            "_cuda_exchangeDevice": first,
            "_cuda_maybeExchangeDevice": first,
            "_cuda_setDevice": nothing,
            "_cuda_getDevice": first,
            "_cuda_getCurrentRawStream": first,
            "_accelerator_getDeviceIndex": first,
        },
        # If there were an accelerator, Dynamo would ask for its current stream.
        torch.accelerator: {"is_available": lambda: False, "current_accelerator": nothing, "current_device_index": first},
    }
    # PyTorch itself sets this where it sees no card: entering the device of a fake tensor then does nothing.
    FakeTensorMode.avoid_device_init = property(lambda _mode: True)
    for owner, functions in answers.items():
        for name, function in functions.items():
            setattr(owner, name, functools.partial(function))  # separate objects, as Dynamo has a rule for each function
    # All functions that make tensors end in these two. Folding looks at the values of constants, not at their devices.
    for name, empty in {"empty.memory_format": torch.empty, "empty_strided": torch.empty_strided}.items():
        _aten.impl(name, functools.partial(make or _constant, empty), "CUDA")
    _stand_in_for_compiler(of)


_aten = torch.library.Library("aten", "IMPL")  # registrations last as long as this object
_NO_CARD = "there is no card here"


def _constant(empty: Any, size: Any, *strides: Any, **kwargs: Any) -> torch.Tensor:
    if math.prod(size) != 1:  # inductor folds constants of one value; kernels would run on other tensors
        raise RuntimeError(_NO_CARD)
    return empty(size, *strides, **{name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")})


def _stand_in_for_compiler(of: Any) -> None:
    try:
        from triton.backends import backends
        from triton.backends.compiler import GPUTarget
        from triton.backends.driver import DriverBase
    except ImportError:  # inductor says what is missing
        return
    from torch._inductor import config as inductor_config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    class Card(DriverBase):
        """Triton's view of the first card. Inductor names the card of a kernel itself."""

        def __init__(self) -> None: ...

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", of().major * 10 + of().minor, of().warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_benchmarker(self) -> Any:
            raise RuntimeError(_NO_CARD)

    inductor_config.shape_padding = False  # inductor measures for each product whether padding pays
    backends["nvidia"] = replace(backends["nvidia"], driver=Card)
    CachingAutotuner._make_launchers = _note_registers
    precompile = getattr(CachingAutotuner, "_precompile_worker", None)
    if precompile is None or not hasattr(CachingAutotuner, "_dynamic_scale_rblock"):
        return

    def precompile_and_scale(autotuner: Any) -> None:
        """Add the kernel with smaller blocks before the autotuner is kept: else inductor adds it where code is loaded, and
        Triton compiles there, with a C compiler."""
        precompile(autotuner)
        _note_registers(autotuner)
        autotuner._dynamic_scale_rblock()
        autotuner.inductor_meta["dynamic_scale_rblock"] = False
        vars(autotuner).pop("_could_rblock_scale", None)  # from 2.13 on, the cached answer

    CachingAutotuner._precompile_worker = precompile_and_scale


def _note_registers(autotuner: Any) -> None:
    """Replaces `CachingAutotuner._make_launchers`, which loads kernels onto the card. Inductor reads the number of registers
    from a loaded kernel, to tell whether a kernel with smaller blocks would run faster."""
    for result in autotuner.compile_results:
        kernel = result.kernel
        if getattr(kernel, "n_regs", None) is None:
            kernel.n_regs = registers(_cubin_of(kernel))


def _cubin_of(kernel: Any) -> bytes:
    if hasattr(kernel, "asm"):
        return kernel.asm["cubin"]
    if kernel.cubin_path is None:
        return kernel.cubin_raw
    with open(kernel.cubin_path, "rb") as file:
        return file.read()


def registers(cubin: bytes) -> int | None:
    """Registers per thread of the kernel in a cubin (an ELF file); None if the file does not tell."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    # For each section: the offset of its name in the section of names, its own offset, and its size.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + i * size) for i in range(count)]
    for name, begin, length in sections:
        at = sections[names][1] + name
        if cubin[at : cubin.index(b"\0", at)] == _INFO:
            return max(_registers_in(cubin[begin : begin + length]), default=None)
    return None


def _registers_in(info: bytes) -> list[int]:
    found, at = [], 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == _WITH_PAYLOAD and attribute == _REGISTERS:
            found.append(struct.unpack_from("<I", info, at + 8)[0])
        at += 4 + (size if form == _WITH_PAYLOAD else 0)
    return found
