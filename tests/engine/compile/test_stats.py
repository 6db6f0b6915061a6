"""What compiling has cost, added up while other threads count on."""

from collections import Counter


class Counted(int):
    """A count at which another thread has its turn whenever it is added, subtracted or compared: it counts a new break."""

    def __new__(cls, value, breaks):
        made = super().__new__(cls, value)
        made.breaks = breaks
        return made

    def _another(self):
        self.breaks[f"another {len(self.breaks)}"] = 1
        return int(self)

    def __add__(self, other):
        return self._another() + other

    def __sub__(self, other):
        return self._another() - other

    def __gt__(self, other):
        return self._another() > other


def test_graph_breaks_may_be_counted_while_they_are_added(engine):
    stats = engine("compile.session").CompileStats
    live, total = stats(), stats(breaks=Counter({"print": 1}))
    dict.update(live.breaks, {reason: Counted(count, live.breaks) for reason, count in (("print", 2), ("len", 3))})
    total.add(live)
    assert total.breaks == {"print": 3, "len": 3}
    assert len(live.breaks) == 4, "the other thread had no turn; this proves nothing"
    since = live - stats(breaks=Counter({"print": 1}))
    assert (since.breaks["print"], since.breaks["len"]) == (1, 3)
    assert len(live.breaks) > 4
