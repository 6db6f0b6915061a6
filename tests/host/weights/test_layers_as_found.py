"""What a compiled run leaves on the model's layers: nothing that an uncompiled run does not."""

import pytest
from patching import Runs

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.mark.parametrize("ends", ["as usual", "with an error"])
def test_a_compiled_run_leaves_on_the_layers_what_an_eager_one_leaves(ends, tiny, engine):
    runs = Runs(tiny, engine, "flux", cfg=1.0)

    def attributes():
        return {name: sorted(vars(module)) for name, module in runs.patcher.model.named_modules()}

    def fail(*_):
        raise KeyError("in the last layer")

    runs.run(runs.patcher)
    before = attributes()
    compiled = runs.attach(runs.patcher)
    if ends == "as usual":
        runs.run(compiled)
    else:
        hook = runs.patcher.model.diffusion_model.final_layer.register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            runs.run(compiled)
        hook.remove()
    assert attributes() == before
