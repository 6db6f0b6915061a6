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
        return (tiny_models.build_patcher(name),)


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


NODE_CLASS_MAPPINGS = {"TestTinyModel": TinyModel, "TestTinyPrompts": TinyPrompts, "TestValue": Value}
