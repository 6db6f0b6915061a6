"""Shared by the tests of patches and of several models: sample with and without compiling, and compare."""

from contextlib import contextmanager

import pytest
import torch
from patch_kinds.weights import louder
from sampling import sample
from support import lower_here

# By the model's name, how it is sampled and the latent's shape; see `Runs.plain`.
_plain_images: dict[tuple, torch.Tensor] = {}


def patched(patcher, patch):
    """A clone of `patcher` that `patch` has patched; `patch` returns it, or None."""
    clone = patcher.clone()
    return patch(clone) or clone


class Runs:
    """One tiny model and its inputs; `run` samples a patcher of it, with the same seed each time.

    Args:
        tiny: the module `devtools.tiny_models`.
        engine: the fixture of that name.
        name: of the tiny model.
        only: the setting `only_blocks`: to trace a kind of block takes half a second.
    """

    def __init__(self, tiny, engine, name, cfg=4.0, steps=2, size=64, length=1, only=""):
        self.only = only
        self.tiny, self.engine, self.name, self.cfg, self.steps = tiny, engine, name, cfg, steps
        self.patcher = tiny.build_patcher(name)
        self.positive, self.negative = tiny.conditioning(name)
        self.latent = tiny.empty_latent(name, size, size, length)
        if kept_code.used:
            kept_code.make(self)

    def attach(self, patcher, **settings):
        """The patcher as the node returns it; the backend traces only, so that results are bit for bit the same."""
        chosen = self.engine("settings").CompileSettings(
            **{"backend": "eager", "compile_when": "before first image", "only_blocks": self.only, **settings}
        )
        if chosen.backend in ("eager", "aot_eager"):
            lower_here(self.engine, chosen.backend)
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

    def plain(self):
        """The eager image of the model as it is built. Kept for the session: the same name always gives the same weights."""
        key = self.name, self.cfg, self.steps, tuple(self.latent.shape)
        if key not in _plain_images:
            _plain_images[key] = self.run(self.patcher)
        return _plain_images[key]

    def check(self, patch, **inputs):
        """Compiled equals eager with the patch, without it, and with it again; the number of graphs that it added.

        Args:
            patch: takes a clone of a patcher and patches it; returns it, or None.
            inputs: conditionings for the patched runs.
        """
        plain, expected = self.plain(), self.run(patched(self.patcher, patch), **inputs)
        assert torch.isfinite(expected).all()
        assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-4), "the patch does nothing; this proves nothing"
        compiled = self.attach(self.patcher)
        same(self.run(compiled), plain, "before the patch")
        before = self.graphs
        assert before
        same(self.run(patched(compiled, patch), **inputs), expected, "with the patch")
        added = self.graphs - before
        same(self.run(compiled), plain, "with the patch removed")
        same(self.run(self.attach(patched(self.patcher, patch)), **inputs), expected, "with the patch upstream")
        assert self.graphs - before == added, "what was compiled once is compiled again"
        return added

    def check_hook(self, path):
        """Compiled equals eager with a hook on the module at `path`, added when it was compiled, and with it removed."""
        compiled, plain = self.attach(self.patcher), self.plain()
        same(self.run(compiled), plain, "before the hook")
        expected = None
        for _ in range(2):
            with self.hooked(path, lambda _module, _args, out: louder(out)):
                expected = self.run(self.patcher) if expected is None else expected
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


def graphs_of(runs):
    """The CUDA graphs of the model."""
    return runs.engine("cuda_graphs.capture").graphs_of(runs.patcher.model.diffusion_model)


def breaks(runs):
    return sum(group.stats.graph_breaks for group in runs.groups)


def notes(runs, patcher):
    """What reports say of the patcher's model."""
    return runs.engine("host.model.attach").notes_about(patcher)


class KeptCode:
    """Code of tiny models as they are built, for tests whose subject is not how that code is made; see `shares_code`.

    Each test has models of its own. Models of one structure share their code as long as one of them is in memory: that one is
    kept here. Where a test has added to the code of such a model, or it has failed, all is dropped and made anew for the next.
    """

    def __init__(self):
        self.used = False
        self._models = {}

    def make(self, runs):
        """Compile what runs like `runs` need without a patch."""
        key = runs.cfg > 1, tuple(runs.latent.shape), runs.only
        if runs.name in self._models and self._models[runs.name][0] != key:
            self.drop()
        if runs.name not in self._models:
            self.used = False
            kept = Runs(runs.tiny, runs.engine, runs.name, runs.cfg, 1, only=runs.only)
            kept.latent = runs.latent
            kept.run(kept.attach(kept.patcher))
            self.used = True
            self._models[runs.name] = key, kept, self._state(kept)

    def check(self):
        """After a test: drop what is not as it was made."""
        if any(self._state(kept) != state for _, kept, state in self._models.values()):
            self.drop()

    def drop(self):
        for _, kept, _ in self._models.values():
            # Until garbage is collected, which takes a second, other models would share the code of those that are gone.
            registry = kept.engine("compile.registry")
            registry._groups.clear()
            registry._recent.clear()
        self._models.clear()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    def forget_others(self, engine):
        """Models that are gone, but not collected yet, would share their code with the next one of their structure."""
        registry, kept = engine("compile.registry"), {id(g) for _, runs, _ in self._models.values() for g in runs.groups}
        for key, group in list(registry._groups.items()):
            if id(group) not in kept:
                del registry._groups[key]
                registry._recent.pop(key, None)

    @staticmethod
    def _state(kept):
        return [(id(group), group.stats.graphs, group.failure, group.code.limit_reached) for group in kept.groups]


kept_code = KeptCode()


@pytest.fixture(autouse=True)
def shares_code(engine, code_of_this_module):
    """For a module under the name of `fresh_dynamo`: its tests share the code of unpatched models."""
    kept_code.used = True
    yield
    kept_code.used = False
    assert engine("background.thread").compiler.wait(120), "the test left something being compiled"
    kept_code.check()
    kept_code.forget_others(engine)


class Differs(AssertionError):
    """A result is not the expected one."""


def same(actual, expected, when="the result"):
    if not torch.allclose(actual, expected, rtol=1e-5, atol=1e-6):
        raise Differs(f"{when}: off by {(actual - expected).abs().max()}")
