"""No code of the host's counts as another pack's, as the host is on a GPU, where it defines other functions at import."""

import os
import subprocess
import sys

import pytest
from support import ROOT

from devtools.inprocess import host_folder

pytestmark = pytest.mark.host

AS_ON_A_GPU = """
import importlib, pathlib, sys, types
host, root = sys.argv[1:]
sys.path.insert(0, host)
sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
from torch import nn
import comfy.model_management
torch.cuda.is_available = lambda: True
import comfy.ops
del torch.cuda.is_available
package = types.ModuleType("kit")
package.__path__ = [root]
sys.modules["kit"] = package
ownership = importlib.import_module("kit.engine.ownership")
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

classes = []
for file in pathlib.Path(host, "comfy", "ldm").rglob("*.py"):
    name = ".".join(file.relative_to(host).with_suffix("").parts)
    try:
        entries = vars(importlib.import_module(name)).values()
    except ImportError:  # of what the host does not install
        continue
    classes += [cls for cls in entries if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == name]
assert len(classes) > 500 and comfy.ops.scaled_dot_product_attention is not nn.functional.scaled_dot_product_attention
print({pack: cls for cls in classes if (pack := ownership.Survey((cls,)).pack)})

unet = UNetModel(
    image_size=32, in_channels=4, model_channels=32, out_channels=4, num_res_blocks=[1, 1], channel_mult=(1, 2), num_heads=4,
    use_spatial_transformer=True, transformer_depth=[0, 2], transformer_depth_output=[0, 0, 2, 2], transformer_depth_middle=2,
    context_dim=32, use_linear_in_transformer=True, device="meta", operations=comfy.ops.disable_weight_init,
)
first, second = ownership.survey_of(unet.modules()), ownership.survey_of(unet.modules())
assert first.pack is None and first.values == second.values
names = {"__name__": "a_pack"}
exec(compile("def attention(*_args, **_options): pass", "/x/custom_nodes/a_pack/nodes.py", "exec"), names)
comfy.ops.scaled_dot_product_attention = names["attention"]
print(ownership.survey_of(unet.modules()).pack)
"""


def test_no_class_of_the_hosts_is_another_packs_and_what_a_pack_exchanges_is(engine):
    command = [sys.executable, "-c", AS_ON_A_GPU, str(host_folder()), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{}", "a_pack"]
