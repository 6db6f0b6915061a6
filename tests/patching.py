"""Shared by the tests of patches and of several models: sample with and without compiling, and compare."""

from contextlib import contextmanager

import torch
from patch_kinds.weights import louder
from sampling import sample


class Runs:
    """One tiny model and its inputs; `run` samples a patcher of it, with the same seed each time.

    Args:
        tiny: the module `devtools.tiny_models`.
        engine: the fixture of that name.
        name: of the tiny model.
    """

    def __init__(self, tiny, engine, name, cfg=4.0, steps=2, size=64, length=1):
        self.tiny, self.engine, self.name, self.cfg, self.steps = tiny, engine, name, cfg, steps
        self.patcher = tiny.build_patcher(name)
        self.positive, self.negative = tiny.conditioning(name)
        self.latent = tiny.empty_latent(name, size, size, length)

    def attach(self, patcher, **settings):
        """The patcher as the node returns it; the backend traces only, so that results are bit for bit the same."""
        chosen = self.engine("settings").CompileSettings(**{"backend": "eager", "compile": "at once", **settings})
        return self.engine("host.model.attach").attach(patcher, chosen)

    def run(self, patcher, positive=None, negative=None):
        conditioning = positive or self.positive, negative or self.negative
        return sample(patcher, conditioning, self.latent, self.cfg, seed=1, steps=self.steps)

    @property
    def groups(self):
        return list(self.engine("compile.registry").code_of(self.patcher.model.diffusion_model).groups.values())

    @property
    def graphs(self):
        return sum(group.stats.graphs for group in self.groups)

    @property
    def failures(self):
        return [group.failure.message() for group in self.groups if group.failure]

    def check(self, patch, again=None, **inputs):
        """Compiled equals eager with the patch, without it, and with it again; the number of graphs that it added.

        Args:
            patch: takes a clone of a patcher and patches it; returns it, or None.
            again: the patch when it is added again, if not the same.
            inputs: conditionings for the patched runs.
        """

        def patched(patcher, how=patch):
            clone = patcher.clone()
            return how(clone) or clone

        plain = self.run(self.patcher)
        expected = self.run(patched(self.patcher), **inputs)
        assert torch.isfinite(expected).all()
        assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-4), "the patch does nothing; this proves nothing"
        compiled = self.attach(self.patcher)
        same(self.run(compiled), plain, "before the patch")
        before = self.graphs
        assert before
        same(self.run(patched(compiled), **inputs), expected, "with the patch")
        added = self.graphs - before
        same(self.run(compiled), plain, "with the patch removed")
        same(self.run(patched(compiled, again or patch), **inputs), expected, "with the patch added again")
        same(self.run(self.attach(patched(self.patcher, again or patch)), **inputs), expected, "with the patch upstream")
        same(self.run(compiled), plain, "with the patch removed again")
        assert self.graphs - before == added, "what was compiled once is compiled again"
        return added

    def check_hook(self, path):
        """Compiled equals eager with a hook on the module at `path`, added when it was compiled, and with it removed."""
        compiled = self.attach(self.patcher)
        plain = self.run(compiled)
        same(plain, self.run(self.patcher), "before the hook")
        for _ in range(2):
            with self.hooked(path, lambda _module, _args, out: louder(out)):
                expected = self.run(self.patcher)
                assert not torch.allclose(expected, plain, rtol=1e-3), "the hook does nothing; this proves nothing"
                same(self.run(compiled), expected, "with the hook")
            same(self.run(compiled), plain, "with the hook removed")

    @contextmanager
    def hooked(self, path, hook, **options):
        """While the context lasts, the module at `path` has a forward hook."""
        handle = self.patcher.model.diffusion_model.get_submodule(path).register_forward_hook(hook, **options)
        try:
            yield
        finally:
            handle.remove()


class Differs(AssertionError):
    """A result is not the expected one."""


def same(actual, expected, when="the result"):
    if not torch.allclose(actual, expected, rtol=1e-5, atol=1e-6):
        raise Differs(f"{when}: off by {(actual - expected).abs().max()}")
