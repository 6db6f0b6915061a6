"""When a queued prompt has compiling prepared beside the loading of its model."""

import json
import os
import tempfile
import threading
import types

import pytest

pytestmark = pytest.mark.host


@pytest.fixture
def folder(engine, monkeypatch):
    """The module, with what it starts noted in `asked` instead: "process", "import", "load"."""
    module, obtain = engine("host.model.user_folder"), engine("compile_process.obtain")
    module.asked = []
    monkeypatch.setattr(type(module.compile_process), "pid", None)
    monkeypatch.setattr(obtain, "_not_before", 0.0)
    monkeypatch.setattr(obtain.code_store, "current", lambda: None)
    monkeypatch.setattr(obtain.shared, "configured", lambda: None)
    monkeypatch.setattr(module.compile_process, "start", lambda: module.asked.append("process"))
    monkeypatch.setattr(obtain, "import_ahead", lambda: module.asked.append("import"))
    monkeypatch.setattr(module, "load_ahead", lambda _store, _goes_on: module.asked.append("load"))
    monkeypatch.setattr(module, "open_users_store", lambda: None)
    monkeypatch.setattr(module, "_prompt_came", threading.Event())
    yield module
    del module.asked


def wait_for_start():
    while threads := [thread for thread in threading.enumerate() if thread.name == "torch-compile-kit start"]:
        threads[0].join(60)


MODEL, WARMUP = "TorchCompileKitModel", {"class_type": "TorchCompileKitWarmup", "inputs": {}}


@pytest.mark.parametrize(
    ("nodes", "asked"),
    [
        ({"1": {"class_type": MODEL, "inputs": {}}}, ["process"]),
        ({"1": {"class_type": MODEL, "inputs": {}}, "GPU": 0}, []),
        ({"1": {"class_type": MODEL, "inputs": {"compile_when": "before first image"}}}, ["process", "import"]),
        ({"1": {"class_type": MODEL, "inputs": {"compile_when": "before first image"}}, "GPU": 0}, ["process", "import"]),
        ({"1": {"class_type": MODEL, "inputs": {"compile_when": "before first image", "backend": "eager"}}}, []),
        ({"1": {"class_type": MODEL, "inputs": {}}, "2": WARMUP, "GPU": 0}, ["process", "import"]),
        ({"1": {"class_type": MODEL, "inputs": {"compile_when": "never"}}}, []),
        ({"1": {"class_type": MODEL}, "2": 3}, []),
        ({"1": {"class_type": "KSampler", "inputs": {}}}, []),
    ],
)
def test_who_will_not_wait_is_not_made_to_load_beside_it(pack_module, folder, monkeypatch, nodes, asked):
    """The imports of this process hold the GIL while the model is loaded. On a GPU runs are counted first: a model may never be
    compiled, and beside the start of the process the host's loading takes longer, which was seen."""
    monkeypatch.setattr(folder, "device_type", lambda: "cuda" if "GPU" in nodes else "cpu")
    request = {"prompt": nodes}
    assert pack_module("nodes.routes").prepare_for(request) is request
    wait_for_start()
    assert sorted(folder.asked) == sorted(asked)


def test_the_servers_event_loop_does_not_wait_for_the_users_drive(pack_module, folder, monkeypatch):
    opened, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(folder, "open_users_store", lambda: opened.set() or answers.wait(60))
    pack_module("nodes.routes").prepare_for({"prompt": {"1": {"class_type": MODEL, "inputs": {}}}})
    assert opened.wait(60) and not folder.asked
    answers.set()
    wait_for_start()
    assert folder.asked == ["process"]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("kept", [None, False, True])
def test_no_process_is_started_where_code_is_kept_or_shared(engine, folder, monkeypatch, kept, is_shared):
    """None: there is no store."""
    obtain = engine("compile_process.obtain")
    store = None if kept is None else types.SimpleNamespace(has_current=lambda: kept)
    monkeypatch.setattr(obtain.code_store, "current", lambda: store)
    monkeypatch.setattr(obtain.shared, "configured", lambda: object() if is_shared else None)
    folder.get_ready(engine("settings").CompileSettings())
    wait_for_start()
    assert folder.asked == ([] if kept or is_shared else ["process"])


def test_a_process_that_does_not_stay_is_not_started_for_each_call(engine, folder, monkeypatch):
    obtain, now = engine("compile_process.obtain"), [100.0]
    monkeypatch.setattr(obtain, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    obtain.get_ready_to_compile(starts=False)
    assert folder.asked == ["import"]
    for now[0] in (101.0, 102.0, 101.0 + obtain.START_AGAIN_SECONDS):
        obtain.get_ready_to_compile(imports=False)
        wait_for_start()
    assert folder.asked == ["import", "process", "process"]


def test_the_process_imports_what_the_host_has_imported(engine, folder):
    import comfy.quant_ops  # noqa: F401

    folder.get_ready(engine("settings").CompileSettings())
    assert folder.compile_process.modules() == ["comfy.quant_ops"]


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
@pytest.mark.parametrize("is_current", [False, True])
def test_after_a_restart_the_store_is_found_wherever_it_is(engine, folder, monkeypatch, tmp_path, place, is_current):
    """In the user's folder, where the user has set it to, or on a drive that keeps rights."""
    kit = {"user": tmp_path / "user", "home": tmp_path / "home" / ".cache"}.get(place, tmp_path) / "torch-compile-kit"
    if place is not None:
        kit = kit if place == "TORCHINDUCTOR_CACHE_DIR" else kit / "store"
        kit.mkdir(parents=True)
        engine("cache.code_store").read_key(kit)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if place == "TORCHINDUCTOR_CACHE_DIR":
        monkeypatch.setenv(place, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(folder, "kit_folder", lambda: tmp_path / "user" / "torch-compile-kit")
    monkeypatch.setattr(folder, "open_users_store", lambda: types.SimpleNamespace(has_current=lambda: is_current))
    before = list(tmp_path.rglob("*"))
    folder.get_ready_again()
    assert folder.asked == (["load"] if place is not None and is_current else []) and list(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("because", ["a prompt of ours", "a prompt of others", "no second thread may work", None])
def test_nothing_is_loaded_beside_a_prompt_that_comes_with_the_start(folder, pack_module, monkeypatch, because):
    monkeypatch.setattr(folder, "device_type", lambda: "cuda")
    monkeypatch.setattr(folder, "was_opened_before", lambda _store: True)
    monkeypatch.setattr(folder, "open_users_store", lambda: types.SimpleNamespace(has_current=lambda: True))
    monkeypatch.setattr(folder, "forbids_threads", lambda: because == "no second thread may work")
    if because in ("a prompt of ours", "a prompt of others"):
        node = {"class_type": MODEL if because == "a prompt of ours" else "KSampler", "inputs": {}}
        pack_module("nodes.routes").prepare_for({"prompt": {"1": node}})
        wait_for_start()
    folder.get_ready_again()
    assert folder.asked == ([] if because else ["load"])


def test_a_folder_that_cannot_be_looked_into_is_no_store(folder, monkeypatch):
    def stat(*_args, **_kwargs):
        raise PermissionError

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(folder, "open_users_store", lambda: pytest.fail("it is not there"))
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
    folder.open_users_store()
    assert shared._Configured.cache is None and not (tmp_path / "foreign").exists()
    address = folder.kit_folder() / "shared.address"
    address.parent.mkdir(exist_ok=True)
    address.write_text(str(tmp_path / "volume"))
    address.chmod(0o600)
    folder.open_users_store()
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
