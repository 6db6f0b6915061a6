"""Code for a card that is not here: prebuild.py, a process of its own, with a real ComfyUI and a file without its weights."""

import functools
import json
import os
import re
import struct
import subprocess
import sys
import uuid

import pytest
import torch
from support import TESTS, prebuild_command
from tiny_workflows import workflow

from devtools import inprocess, prompts
from devtools.server import prepare_base

ROOT = TESTS.parent
CARDS = {"h100": (90, "NVIDIA H100 80GB HBM3", "cudnn"), "rtx4090": (89, "NVIDIA GeForce RTX 4090", "comfyui")}
CARDS["rtx5090"] = (120, "NVIDIA GeForce RTX 5090", "comfyui")
needs_cuda = pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(), reason="PyTorch is built without CUDA, or the card is here"
)


@pytest.fixture(scope="module")
def base(model_files, tmp_path_factory):
    """A base directory in which the model is the header of its file."""
    base = prepare_base(tmp_path_factory.mktemp("prebuild"))
    (base / "custom_nodes" / "tiny_nodes.py").symlink_to(TESTS / "tiny_nodes.py")
    file = base / "models" / prompts.MODEL_FILES["flux"]
    file.parent.mkdir(parents=True)
    content = model_files["flux"].read_bytes()
    file.write_bytes(content[: 8 + struct.unpack("<Q", content[:8])[0]])
    return base


def prebuilt(base, *arguments, nodes=None):
    """What prebuild.py prints, its exit code, and the file that it writes or would write."""
    out, given = base / f"{uuid.uuid4().hex}.tckcache", base / "workflow.json"
    given.write_text(json.dumps(nodes or workflow("flux", 1.0, backend="inductor")))
    command = [sys.executable, str(base / "custom_nodes" / "torch-compile-kit" / "prebuild.py"), str(given), *arguments]
    command += ["--out", str(out), "--comfyui", str(inprocess.host_folder())]
    command += ["--", "--base-directory", str(base), "--disable-api-nodes"]
    environment = {**os.environ, "TINY_MODELS": str(ROOT / "devtools" / "tiny_models.py"), "HOME": str(base)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout, done.stderr, done.returncode, out


@pytest.fixture(scope="module")
def files(base):
    """Makes the file for a card, once."""
    return functools.cache(lambda card: prebuilt(base, "--gpu", card))


def header(out):
    _format, text, _entries = out.read_bytes().split(b"\n", 2)
    return json.loads(text)


@pytest.mark.host
def test_a_server_with_dynamic_vram_has_the_same_name_for_a_model(engine, model_files, monkeypatch):
    """What goes with the code, its attention and that it needs no payback, is found by that name; prebuild.py runs without."""
    import comfy.memory_management
    import comfy.sd
    import safetensors.torch

    names, state = [], safetensors.torch.load_file(model_files["flux"])
    for dynamic in (False, True):
        monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", dynamic)
        model = comfy.sd.load_diffusion_model_state_dict(dict(state)).model
        names.append(engine("cache.structure").name_of(model.diffusion_model))
    assert names[0] == names[1]


@needs_cuda
@pytest.mark.host
@pytest.mark.parametrize("card", ["h100", *(pytest.param(card, marks=pytest.mark.rest) for card in ("rtx4090", "rtx5090"))])
def test_a_workflow_is_compiled_for_a_card(files, card):
    architecture, name, attention = CARDS[card]
    said, errors, code, out = files(card)
    assert code == 0, errors
    assert [line.split()[1] for line in said.splitlines()[:2]] == ["DoubleStreamBlock:", "SingleStreamBlock:"]
    about = header(out)
    assert about["environment"]["device"] == name and len(about["parts"]) == 2 and about["models"] == ["Flux"]
    (choices,) = about["choices"].values()
    assert choices == {"attention": attention, "compile now": "yes"}  # the server measures none, and waits for no payback
    content = out.read_bytes()
    cubins = [at.start() for at in re.finditer(b"\x7fELF", content)]
    assert len(cubins) > 4
    for at in cubins:  # as in test_stand_in_card.py
        assert architecture in struct.unpack_from("<BB", content, at + 48)


@needs_cuda
@pytest.mark.host
@pytest.mark.rest
def test_code_for_another_card_has_another_name(files):
    assert len({name for card in CARDS for name, _size in header(files(card)[3])["parts"]}) == 2 * len(CARDS)


@needs_cuda
@pytest.mark.host
@pytest.mark.rest
def test_what_has_no_room_is_said(base, files, monkeypatch, tmp_path):
    sizes = [size for _name, size in header(files("h100")[3])["parts"]]
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_COMPILE_KIT_CACHE_GIB", str((max(sizes) + min(sizes) / 2) / 2**30))
    _said, errors, code, _out = prebuilt(base, "--gpu", "h100")
    assert code == 1 and "1 of 2 graphs are not in" in errors, errors


@needs_cuda
@pytest.mark.host
def test_what_cannot_be_compiled_is_said(base):
    nodes = workflow("flux", 1.0, backend="inductor")
    nodes["compile"]["inputs"]["mode"] = "max-autotune"
    _said, errors, code, out = prebuilt(base, "--gpu", "h100", nodes=nodes)
    assert code == 1 and not out.exists()
    assert "nothing was compiled" in errors and "DoubleStreamBlock: this mode measures kernels on the card; set mode" in errors


MODEL = {"class_type": "TorchCompileKitModel", "inputs": {"model": ["1", 0]}}
BAD = {
    "the page's": ({"nodes": [], "links": []}, "as the page saves it; export it with Workflow > Export"),
    "a list": ([1], "is no workflow; export one"),
    "no node": ({"1": {"class_type": "UNETLoader", "inputs": {}}}, "has no node Torch Compile; put one"),
    "no sampler": ({"1": {"class_type": "UNETLoader", "inputs": {}}, "2": MODEL}, "no sampler after Torch Compile"),
    "unknown": ({"2": MODEL, "3": {"class_type": "Strange", "inputs": {}}}, "node Strange, which this ComfyUI lacks; install"),
}


@pytest.mark.host
@pytest.mark.parametrize("kind", BAD)
def test_workflows_that_are_none(pack_module, kind):
    import nodes

    given, said = BAD[kind]
    prebuild = pack_module("engine.host.nodes.prebuild")
    with pytest.raises(prebuild.PrebuildError, match="^file.json.*" + re.escape(said)):
        prebuild.samplers_of(given, "file.json", nodes.NODE_CLASS_MAPPINGS)


@pytest.mark.host
def test_samplers_are_the_first_after_the_node(pack_module):
    """And not what works on their latents, with a decoder or on the disk."""
    import nodes

    given = workflow("flux", 1.0)
    given["second"] = {**given["sampler"], "inputs": {**given["sampler"]["inputs"], "latent_image": ["bigger", 0]}}
    given["bigger"] = {"class_type": "LatentUpscale", "inputs": {"samples": ["sampler", 0]}}
    others = {"loader": "UNETLoader", "prompts": "CLIPTextEncode", "latent": "EmptyLatentImage"}
    given |= {node: {"class_type": kind, "inputs": {}} for node, kind in others.items()}
    samplers_of = pack_module("engine.host.nodes.prebuild").samplers_of
    assert samplers_of(given, "file.json", nodes.NODE_CLASS_MAPPINGS) == ["sampler", "second"]


@pytest.fixture(scope="module")
def command():
    return prebuild_command()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["w.json"], "--gpu"),
        (["w.json", "--gpu", "rtx9090"], "rtx9090.*choose from.*rtx4090"),
        (["--gpu", "h100"], "name the workflow"),
        (["w.json", "--gpu", "h100", "--comfyui", "absent"], "absent is no folder of ComfyUI; name it with --comfyui"),
    ],
)
def test_bad_arguments(command, capsys, given, said):
    with pytest.raises(SystemExit):
        command.parse(given, command.known_cards())
    assert re.search(said, capsys.readouterr().err, re.DOTALL)


def test_files_of_cards(command, tmp_path):
    cards = command.known_cards()
    file = tmp_path / "card.json"
    options = command.parse(["w.json", "--gpu-file", str(file), "--comfyui", str(inprocess.host_folder())], cards)
    for content, said in {
        "": "cannot be read",
        "{}": "is no file of --describe-gpu",
        "[]": "is no file of --describe-gpu",
    }.items():
        file.write_text(content)
        with pytest.raises(SystemExit, match=f"--gpu-file: .*{said}"):
            command.card_of(options, cards)
    file.write_text(json.dumps(cards["a100"]))
    assert command.card_of(options, cards) == cards["a100"]


def test_cards_have_what_lowering_asks_for(command, engine):
    needed = {"name", "major", "minor", "multi_processor_count", "total_memory", "warp_size", "regs_per_multiprocessor"}
    for card in command.known_cards().values():
        assert needed <= card.keys() and card["name"].startswith("NVIDIA ")


@pytest.mark.parametrize(
    ("kernel", "dtype", "width", "mask", "runs"),
    [
        ("flash", torch.bfloat16, 64, False, True),
        ("flash", torch.bfloat16, 64, True, False),
        ("flash", torch.float32, 64, False, False),
        ("cudnn", torch.bfloat16, 64, True, True),
        ("cudnn", torch.bfloat16, 192, False, True),
        ("cudnn", torch.bfloat16, 60, False, False),
        ("efficient", torch.float32, 60, True, True),
        ("efficient", torch.bfloat16, 60, False, False),
    ],
)
def test_which_kernels_can_attend(engine, monkeypatch, kernel, dtype, width, mask, runs):
    """As PyTorch answers on an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    q = torch.zeros(1, 2, 8, width, dtype=dtype)
    assert engine("torch_compat.fake_card").can_run(kernel, q, q, q, torch.zeros(8, 8) if mask else None) is runs


def test_attention_asks_the_same_of_batches_as_pytorch(engine):
    """PyTorch's kernels take queries and keys of one batch alone, and a trace keeps that as a guard (sdp_utils_cpp.h,
    `check_batch_size_and_num_heads_dense`): SDXL's code for prompts had another name than on the card."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    q, k = (
        mode.from_tensor(
            torch.zeros(2, 2, 8, 64, dtype=torch.bfloat16),
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * 3),
            source=torch._dynamo.source.ConstantSource(name),
        )
        for name in "qk"
    )
    assert str(q.shape[0]) != str(k.shape[0])
    assert engine("torch_compat.fake_card").can_run("flash", q, k, k, None)
    assert str(q.shape[0]) == str(k.shape[0])
