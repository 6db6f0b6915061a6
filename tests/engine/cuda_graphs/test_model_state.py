"""What CUDA graphs know of a model."""

import gc
import weakref

import torch
from support import Net


def test_a_model_of_another_packs_class_is_freed(engine):
    """Such classes are looked at in each call, the network's own if it has no weights beside its layers."""
    graphs_of = engine("cuda_graphs.capture").graphs_of
    net = Net()
    graphs_of(net).check_model(net, torch.device("cpu"))
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
