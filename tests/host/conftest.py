"""For tests inside the host's process."""

import pytest

from devtools import inprocess


@pytest.fixture(scope="session")
def model_files(tmp_path_factory):
    """Paths of the tiny diffusion models by name. The text encoder, which takes seconds to write, is for the server alone."""
    return inprocess.write_models(tmp_path_factory.mktemp("models"), ["flux", "wan"])


@pytest.fixture
def flux(tiny, engine):
    """A tiny Flux that is sampled without a negative prompt."""
    from patching import Runs

    return Runs(tiny, engine, "flux", cfg=1.0)


@pytest.fixture(scope="module")
def code_of_this_module():
    """Compiled code that tests of one module share, and of no other; see `patching.shares_code`."""
    from patching import kept_code

    kept_code.drop()
    yield
    kept_code.drop()


@pytest.fixture
def own_code(engine):
    """For a test of such a module whose subject is how code is made, and freed."""
    from patching import kept_code

    kept_code.drop()
    kept_code.forget_others(engine)
    kept_code.used = False
    yield
    kept_code.drop()
    kept_code.forget_others(engine)
