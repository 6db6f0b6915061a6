"""Nodes for the tests' server: tiny models of which the host's loader knows only the full size, their prompts, odd values."""

import importlib.util
import os

import torch

_spec = importlib.util.spec_from_file_location("tiny_models", os.environ["TINY_MODELS"])
tiny_models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny_models)
NAME = {"name": (list(tiny_models.MODELS),)}


class TinyModel:
    INPUT_TYPES = classmethod(lambda cls: {"required": NAME})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "tests"

    def load(self, name):
        patcher = tiny_models.build_patcher(name)
        # A trainer loads it again, as the host's loaders have it.
        patcher.cached_patcher_init = (lambda name, disable_dynamic=False: tiny_models.build_patcher(name), (name,))
        return (patcher,)


class TinyPrompts:
    INPUT_TYPES = classmethod(
        lambda cls: {"required": {**NAME, "positive_tokens": ("INT",), "negative_tokens": ("INT",), "seed": ("INT",)}}
    )
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    FUNCTION = "encode"
    CATEGORY = "tests"

    def encode(self, name, positive_tokens, negative_tokens, seed):
        positive, _ = tiny_models.conditioning(name, positive_tokens, seed)
        _, negative = tiny_models.conditioning(name, negative_tokens, seed)
        return positive, negative


class TrainingData:
    """One latent and one prompt for each of `sizes`, such as "64x64 96x64".

    Runs each time, after the model is loaded, and sets the seed of a trainer's new weights, which the host leaves to chance.
    """

    INPUT_TYPES = classmethod(lambda cls: {"required": {**NAME, "sizes": ("STRING",), "model": ("MODEL",)}})
    IS_CHANGED = classmethod(lambda cls, **_: float("nan"))
    RETURN_TYPES = ("LATENT", "CONDITIONING")
    OUTPUT_IS_LIST = (True, True)
    FUNCTION = "make"
    CATEGORY = "tests"

    def make(self, name, sizes, model):
        torch.manual_seed(7)
        generator, latents, prompts = torch.Generator().manual_seed(5), [], []
        for number, size in enumerate(sizes.split()):
            shape = tiny_models.empty_latent(name, *map(int, size.split("x"))).shape
            latents.append({"samples": torch.randn(shape, generator=generator)})
            prompts.append(tiny_models.conditioning(name, 24, number)[0])
        return latents, prompts


class Losses:
    """Tells a training's losses and how many graphs this process has compiled."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"losses": ("LOSS_MAP",)}})
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "tell"
    CATEGORY = "tests"

    def tell(self, losses):
        from torch._dynamo.utils import counters

        return {"ui": {"losses": losses["loss"], "graphs": [counters["stats"]["unique_graphs"]]}}


class Anything(str):
    """The type of switches and reroutes of other packs, which the host lets into every input."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __ne__(self, other):
        return False


VALUES = {
    "nothing": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus one": -1,
    "zero": 0,
    "huge": 10**30,
    "huge number of digits": 10**4000,  # the host cannot write more into its history
    "fraction": 0.5,
    "truth": True,
    "word": "abc",
    "eager": "eager",
    "long text": "99x99\n" * 1_500_000,
    "bytes": b"\xff\x00",
    "list": [1, "a"],
    "object": object(),
    "tensor": torch.zeros(1, 16, 8, 8),
    "empty latent": {},
    "latent of text": {"samples": "abc"},
    "flat latent": {"samples": torch.zeros(5)},
    "latent of nothing": {"samples": torch.zeros(0, 16, 8, 8)},
    "empty conditioning": [],
    "conditioning of text": [["abc", {}]],
    "conditioning of another width": [[torch.zeros(1, 4, 3), {}]],
}


class Value:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"value": (list(VALUES),)}})
    RETURN_TYPES = (Anything("*"),)
    FUNCTION = "give"
    CATEGORY = "tests"

    def give(self, value):
        return (VALUES[value],)


NODE_CLASS_MAPPINGS = {
    "TestTinyModel": TinyModel,
    "TestTinyPrompts": TinyPrompts,
    "TestTrainingData": TrainingData,
    "TestLosses": Losses,
    "TestValue": Value,
}
