"""What compiling has cost, as numbers that can be added and subtracted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recompile:
    """One compilation of code that had been compiled before.

    Args:
        block: class name of the block.
        guard: PyTorch's own words, the first guard that failed.
    """

    block: str
    guard: str


@dataclass
class CompileStats:
    """What compiling has cost so far. Subtract an earlier copy to see what a run added.

    Args:
        from_disk: of the graphs, those that inductor's disk cache had.
    """

    graphs: int = 0
    graph_breaks: int = 0
    seconds: float = 0.0
    recompiles: list[Recompile] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    from_disk: int = 0

    def copy(self) -> CompileStats:
        return CompileStats(
            self.graphs, self.graph_breaks, self.seconds, list(self.recompiles), dict(self.breaks), self.from_disk
        )

    def add(self, other: CompileStats) -> None:
        """Count what has been compiled since."""
        self.graphs += other.graphs
        self.graph_breaks += other.graph_breaks
        self.seconds += other.seconds
        self.recompiles += other.recompiles
        self.from_disk += other.from_disk
        for reason, count in list(other.breaks.items()):  # others may count on while we add
            self.breaks[reason] = self.breaks.get(reason, 0) + count

    def __add__(self, other: CompileStats) -> CompileStats:
        total = self.copy()
        total.add(other)
        return total

    def __sub__(self, earlier: CompileStats) -> CompileStats:
        return CompileStats(
            self.graphs - earlier.graphs,
            self.graph_breaks - earlier.graph_breaks,
            self.seconds - earlier.seconds,
            self.recompiles[len(earlier.recompiles) :],
            {k: v - earlier.breaks.get(k, 0) for k, v in list(self.breaks.items()) if v > earlier.breaks.get(k, 0)},
            self.from_disk - earlier.from_disk,
        )
