"""Show in the page what a warmup is doing: the node's progress bar, and a line of text in the node."""

from __future__ import annotations

import sys
import threading
import time

import comfy.utils

from ...compile.events import monitor

SECONDS_BETWEEN_TEXTS = 1.0


class WarmupProgress:
    """A context: while it lasts, the node tells what is compiled, which of how many, and for how long.

    Args:
        sizes: how many sizes there are.
        steps: of the sampler, for all sizes.
        node_id: None outside a workflow; then nothing is shown.
    """

    def __init__(self, sizes: int, steps: int, node_id: str | None):
        self._sizes, self._node_id = sizes, node_id
        self._bar = comfy.utils.ProgressBar(steps)
        self._began = time.perf_counter()
        self._size = ""
        self._compiling: str | None = None
        self._graphs = 0
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="torch-compile-kit-progress", daemon=True)

    def __enter__(self) -> WarmupProgress:
        monitor.listener = self._on_compile
        if _sender() is not None and self._node_id is not None:
            self._ticker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        monitor.listener = None
        self._ended.set()
        if self._ticker.ident is not None:
            self._ticker.join()
        graphs = f"{self._graphs} graph{'s' * (self._graphs != 1)} compiled" if self._graphs else "nothing to compile"
        self._say("Stopped" if exc[0] is not None else "Warm", graphs)

    def begin(self, label: str, index: int, done: int) -> None:
        """A size begins: the `index`th from 0, when `done` steps of the sampler are over."""
        # Without "(latent_image)": the page has room for two lines.
        self._size = f"{label.partition(' (')[0]} ({index + 1} of {self._sizes})"
        self._bar.update_absolute(done)
        self._tell()

    def step(self) -> None:
        self._bar.update(1)

    def end(self, done: int) -> None:
        """A size is over, though it may have taken fewer steps, or none: it was warm."""
        self._bar.update_absolute(done)

    def _on_compile(self, block: str | None) -> None:
        self._compiling = block
        self._graphs += block is not None
        self._tell()

    def _tick(self) -> None:
        """The seconds go on while PyTorch compiles on the other thread."""
        while not self._ended.wait(SECONDS_BETWEEN_TEXTS):
            self._tell()

    def _tell(self) -> None:
        block = self._compiling
        self._say(self._size, f"compiling {block}, graph {self._graphs}" if block else "sampling")

    def _say(self, what: str, how: str) -> None:
        send = _sender()
        if send is not None and self._node_id is not None:
            send(f"{what}: {how}, {time.perf_counter() - self._began:.0f} s", self._node_id)


def _sender():
    """The host's function that shows a line of text in a node; None where no page listens, or the host has none."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    return getattr(server, "send_progress_text", None)
