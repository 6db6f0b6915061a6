"""Numbers that vary, in blocks that are traced once: floats, and lists in which something is looked for."""

import pytest
import torch
from support import Block, CompiledNet, Net, relative_error

pytestmark = pytest.mark.usefixtures("inference_mode")


class Normed(Block):
    """As every transformer block: norms with an epsilon, and a number of its own."""

    def __init__(self, width=8):
        super().__init__(width)
        self.norm = torch.nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.scale = 0.5

    def forward(self, x, strength=1.0):
        return super().forward(x, torch.full_like(x[:, :1], 1.0) * self.scale * strength)


def test_a_block_is_traced_once(engine):
    """As a symbol the epsilon was a reason to begin anew, when all had been traced."""
    from torch._dynamo.utils import get_compilation_metrics

    net = Net(Normed)
    known = set(map(id, get_compilation_metrics()))
    x = torch.randn(2, 6, 8)
    assert relative_error(CompiledNet(engine, net, backend="aot_eager", dynamic="auto").at_once(x), net(x)) < 1e-5
    metrics = [m for m in get_compilation_metrics() if id(m) not in known]
    assert len(metrics) == 1 and not metrics[0].restart_reasons


@pytest.mark.parametrize("at_once", [True, False])
def test_floats_that_differ_cost_one_graph_more(engine, at_once):
    net = Net(Normed, count=4)
    for number, block in enumerate(net.blocks):
        block.scale = 0.25 * (number + 1)
    step = CompiledNet(engine, net, dynamic="auto")

    def run(strength):
        x = torch.randn(2, 6, 8)
        assert relative_error(step.call(at_once, x, strength=strength), net(x, strength=strength)) < 1e-6
        return step.graphs

    graphs = [run(strength) for strength in (1.0, 0.7, 1.3, 0.2, 0.9)]
    assert graphs[-1] == graphs[2] <= 3


class Small(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.scale


def small_net(block):
    net = Net(block, count=2)
    net.entry = torch.nn.Identity()
    return net


class Numbered(Small):
    """What patches do with the host's `cond_or_uncond`, a list of numbers (comfy_extras/nodes_nag.py, nodes_sag.py)."""

    def forward(self, x, numbers):
        if 1 in numbers and 0 not in numbers:
            x = x * 2
        if 3 in numbers:
            x = x + numbers.index(3)
        return super().forward(x * numbers.count(5) if 5 in numbers else x)


def test_whether_a_number_is_among_numbers_that_vary(engine):
    """PyTorch before 2.15 says no."""
    for numbers in ([1, 0], [1], [0], [3, 1], [2, 3], [5, 5, 1], [4, 2], [2, 7], [1, 2]):
        net, x = small_net(Numbered), torch.randn(2, 6, 8)
        expected = net(x, numbers=list(numbers))
        step = CompiledNet(engine, net, backend="aot_eager", dynamic="auto")
        assert relative_error(step.at_once(x, numbers=list(numbers)), expected) < 1e-6, numbers
        assert step.graphs and not step.failures


# What else may be done with such numbers.
QUESTIONS = {
    "a set": lambda n: 2 if 1 in set(n) else 1,
    "another": lambda n: 2 if {1, 0} == set(n) else 1,
    "a table": lambda n: {0: 3, 1: 4}.get(n[0], 10),
    "equality": lambda n: 2 if n == [1, 0] else 1,
    "among tuples": lambda n: 2 if tuple(n) in ((1, 0), (1,)) else 1,
    "among constants": lambda n: 2 if n[0] in (1, 3) else 1,
    "in a range": lambda n: 2 if n[0] in range(1, 4) else 1,
    "not in": lambda n: 2 if 1 not in n else 1,
    "places": lambda n: 1 + len([i for i, c in enumerate(n) if c == 1]),
}


class Asking(Small):
    def forward(self, x, numbers, question):
        return super().forward(x * QUESTIONS[question](numbers))


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_about_numbers_that_vary(engine, question):
    net = small_net(Asking)
    step = CompiledNet(engine, net, dynamic="auto")
    for numbers in ([1, 0], [1], [0], [3, 1], [2, 3]):
        x = torch.randn(2, 6, 8)
        expected = net(x, numbers=list(numbers), question=question)
        assert relative_error(step.at_once(x, numbers=list(numbers), question=question), expected) < 1e-6, numbers
    if question == "in a range":  # an error of PyTorch 2.11's own: the blocks run eager, and the report says so
        assert step.graphs or step.failures
    else:
        assert step.graphs and not step.failures
