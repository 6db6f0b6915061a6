"""Whether CUDA graphs can be captured from memory of cudaMallocAsync with this PyTorch: tried in a process of its own.

A recording that fails there can end the process (CUDAMallocAsyncAllocator.cpp, `free_impl`), and what makes it work touches
insides of PyTorch and Triton (cuda_graphs/launches.py). So a version that nobody has measured is tried once a machine, in a
process that may end, while images go on without graphs; the answer is kept with the compiled code.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from ..cache.disk import current, folder_name

logger = logging.getLogger("torch-compile-kit")
MEMORY = "captures"
WORKS = "capture and replay work"
SECONDS = 300
# What the other process takes on the GPU: its context, and some tensors.
ROOM = 1536 * 2**20
# Not `-m`: portable Pythons find nothing in the current folder.
CODE = "import sys; sys.path.insert(0, sys.argv[1]); from engine.cuda_graphs.probe import main; main()"


class _Probe:
    """Tried once a process."""

    def __init__(self) -> None:
        self.answer: bool | None = None
        self.thread: threading.Thread | None = None
        self._asked = False

    def works(self, device: torch.device) -> bool | None:
        """Whether captures work on `device`; None as long as that is not known. The first call has it found out."""
        if self.answer is None and not self._asked:
            cache = current()
            known = cache.recall(_folder(), MEMORY) if cache is not None else None
            if known is not None:
                self.answer = known == WORKS
            elif torch.cuda.mem_get_info(device)[0] > ROOM:  # else the next time
                self._asked = True
                self.thread = threading.Thread(target=self._try, name="torch-compile-kit probe", daemon=True)
                self.thread.start()
        return self.answer

    def _try(self) -> None:
        found = tried()
        self.answer = found is True
        if found is None:
            return  # the next process tries again
        words = WORKS if self.answer else "capture does not work"
        logger.info("CUDA graphs with cudaMallocAsync and PyTorch %s: %s", torch.__version__, words)
        cache = current()
        if cache is not None:
            cache.remember(_folder(), "cudaMallocAsync", MEMORY, words)


probe = _Probe()


def tried() -> bool | None:
    """Run `main` in a process of its own; whether it came to its end, None where the machine was to blame."""
    with tempfile.TemporaryDirectory(prefix="torch-compile-kit-probe-", ignore_cleanup_errors=True) as folder:
        own = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "TORCHINDUCTOR_CACHE_DIR": folder}
        own["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")
        try:
            done = subprocess.run(
                [sys.executable, "-c", CODE, str(Path(__file__).resolve().parents[2])],
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                check=False,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            logger.debug("the trial of CUDA graphs did not end: %s", error)
            return None
    logger.debug("the trial of CUDA graphs:\n%s%s", done.stdout, done.stderr)
    if "OutOfMemoryError" in done.stderr:
        return None
    return done.returncode == 0 and done.stdout.strip().endswith(WORKS)


def _folder() -> str:
    return folder_name("cudaMallocAsync", ((),))


def main() -> None:
    """What our graphs do, on the GPU: kernels of inductor and of our own, two sizes in turn, and one that fails halfway."""
    from . import group_norm as kernels
    from .capture import ModelGraphs

    if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
        raise RuntimeError("this process has another allocator: it would prove nothing")
    device = torch.device("cuda", 0)
    compiled = torch.compile(lambda x, scale: torch.nn.functional.silu(x * scale) + x.mean(1, keepdim=True), dynamic=True)
    weight = torch.linspace(0.5, 1.5, 64, device=device, dtype=torch.half)
    fails = False

    def model(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = compiled(x, scale).contiguous(memory_format=torch.channels_last)
        out = torch.empty_like(y)
        kernels.apply_factors(y, kernels.factors_of(y, 8, weight, weight, 1e-5), out, True)
        if fails and torch.cuda.is_current_stream_capturing():
            raise ValueError("in the middle of a capture")
        return compiled(out, scale) + x

    def check(graphs: ModelGraphs, size: int, step: int) -> None:
        x = torch.randn(2, 64, size, size, generator=torch.Generator().manual_seed(step)).to(device, torch.half)
        scale = torch.full((1,), 1.0 + step, device=device, dtype=torch.half)
        result, expected = graphs.call(size, model, (x, scale), {}, {}), model(x, scale)
        between = torch.ones(2**26, device=device)  # takes what a capture has given back
        assert torch.allclose(result, expected, rtol=1e-3, atol=1e-3) and between.sum() == 2**26

    with torch.inference_mode():
        for fails in (True, False):
            graphs = ModelGraphs()
            graphs.check_model(torch.nn.Linear(2, 2).to(device), device)
            for step in range(4):
                for size in (32, 48):
                    check(graphs, size, step)
            assert (graphs.captures, graphs.replays) == ((0, 0) if fails else (2, 4)), graphs.failures
    sys.stdout.write(WORKS)
    sys.stdout.flush()
    os._exit(0)
