"""The demo: what it checks, its picture, a whole run."""

import subprocess
import sys

import pytest
from support import ROOT

from devtools import demo

# As /torch-compile-kit/report tells it.
CLASSES = [{"class": f"{kind}StreamBlock", "blocks": 2, "graphs": 1} for kind in ("Double", "Single")]
REPORT = [{"graphs": 2, "blocks": 4, "graph_breaks": 0, "failures": [], "classes": CLASSES}]


@pytest.fixture
def made(tmp_path):
    """What two ways of running left in an output folder: equal latents and pictures."""
    import safetensors.torch
    import torch
    from PIL import Image

    ways = {}
    for way in (demo.UNCOMPILED, demo.OURS):
        safetensors.torch.save_file({"latent_tensor": torch.ones(1, 16, 4, 4)}, str(tmp_path / f"{way}.latent"))
        Image.new("RGB", (64, 64), (10, 200, 30)).save(tmp_path / f"{way}.png")
        seconds = {words: 2.0 for words, *_ in demo.WAITS}
        ways[way] = demo.Images(seconds, [f"{way}.latent"], [f"{way}.png"], 0.5)
    return {**ways, demo.CORE: demo.Images({"first image": 20.0})}


def failed(made, compiled, after, folder):
    return [what for what, holds, _ in demo.checks(made, compiled, after, folder, gpu=False) if not holds]


def test_every_check_can_fail(made, tmp_path):
    import safetensors.torch
    import torch

    assert failed(made, REPORT, REPORT, tmp_path) == []
    more, nothing = ([{**REPORT[0], "graphs": graphs}] for graphs in (3, 0))
    assert failed(made, REPORT, more, tmp_path) == ["nothing is compiled again, at either size"]
    assert failed(made, nothing, nothing, tmp_path) == ["blocks are compiled"]
    broken = [{**REPORT[0], "failures": [{"block": "double_blocks.0", "message": "no compiler"}]}]
    assert failed(made, REPORT, broken, tmp_path) == ["no block failed"]
    latents = torch.ones(1, 16, 4, 4)
    latents[0, 0, 0, 0] = 1.5
    safetensors.torch.save_file({"latent_tensor": latents}, str(tmp_path / f"{demo.OURS}.latent"))
    assert failed(made, REPORT, REPORT, tmp_path) == ["same latents"]


def test_bars_are_as_long_as_the_waits_and_say_what_failed(made):
    lines = list(demo.bars(made))
    lengths = {line.split()[0]: line.count("█") + line.count("#") for line in lines[1:4]}
    assert lengths == {"uncompiled": demo.BAR // 10, "Torch": demo.BAR // 10, "core's": demo.BAR}
    assert lines[3].endswith("20.0 s") and lines[7].endswith("failed")


def test_the_picture_shows_both_and_their_largest_difference(made, tmp_path):
    from PIL import Image

    picture = Image.open(tmp_path / f"{demo.OURS}.png")
    picture.putpixel((5, 5), (10, 197, 30))
    picture.save(tmp_path / f"{demo.OURS}.png")
    largest, share = demo.side_by_side(tmp_path, made, tmp_path / "both.png", gpu=True)
    assert (largest, share) == (3, pytest.approx(1 / (64 * 64 * 3)))
    both = Image.open(tmp_path / "both.png")
    assert both.size == (2 * 64 + demo.GAP, 64 + demo.CAPTION)
    assert both.getpixel((5, 5)) == (10, 200, 30) and both.getpixel((64 + demo.GAP + 5, 5)) == (10, 197, 30)


def test_a_failure_is_a_line_and_a_status(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo.inprocess, "enter_host", lambda base: None)  # a process enters it once

    def no_disk(base):
        raise OSError("the disk is full")

    monkeypatch.setattr(demo, "tiny_job", no_disk)
    assert demo.main(tmp_path / "out") == 1
    said = capsys.readouterr()
    assert said.err == "FAILED: the disk is full\n" and "All checks passed" not in said.out


@pytest.mark.host
def test_the_tiny_flux_draws_the_lighthouse_at_both_sizes(pack, tmp_path):
    import comfy.sample
    import comfy.sd
    import torch

    from devtools import lighthouse

    assert lighthouse.WEIGHTS.stat().st_size <= 4_000_000
    lighthouse.write(tmp_path)
    model = comfy.sd.load_diffusion_model(str(tmp_path / "diffusion_models" / lighthouse.WEIGHTS.name))
    prompt = [[torch.eye(lighthouse.TOKENS)[None], {"pooled_output": None}]]
    for width in (lighthouse.WIDTH, lighthouse.NARROW):
        latent = torch.zeros(1, lighthouse.CHANNELS, lighthouse.HEIGHT // 8, width // 8)
        noise = comfy.sample.prepare_noise(latent, 4)
        drawn = comfy.sample.sample(model, noise, 8, 1.0, "euler", "simple", prompt, prompt, latent, seed=4)
        assert lighthouse.distance_from_scene(drawn) < demo.NEAR_THE_SCENE
        assert lighthouse.distance_from_scene(noise / lighthouse.SCALE + lighthouse.SHIFT) > 10 * demo.NEAR_THE_SCENE


@pytest.mark.host
def test_the_decoder_paints_shapes_with_their_colours(pack):
    import comfy.sd

    from devtools import lighthouse

    vae = comfy.sd.VAE(sd=lighthouse.decoder())
    latent = lighthouse.scene()[..., 8:60, 16:60] / lighthouse.SCALE + lighthouse.SHIFT
    picture = vae.decode(latent)[0]
    y, x = 8 * 8, 16 * 8
    shapes = {
        "roof": (90, 190, (0.72, 0.18, 0.17)),
        "lantern": (130, 190, (1.0, 0.84, 0.36)),
        "gallery": (156, 180, (0.20, 0.21, 0.27)),
        "moon": (196, 456, (1.0, 0.93, 0.74)),
    }
    for shape, (row, column, colour) in shapes.items():
        assert picture[row - y, column - x].tolist() == pytest.approx(colour, abs=0.01), shape


# But for inductor's code of the whole model, which takes core's node a minute of a core.
DEMO = """
import sys
from devtools import demo
own = demo.Job.prompt

def prompt(job, compiler, *more):
    is_core = compiler and compiler[0] == "TorchCompileModel"
    return own(job, (compiler[0], {"backend": "cudagraphs"}) if is_core else compiler, *more)

demo.Job.prompt = prompt
raise SystemExit(demo.main(sys.argv[1]))
"""


@pytest.mark.rest
def test_the_demo_ends_with_all_checks_passed(tmp_path):
    command = [sys.executable, "-c", DEMO, str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("All checks passed") and "no speed is to be gained" in result.stdout
    assert (tmp_path / "out" / "uncompiled-and-compiled.png").is_file() and "failed: " not in result.stdout
