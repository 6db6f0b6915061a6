"""Remember which vector instruction sets of the CPU inductor can use.

PyTorch compiles a line for each set and starts a Python that loads it (torch/_inductor/cpu_vec_isa.py, `check_build`): seconds
in every process, for answers that stay the same with compiler, PyTorch and CPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .scopes import folder_scope


def know_instruction_sets(record: Path) -> int:
    """Fill PyTorch's list of instruction sets, with the checks that `record` knows the outcome of left out.

    Only checks that succeeded are recorded: a failure may be gone the next time. They are compiled beside the record, not in a
    place below the system's temp folder that anybody can foresee.

    Returns:
        How many checks were made.
    """
    from torch._inductor import config, cpu_vec_isa

    listed = cpu_vec_isa.valid_vec_isa_list
    if listed.cache_info().currsize or config.cpp.vec_isa_ok is not None:
        return 0
    succeeded = _read(record)
    known = len(succeeded)
    with _answering(cpu_vec_isa, succeeded, record.parent) as made:
        listed()
    if len(succeeded) > known:
        record.write_text(json.dumps(sorted(succeeded)), encoding="utf-8")
    return len(made)


@contextmanager
def _answering(cpu_vec_isa, succeeded: set[str], place: Path) -> Iterator[list[str]]:
    """While it lasts, checks in `succeeded` are not made again, and those that succeed are added to it."""
    check = cpu_vec_isa.VecISA.check_build
    flags = cpu_vec_isa.x86_isa_checker()
    made: list[str] = []

    def check_build(isa, code: str) -> bool:
        parts = (code, cpu_vec_isa._get_isa_dry_compile_fingerprint(isa._arch_flags), sys.version, flags)
        key = hashlib.sha256(repr(parts).encode()).hexdigest()
        if key in succeeded:
            return True
        made.append(key)
        with (
            tempfile.TemporaryDirectory(dir=place, prefix="incoming-", ignore_cleanup_errors=True) as folder,
            folder_scope.holding(inductor_folder=folder),
        ):
            works = check(isa, code)
        if works:
            succeeded.add(key)
        return works

    cpu_vec_isa.VecISA.check_build = check_build
    try:
        yield made
    finally:
        cpu_vec_isa.VecISA.check_build = check


def _read(record: Path) -> set[str]:
    try:
        return set(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return set()
