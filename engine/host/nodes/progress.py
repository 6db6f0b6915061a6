"""Show in the page what a warmup is doing: the node's progress bar, and a line of text in the node."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import comfy.utils

from ...compile.session import monitor
from ...compile_process.client import compile_process
from ...messages import status
from ...messages.words import say
from ...threads import started

SECONDS_BETWEEN_TEXTS = 1.0
# Called with the owner of a page, the node's id and the text; set by nodes/routes.py.
tell_page: Callable[[status.Owner, str, str], None] | None = None


class WarmupProgress:
    """A context in which the node shows what the warmup is doing, at which size of how many, and for how long at that size.

    The bar has a part for each step of a size and for each class of blocks. The text goes only to the page that has queued the
    prompt: another workflow may have a node of the same id. The text stands where the report will. ComfyUI's
    `send_progress_text` is not used: the page would add a widget for it, and the node would grow over the nodes below.
    """

    def __init__(self, sizes: int, steps: int, kinds: int, inductor: bool, node_id: str | None):
        self._sizes, self._in_each = sizes, steps + kinds
        self._owner, self._node_id = status.owner_now(), node_id
        self._bar = comfy.utils.ProgressBar(sizes * self._in_each)
        self._began = self._size_began = time.perf_counter()
        self._kinds, self._inductor = kinds, inductor
        self._size, self._stepped, self._part, self._graphs = "", False, 0, 0
        self._seen: list[str] = []
        self._compiling: str | None = None
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="torch-compile-kit-progress", daemon=True)

    def __enter__(self) -> WarmupProgress:
        monitor.listener = self._on_compile
        if tell_page is not None:
            started(self._ticker)
        return self

    def __exit__(self, *exc: object) -> None:
        monitor.listener = None
        self._ended.set()
        if self._ticker.ident is not None:
            self._ticker.join()
        if exc[0] is None:  # a warm size takes fewer steps
            self._bar.update_absolute(self._sizes * self._in_each)
        compiled = say("graphsCompiled", self._graphs) if self._graphs > 1 else say("graphCompiled")
        how = compiled if self._graphs else say("noGraph")
        self._say(say("stopped" if exc[0] is not None else "warm"), how, self._began)

    def begin(self, label: str, index: int) -> None:
        # Without "(latent_image)": the page has room for two lines.
        self._size = say("sizeOf", label.partition(" (")[0], index + 1, self._sizes)
        self._seen, self._part, self._size_began = [], 0, time.perf_counter()
        self._bar.update_absolute(index * self._in_each)
        self._tell()

    def step(self) -> None:
        self._stepped = True
        self._advance()

    def _on_compile(self, block: str | None) -> None:
        self._compiling = block
        if block is not None:
            self._graphs += 1
            if block not in self._seen:
                self._seen.append(block)
                self._advance()
        self._tell()

    def _advance(self) -> None:
        """Fill one more part of this size, but never the last: a size may take more steps."""
        if self._part < self._in_each - 1:
            self._part += 1
            self._bar.update(1)

    def _tick(self) -> None:
        """Update the seconds in the text while another thread compiles."""
        while not self._ended.wait(SECONDS_BETWEEN_TEXTS):
            self._tell()

    def _tell(self) -> None:
        block = self._compiling
        if block is None:
            how = say("sampling") if self._stepped or self._seen else say("loadingModel")
        elif self._inductor and not compile_process.is_ready:
            how = say("loadingCompiler")
        else:
            how = say("compilingOf", block, len(self._seen), max(self._kinds, len(self._seen)))
        self._say(self._size, how, self._size_began)

    def _say(self, what: str, how: str, since: float) -> None:
        if tell_page is not None and self._node_id is not None:
            tell_page(self._owner, self._node_id, say("phase", what, how, f"{time.perf_counter() - since:.0f}"))
