"""An archive of `comfy node pack`, unpacked into a ComfyUI that has never seen the project."""

import json
import sys
import urllib.parse
import urllib.request

import pytest
from packing import pack
from support import ROOT

from devtools import inprocess, locales
from devtools.server import PACK_NAME, Server

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("archive")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A server whose only custom node is the unpacked archive."""
    base = tmp_path_factory.mktemp("base")
    folder = base / "custom_nodes" / PACK_NAME
    pack(tmp_path_factory.mktemp("checkout")).extractall(folder)
    assert not (folder / "tests").exists() and not folder.is_symlink()
    with Server(inprocess.host_folder(), base, inprocess.has_gpu(), sys.executable) as running:
        yield running


def read(server, path):
    with urllib.request.urlopen(server.url + urllib.parse.quote(path), timeout=30) as answer:
        return answer.read()


def nodes():
    return json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))


def test_all_nodes_are_there_with_their_help(installed):
    info = installed.get("/object_info")
    ours = {name for name, node in info.items() if node["python_module"] == f"custom_nodes.{PACK_NAME}"}
    assert ours == set(nodes()) and len(ours) == 9
    for node in ours:
        for page in (f"{node}.md", f"{node}/ja.md", f"{node}/zh.md"):
            assert read(installed, f"/extensions/{PACK_NAME}/docs/{page}") == (ROOT / "js" / "docs" / page).read_bytes()
    assert "IMPORT FAILED" not in installed.log() and "Traceback" not in installed.log()


def test_the_pages_scripts_are_there_and_the_routes_answer(installed):
    scripts = {name for name in installed.get("/extensions") if name.startswith(f"/extensions/{PACK_NAME}/")}
    assert scripts == {f"/extensions/{PACK_NAME}/{file.name}" for file in (ROOT / "js").glob("*.js")}
    for script in scripts:
        assert read(installed, script)
    assert "bytes" in installed.get("/torch-compile-kit/cache")


def test_all_templates_are_there_with_their_pictures(installed):
    names = installed.get("/workflow_templates")[PACK_NAME]
    assert set(names) == {file.stem for file in (ROOT / "workflows").glob("*.json")}
    for name in names:
        assert json.loads(read(installed, f"/api/workflow_templates/{PACK_NAME}/{name}.json"))["nodes"]
        assert read(installed, f"/api/workflow_templates/{PACK_NAME}/{name}.jpg")[:2] == b"\xff\xd8"


def test_all_languages_are_there(installed):
    texts = installed.get("/i18n")
    for language in ("en", *locales.LANGUAGES):
        assert all(texts[language]["nodeDefs"][node]["display_name"] for node in nodes())
        assert texts[language]["torchCompileKit"] and texts[language]["settings"]
