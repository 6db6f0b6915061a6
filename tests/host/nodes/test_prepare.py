"""When a queued prompt has compiling prepared beside the loading of its model."""

import pytest

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    ("nodes", "prepared"),
    [
        ({"1": {"class_type": "TorchCompileKitModel", "inputs": {}}}, 0),
        ({"1": {"class_type": "TorchCompileKitModel", "inputs": {"compile": "at once"}}}, 1),
        ({"1": {"class_type": "TorchCompileKitModel", "inputs": {"compile": "at once", "backend": "eager"}}}, 0),
        (
            {
                "1": {"class_type": "TorchCompileKitModel", "inputs": {}},
                "2": {"class_type": "TorchCompileKitWarmup", "inputs": {}},
            },
            1,
        ),
        ({"1": {"class_type": "TorchCompileKitModel", "inputs": {"compile": "never"}}}, 0),
        ({"1": {"class_type": "TorchCompileKitModel"}, "2": 3}, 0),
    ],
)
def test_who_will_not_wait_is_not_made_to_load_beside_it(pack_module, engine, monkeypatch, nodes, prepared):
    folder, asked = engine("host.model.user_folder"), []
    monkeypatch.setattr(folder, "prepare", lambda on_gpu, first: asked.append(on_gpu))
    monkeypatch.setattr(folder, "open_users_cache", lambda: None)
    request = {"prompt": nodes}
    assert pack_module("nodes.routes").prepare_for(request) is request
    assert len(asked) == prepared
