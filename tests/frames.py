"""How much memory Python maps for the frames of calls, at the worst of many depths."""

CALLS = 500


def _leaf(a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0, k=0, m=0):
    """Its frame is larger than one of `_at_depth`: at some depth it is the first that a piece of memory has no room for."""


def _pages_of_calls():
    import resource  # not on Windows

    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(CALLS):
        _leaf()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _at_depth(depth):
    return _at_depth(depth - 1) if depth else _pages_of_calls()


def most_pages():
    """Pages that CALLS calls cost, at the worst of depths that span several of the pieces in which Python keeps frames."""
    return max(map(_at_depth, range(400)))
