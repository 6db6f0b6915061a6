"""Two runs that wait for what the process does before its first compilation."""

import threading

import torch
from support import Net


def test_a_run_that_need_not_wait_goes_on_while_another_still_waits(engine, monkeypatch):
    """Each run waits for the preparation by itself, and none behind another: it may hang."""
    startup, go_on, waits = engine("cache.startup"), threading.Event(), threading.Event()
    hanging = threading.Thread(target=go_on.wait, args=(120,), daemon=True)
    hanging.start()
    monkeypatch.setattr(startup, "_thread", hanging)
    polls, right = {"first": 0, "second": 0}, {}

    def run(name, width):
        def poll():
            polls[name] += 1
            if name == "first" and polls[name] == 3:  # before its first block, and twice while it waits
                waits.set()
            assert name == "first" or polls[name] < 50, "it waits behind the first"

        net, x = Net(width=width), torch.randn(2, 4, width)
        call = engine("background.model_call").ModelCall(poll=poll)
        settings = engine("settings").CompileSettings(backend="eager")
        with torch.inference_mode():
            expected = net(x)
            with engine("compile.session").watching, engine("compile.binding").Binding(net, settings, call).bound():
                right[name] = torch.equal(net(x), expected)

    first = threading.Thread(target=run, args=("first", 8))
    first.start()
    try:
        assert waits.wait(60)
        monkeypatch.setattr(startup, "_thread", None)  # for those who come from now on
        run("second", 16)
        assert right == {"second": True} and first.is_alive()
    finally:
        go_on.set()
        first.join(60)
    assert right["first"]
