"""Files that a trainer saved while its model was compiled."""

import json
import os
import re

import pytest
import safetensors.torch
import torch

pytestmark = pytest.mark.host


@pytest.fixture
def folders(tmp_path, monkeypatch):
    import folder_paths

    for kind in ("loras", "diffusion_models", "checkpoints"):
        (tmp_path / kind).mkdir()
        monkeypatch.setitem(folder_paths.folder_names_and_paths, kind, ([str(tmp_path / kind)], {".safetensors", ".pt"}))
        folder_paths.filename_list_cache.pop(kind, None)
    yield tmp_path
    folder_paths.filename_list_cache.clear()


def as_compiled(key):
    """Where OneTrainer's, sd-scripts' and a whole compiled model have it."""
    return "_orig_mod." + key.replace("double_blocks.0.", "double_blocks.0._orig_mod.")


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_and_a_lora_that_were_saved_compiled_load_as_the_plain_ones(engine, model_files, folders, whole):
    import comfy.lora
    import comfy.sd

    repair = engine("host.nodes.repair").repair
    plain = safetensors.torch.load_file(model_files["flux"])
    changed = {
        as_compiled(key) if whole else key.replace("double_blocks.0.", "double_blocks.0._orig_mod."): w
        for key, w in plain.items()
    }
    safetensors.torch.save_file(changed, folders / "diffusion_models" / "mine.safetensors", metadata={"steps": "7"})
    path, said = repair("diffusion_models/mine.safetensors")
    count = sum(key not in plain for key in changed)
    assert count and said == f"{count} of {len(plain)} keys renamed, weights as they were: mine_repaired.safetensors"
    repaired = safetensors.torch.load_file(path)
    assert repaired.keys() == plain.keys() and all(torch.equal(repaired[key], plain[key]) for key in plain)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"steps": "7"}
    patcher = comfy.sd.load_diffusion_model(str(path))

    name = "lora_unet_" + ("_orig_mod_" if whole else "") + "double_blocks_0__orig_mod_img_attn_proj"
    lora = {f"{name}.lora_down.weight": torch.randn(2, 256), f"{name}.lora_up.weight": torch.randn(256, 2)}
    safetensors.torch.save_file(lora, folders / "loras" / "l.safetensors")
    path, _ = repair("loras/l.safetensors")
    known = comfy.lora.model_lora_keys_unet(patcher.model, {})
    for file, patches in ((folders / "loras" / "l.safetensors", 0), (path, 1)):
        assert len(comfy.lora.load_lora(safetensors.torch.load_file(file), known)) == patches


def test_what_needs_no_repair_stays_and_nothing_is_replaced(engine, folders):
    repair, invalid = engine("host.nodes.repair").repair, engine("errors").InvalidSetting
    plain = folders / "loras" / "plain.safetensors"
    safetensors.torch.save_file({"a.weight": torch.ones(3)}, plain)
    assert repair("loras/plain.safetensors") == (plain, "plain.safetensors needs no repair: no key holds _orig_mod.")
    safetensors.torch.save_file({"_orig_mod.a.weight": torch.ones(3)}, folders / "loras" / "c.safetensors")
    path, sentence = repair("loras/c.safetensors")
    before = path.stat()
    assert repair("loras/c.safetensors") == (path, sentence), "as after a restart, with the same workflow"
    assert path.stat() == before
    safetensors.torch.save_file({"_orig_mod.a.weight": torch.zeros(3)}, folders / "loras" / "c.safetensors")
    os.utime(folders / "loras" / "c.safetensors", ns=(before.st_mtime_ns + 10**9,) * 2)
    with pytest.raises(invalid, match=r"c_repaired\.safetensors is there already"):  # of the file before it was trained anew
        repair("loras/c.safetensors")
    for other in (torch.ones(4), torch.ones(3, dtype=torch.float64)):
        safetensors.torch.save_file({"a.weight": other}, path)
        content = path.read_bytes()
        with pytest.raises(invalid, match=r"c_repaired\.safetensors is there already"):
            repair("loras/c.safetensors")
        assert path.read_bytes() == content and len(list(path.parent.iterdir())) == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.safetensors", b"\xff" * 20, "no safetensors file, or damaged"),
        ("x.safetensors", b"", "no safetensors file, or damaged"),
        ("x.safetensors", (2).to_bytes(8, "little") + b"[]", "no safetensors file, or damaged"),
        ("x.pt", b"", "use a .safetensors file of loras"),
    ],
)
def test_other_files_are_refused(engine, folders, name, content, said):
    (folders / "loras" / name).write_bytes(content)
    with pytest.raises(engine("errors").InvalidSetting, match=re.escape(said)):
        engine("host.nodes.repair").repair(f"loras/{name}")
    assert [file.name for file in (folders / "loras").iterdir()] == [name]


@pytest.mark.parametrize("choice", ["", "loras", "loras/none.safetensors", "loras/../../x.safetensors", "vae/a.safetensors"])
def test_a_file_that_is_not_there_is_named(engine, folders, choice):
    with pytest.raises(engine("errors").InvalidSetting, match=r"use a \.safetensors file of loras"):
        engine("host.nodes.repair").repair(choice)


def test_a_key_that_is_there_twice_is_named(engine, folders):
    header = {key: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for key in ("a._orig_mod.w", "a.w")}
    text = json.dumps(header).encode()
    (folders / "loras" / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(engine("errors").InvalidSetting, match=r"'a\.w' twice"):
        engine("host.nodes.repair").repair("loras/x.safetensors")
    assert engine("host.nodes.repair").files() == ["loras/x.safetensors"]
