"""When a queued prompt has compiling prepared beside the loading of its model."""

import json
import os
import tempfile

import pytest

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    ("nodes", "prepared"),
    [
        ({"1": {"class_type": "TorchCompileKitModel", "inputs": {}}}, 0),
        ({"1": {"class_type": "TorchCompileKitModel", "inputs": {"compile_when": "before first image"}}}, 1),
        (
            {"1": {"class_type": "TorchCompileKitModel", "inputs": {"compile_when": "before first image", "backend": "eager"}}},
            0,
        ),
        (
            {
                "1": {"class_type": "TorchCompileKitModel", "inputs": {}},
                "2": {"class_type": "TorchCompileKitWarmup", "inputs": {}},
            },
            1,
        ),
        ({"1": {"class_type": "TorchCompileKitModel", "inputs": {"compile_when": "never"}}}, 0),
        ({"1": {"class_type": "TorchCompileKitModel"}, "2": 3}, 0),
    ],
)
def test_who_will_not_wait_is_not_made_to_load_beside_it(pack_module, engine, monkeypatch, nodes, prepared):
    folder, asked = engine("host.model.user_folder"), []
    monkeypatch.setattr(folder, "prepare", lambda *steps: asked.append(folder.import_inductor in steps))
    monkeypatch.setattr(folder, "open_users_cache", lambda: None)
    request = {"prompt": nodes}
    assert pack_module("nodes.routes").prepare_for(request) is request
    assert sum(asked) == prepared


@pytest.mark.parametrize("device, prepared", [("cuda", []), ("cpu", ["warm_up_dynamo"])])
def test_tracing_is_prepared_before_the_first_image_where_compiling_is_never_put_off(engine, monkeypatch, device, prepared):
    """Else nothing of a first image is compiled that takes less time than preparing: the node would say nothing."""
    folder, asked = engine("host.model.user_folder"), []
    monkeypatch.setattr(folder, "prepare", lambda *steps: asked.extend(step.__name__ for step in steps))
    monkeypatch.setattr(folder, "open_users_cache", lambda: None)
    monkeypatch.setattr(folder, "device_type", lambda: device)
    folder.get_ready(engine("settings").CompileSettings())
    assert asked == prepared


def test_a_prompt_gets_the_language_of_its_page(pack_module, monkeypatch):
    """A page in the browser's language leaves no setting on the server; another page may have another language."""
    routes = pack_module("nodes.routes")
    monkeypatch.setattr(pack_module("nodes.cache_routes"), "users_settings", lambda: {"Comfy.Locale": "fr"})
    routes.remember_language("page", "ja")
    for number in range(routes.MOST_PAGES):
        routes.remember_language(f"other {number}", "ru")
        routes.remember_language("page", "ja")
    queued = [routes.prepare_for({"prompt": {}, "client_id": client}) for client in ("page", "other 0", None, 3)]
    assert [request["extra_data"][routes.LANGUAGE] for request in queued] == ["ja", "fr", "fr", "fr"]
    assert len(routes._languages) <= routes.MOST_PAGES
    for request in ({"prompt": {}, "extra_data": 3}, 7):
        assert routes.prepare_for(request) is request


@pytest.mark.parametrize("place", ["user", "TORCHINDUCTOR_CACHE_DIR", "home", None])
def test_after_a_restart_the_cache_is_found_wherever_it_is(engine, monkeypatch, tmp_path, place):
    """In the user's folder, where the user has set it to, or on a drive that keeps rights."""
    folder, disk, prepared = engine("host.model.user_folder"), engine("cache.disk"), []
    kit = {"user": tmp_path / "user", "home": tmp_path / "home" / ".cache"}.get(place, tmp_path) / "torch-compile-kit"
    cache = disk.DiskCache(kit if place == "TORCHINDUCTOR_CACHE_DIR" else kit / "cache", 2**20)
    if place is not None:
        cache.enter("0" * 12, "Block")
        cache.exit("0" * 12)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if place == "TORCHINDUCTOR_CACHE_DIR":
        monkeypatch.setenv(place, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(folder, "kit_folder", lambda: tmp_path / "user" / "torch-compile-kit")
    monkeypatch.setattr(folder, "open_users_cache", lambda: cache)
    monkeypatch.setattr(folder, "prepare", lambda *steps: prepared.append(steps))
    before = list(tmp_path.rglob("*"))
    folder.get_ready_again()
    assert len(prepared) == (place is not None) and list(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_looked_into_is_no_cache(engine, monkeypatch):
    folder = engine("host.model.user_folder")

    def stat(*_args, **_kwargs):
        raise PermissionError

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(folder, "open_users_cache", lambda: pytest.fail("it is not there"))
    folder.get_ready_again()


def test_the_shared_cache_is_named_by_a_file_of_the_users_never_by_a_setting(engine, monkeypatch, tmp_path):
    """Pages of other sites can write ComfyUI's settings."""
    folder, shared = engine("host.model.user_folder"), engine("cache.shared")
    monkeypatch.setattr(shared._Configured, "where", ())
    monkeypatch.setattr(shared._Configured, "cache", None)
    monkeypatch.delenv("TORCH_COMPILE_KIT_SHARED_CACHE", raising=False)
    monkeypatch.setenv("TORCH_COMPILE_KIT_SHARED_KEY", "k" * 32)
    monkeypatch.setattr(folder.folder_paths, "get_user_directory", lambda: str(tmp_path))
    (tmp_path / "default").mkdir()
    settings = {"TorchCompileKit.SharedCache": str(tmp_path / "foreign")}
    (tmp_path / "default" / "comfy.settings.json").write_text(json.dumps(settings))
    folder.open_users_cache()
    assert shared._Configured.cache is None and not (tmp_path / "foreign").exists()
    address = folder.kit_folder() / "shared.address"
    address.parent.mkdir(exist_ok=True)
    address.write_text(str(tmp_path / "volume"))
    address.chmod(0o600)
    folder.open_users_cache()
    assert shared._Configured.cache.place == str(tmp_path / "volume")


def test_a_notice_names_the_warmups_whose_model_comes_through_the_node_that_compiles(pack_module):
    def warmup(source):
        return {"class_type": "TorchCompileKitWarmup", "inputs": {"model": [source, 0], "latent_image": ["sampled", 0]}}

    prompt = {
        "high": {"class_type": "TorchCompileKitModel", "inputs": {"model": ["loader", 0]}},
        "low": {"class_type": "TorchCompileKitModel", "inputs": {"model": ["loader", 0]}},
        "lora": {
            "class_type": "LoraLoader",
            "inputs": {"model": ["high", 0], "clip": ["gone", 1], "strength": 1.0, "list": [[1]]},
        },
        "loader": {"class_type": "UNETLoader", "inputs": {"unet_name": "high"}},
        "sampled": {"class_type": "KSampler", "inputs": {"model": ["high", 0]}},
        "7:3": warmup("lora"),
        "8": warmup("low"),
        "9": {"class_type": "TorchCompileKitWarmup", "inputs": {"model": "not linked"}},
    }
    warmups_of = pack_module("nodes.routes").warmups_of
    assert (warmups_of(prompt, "high"), warmups_of(prompt, "low")) == (["7:3"], ["8"])
    assert warmups_of(prompt, None) == warmups_of(prompt, "12") == warmups_of({}, "high") == []
