"""Which attention kernel a model gets: measured once, in a call that leaves no trace."""

import pytest
import torch

pytestmark = pytest.mark.host


def attention_pytorch(q, *_args, **_kwargs):
    return q


class Executor:
    """What the host gives an APPLY_MODEL wrapper: the model, and a call of it, which empties a list as ControlNet's are."""

    def __init__(self):
        self.class_obj = type("Model", (), {"diffusion_model": torch.nn.Linear(2, 2)})()

    def __call__(self, x, _t, _concat, _context, control, options, **_kwargs):
        control["output"].pop()
        options["optimized_attention_override"](attention_pytorch, *[torch.randn(2, 32, 256) for _ in range(3)], 4)


@pytest.mark.parametrize("memory", ["enough", "too little"])
def test_the_measurement_is_made_once_and_remembered_when_complete(engine, monkeypatch, memory):
    choice, asked, remembered = engine("host.attention_choice"), [], []

    def seconds(kernel, _call):
        asked.append(kernel)
        if memory != "enough":
            raise torch.OutOfMemoryError
        return {"cudnn": 0.5}.get(kernel, 1.0)

    class Cache:
        def recall(self, *_):
            return None

        def remember(self, *what):
            remembered.append(what[-1])

    monkeypatch.setattr(engine("attention"), "_measure", seconds)
    monkeypatch.setattr(choice, "current", Cache)
    control = {"output": [1]}
    found = choice._choose("auto", Executor(), (torch.zeros(1), 0, None, None, control, {}), {})
    assert control == {"output": [1]}
    if memory == "enough":
        assert (found, remembered, asked) == ("cudnn", ["cudnn"], ["flash", "cudnn", "efficient"])
    else:
        assert (found, remembered, asked) == ("host", [], ["flash"])
