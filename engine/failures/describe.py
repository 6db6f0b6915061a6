"""Describe why a block could not be compiled, and what to do about it."""

import re
from dataclasses import dataclass

import torch

from ..torch_compat import private
from .machine import Machine
from .table import MAY_PASS, OTHERWISE, diagnose, in_one_line, message_of, sentence, text_of


@dataclass(frozen=True)
class Failure:
    """Why a block group runs eager."""

    block: str
    reason: str  # the line of the error that names the cause
    cure: str
    may_pass: bool = False  # another try may succeed: the disk was full, the compiler was killed

    def message(self) -> str:
        return f"{self.block} could not be compiled and runs uncompiled: {self.reason} {self.cure}"


class DescribedError(Exception):
    """A compiler error that comes with its cause and cure."""

    def __init__(self, reason: str, cure: str, may_pass: bool):
        super().__init__(reason)
        self.reason, self.cure, self.may_pass = reason, cure, may_pass


def chain(error: BaseException) -> list[BaseException]:
    """The error and all errors that caused it, outermost first."""
    errors: dict[int, BaseException] = {}  # by `id`: `==` of two errors may compare the tensors that they hold
    current: BaseException | None = error
    while current is not None and id(current) not in errors:
        errors[id(current)] = current
        causes = getattr(current, "inner_exception", None), current.__cause__, current.__context__
        current = next((cause for cause in causes if isinstance(cause, BaseException)), None)
    return list(errors.values())


def never_swallowed(error: BaseException) -> bool:
    """Whether an error must reach the host. When out of memory, the host frees models and retries. Gradient checkpointing ends
    a block's recomputation with an error as soon as it has all that the backward needs (torch/utils/checkpoint.py)."""
    # The user's cancel: an Exception up to ComfyUI 0.25, a BaseException since.
    return lacks_memory(error) or any(
        isinstance(e, private.StopRecomputation) or type(e).__name__ == "InterruptProcessingException" for e in chain(error)
    )


def lacks_memory(error: BaseException) -> bool:
    """Whether the process or a device had too little memory, and that caused the error."""
    return any(isinstance(e, MemoryError) or is_out_of_memory(e) for e in chain(error))


# Out-of-memory messages of CUDA's runtime, of CUDA's driver (when it loads kernels), of Triton's launcher, of PyTorch for RAM
# and MPS, and of comfy-aimdo.
_NO_MEMORY = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory|Triton Error \[(CUDA|HIP)\].*out of memory|DefaultCPUAllocator:"
    r"|MPS backend out of memory|VRAM grow failed|Fault failed: 2"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has no memory left; CUDA's own error has no class in PyTorch (comfy/model_management.py, `is_oom`)."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(message_of(error)) is not None


def is_limit_hit(error: BaseException) -> bool:
    return isinstance(error, private.FailOnRecompileLimitHit)


def describe_failure(block: str, error: Exception, machine: Machine | None = None) -> Failure:
    """Name the cause, and the cure for `machine` or this machine.

    Never raises, as the block's call goes on: examining a machine can fail in as many ways as there are broken installations.
    """
    try:
        return _described(block, error, machine)
    except Exception as another:
        reason = f"{in_one_line(error).rstrip('.')} (to look for its cure failed: {in_one_line(another)})."
        return Failure(block, reason, OTHERWISE)


def _described(block: str, error: Exception, machine: Machine | None) -> Failure:
    errors = chain(error)
    for described in errors:
        if isinstance(described, DescribedError):
            return Failure(block, described.reason, described.cure, described.may_pass)
    # For an error without a row in the table: what the backend raised, without PyTorch's wrapping.
    unwrapped = next(e for e in errors if not isinstance(getattr(e, "inner_exception", None), BaseException))
    diagnosed, reason, cure = diagnose(errors) or (None, sentence(unwrapped), OTHERWISE)
    # An OSError may pass, unless it is, or has caused, the error that the table has a cure for: "cl is not found" comes from a
    # FileNotFoundError.
    unexplained = errors[: [*map(id, errors)].index(id(diagnosed))] if diagnosed is not None else errors
    may_pass = any(isinstance(e, OSError | EOFError) for e in unexplained)
    may_pass = may_pass or any(re.search(MAY_PASS, text_of(e)) for e in errors)
    text = cure if isinstance(cure, str) else (machine or Machine.this()).cure(cure)
    return Failure(block, reason, text, may_pass or lacks_memory(error))
