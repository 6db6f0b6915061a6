"""Save and Load Compile Cache in a real server: what they write and refuse, and that a refusal never stops an image."""

import copy
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from devtools import prompts
from devtools.server import PromptRejectedError, error_of, outputs_of

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]
SAVE, LOAD = "TorchCompileKitSaveCache", "TorchCompileKitLoadCache"


@pytest.fixture(scope="module")
def folder(server):
    return Path(server.base) / "user" / "torch-compile-kit"


@pytest.fixture(scope="module")
def shipped(server):
    return prompts.shrink(prompts.to_api(prompts.load(), server.get("/object_info")), width=64, height=64, steps=2)


@pytest.fixture(scope="module")
def saved(server, folder, shipped):
    """The file that Save Compile Cache wrote behind the warmup of the shipped workflow."""
    prompt = prompts.only_warmup(shipped)
    prompt["save"] = {
        "class_type": SAVE,
        "inputs": {"model": [prompts.find(prompt, prompts.WARMUP_NODE), 0], "filename": "pod"},
    }
    entry = server.queue(prompt)
    assert error_of(entry) is None
    (report,) = entry["outputs"]["save"]["text"]
    file = folder / "pod.tckcache"
    assert report.startswith(str(file)) and "Flux" in report and "64x64" in report
    return file


def with_load(shipped, file):
    """The shipped workflow with Load Compile Cache behind the model loader."""
    prompt = copy.deepcopy(shipped)
    loader = prompts.find(prompt, "UNETLoader")
    for node in prompt.values():
        node["inputs"] = {name: ["load", 0] if value == [loader, 0] else value for name, value in node["inputs"].items()}
    prompt["load"] = {"class_type": LOAD, "inputs": {"model": [loader, 0], "file": file}}
    return prompt


def loaded(server, shipped, file):
    """What the node reports; the prompt must have made its image."""
    entry = server.queue(with_load(shipped, file))
    assert error_of(entry) is None
    assert len(outputs_of(entry, "images")) == 1
    (report,) = entry["outputs"]["load"]["text"]
    return report


def test_the_file_tells_what_is_in_it(saved):
    line = saved.read_bytes().partition(b"\n{")[2].partition(b"\n")[0]
    header = json.loads(b"{" + line)
    assert len(header["parts"]) > 1 and header["environment"]["torch"].startswith("2.")
    assert header["models"] == ["Flux"] and "64x64 batch 1" in header["sizes"]


def test_it_is_offered_and_loaded(server, shipped, saved):
    (saved.parent / "old.safetensors").write_bytes(b"of an earlier version")
    options = {name: o for name, _, o in prompts.inputs_in_order(server.get("/object_info")[LOAD])}["file"]["options"]
    assert options[0] == "none" and saved.name in options and "old.safetensors" not in options
    report = loaded(server, shipped, saved.name)
    assert report.startswith("pod.tckcache, for Flux")


def test_a_damaged_file_is_refused_and_the_image_comes_out(server, shipped, saved):
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1  # at the end is the digest in hexadecimal, of which a flipped letter may be none
    (saved.parent / "damaged.tckcache").write_bytes(data)
    report = loaded(server, shipped, "damaged.tckcache")
    assert "not loaded" in report and "damaged" in report and "sha256" in report
    assert report in server.log()


@pytest.mark.parametrize("name", ["gone.tckcache", "../../../models/x.safetensors", "/etc/passwd"])
def test_a_name_that_is_not_in_the_folder_is_refused_and_the_image_comes_out(server, shipped, saved, name):
    report = loaded(server, shipped, name)
    assert "not loaded" in report and name in report and str(saved.parent) in report


def test_none_loads_nothing(server, shipped, saved):
    assert loaded(server, shipped, "none").startswith("No file chosen")


@pytest.mark.parametrize("filename", ["", "../x", "a/b", ".hidden", "C:x", "a" * 101])
def test_a_name_with_a_folder_is_refused(server, shipped, saved, filename):
    prompt = prompts.only_warmup(shipped)
    warmup = prompts.find(prompt, prompts.WARMUP_NODE)
    prompt["save"] = {"class_type": SAVE, "inputs": {"model": [warmup, 0], "filename": filename}}
    with pytest.raises(PromptRejectedError) as refused:
        server.queue(prompt)
    (error,) = refused.value.node_errors["save"]["errors"]
    assert error["extra_info"]["input_name"] == "filename" and f"filename = {filename!r}: " in error["details"]


@pytest.mark.parametrize("backend", [None, "none", "eager"])
def test_a_model_that_inductor_does_not_compile_passes_through(server, shipped, saved, backend):
    prompt = copy.deepcopy(shipped)
    compiler = prompts.find(prompt, prompts.MODEL_NODE)
    loaded_model = prompt[compiler]["inputs"]["model"]
    prompt = prompts.change(prompt, prompts.MODEL_NODE, **({} if backend is None else {"backend": backend}))
    model = loaded_model if backend is None else [compiler, 0]
    prompt["save"] = {"class_type": SAVE, "inputs": {"model": model, "filename": "nothing"}}
    prompt = prompts.change(prompt, "KSampler", model=["save", 0])
    entry = server.queue(prompt)
    assert error_of(entry) is None and len(outputs_of(entry, "images")) == 1
    (report,) = entry["outputs"]["save"]["text"]
    assert report.startswith("Nothing to save") and "Torch Compile Warmup" in report
    assert not (saved.parent / "nothing.tckcache").exists()


def test_a_model_that_is_not_warm_has_nothing_to_save(server, shipped, saved):
    prompt = prompts.only_warmup(prompts.change(shipped, prompts.MODEL_NODE, fullgraph=True))
    compiler = prompts.find(prompt, prompts.MODEL_NODE)
    prompt["save"] = {"class_type": SAVE, "inputs": {"model": [compiler, 0], "filename": "x"}}
    prompt.pop(prompts.find(prompt, prompts.WARMUP_NODE))
    for _again in range(2):  # the inputs are the same, but by then something may be compiled
        entry = server.queue(prompt)
        assert error_of(entry) is None, "the prompt goes on"
        messages = dict(entry["status"]["messages"])
        assert "save" not in messages["execution_cached"]["nodes"]
        (report,) = entry["outputs"]["save"]["text"]
        assert report.startswith("Not saved: nothing is compiled yet") and "Torch Compile Warmup" in report
    assert not (saved.parent / "x.tckcache").exists()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", ["cache/clear", "cache/limit", "cache/save", "cache/load", "wait", "begin"])
def test_a_page_of_another_site_cannot_change_anything(server, saved, kind, path):
    before = server.get("/torch-compile-kit/cache")
    request = urllib.request.Request(f"{server.url}/torch-compile-kit/{path}", b'{"gib": 0}', {"Content-Type": kind})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    assert error.value.code == 415 and "application/json" in error.value.read().decode()
    assert before["entries"] and server.get("/torch-compile-kit/cache") == before


def test_all_that_is_compiled_can_be_saved_and_loaded_by_a_request(server, saved, folder):
    told = server.post("/torch-compile-kit/cache/save", {"filename": "everything"})["text"]
    assert told.startswith(str(folder / "everything.tckcache")) and "Flux" in told and "64x64" in told
    assert "everything.tckcache" in server.get("/torch-compile-kit/cache")["files"]
    told = server.post("/torch-compile-kit/cache/load", {"file": "everything.tckcache"})["text"]
    assert told.startswith("everything.tckcache, for Flux")
    (folder / "everything.tckcache").unlink()
    assert "not loaded" in server.post("/torch-compile-kit/cache/load", {"file": "everything.tckcache"})["text"]


@pytest.mark.parametrize("filename", ["../out", "a/b", "", 7, None])
def test_a_name_that_is_none_is_refused_with_its_cure(server, saved, folder, filename):
    before = sorted(folder.rglob("*.tckcache"))
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/torch-compile-kit/cache/save", {"filename": filename})
    assert error.value.code == 400 and "filename" in json.loads(error.value.read())["error"]
    assert sorted(folder.rglob("*.tckcache")) == before


@pytest.mark.parametrize("gib", ["many", -1, None, [1], 1e400])
def test_a_limit_that_is_none_is_the_default(server, gib):
    assert server.post("/torch-compile-kit/cache/limit", {"gib": gib})["limit"] == 2 * 2**30
    assert server.post("/torch-compile-kit/cache/limit", {"gib": 0.5})["limit"] == 2**29
    assert server.post("/torch-compile-kit/cache/limit", {"gib": None})["limit"] == 2 * 2**30


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1]", b"\xff\xfe\x00\xd8", b"{", b"[" * 100_000], ids=lambda body: str(body[:8])
)
def test_a_body_without_a_limit_changes_none_and_is_told_so(server, body):
    server.post("/torch-compile-kit/cache/limit", {"gib": 3})
    url, headers = f"{server.url}/torch-compile-kit/cache/limit", {"Content-Type": "application/json"}
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60)
    said = json.loads(error.value.read())["error"]
    assert error.value.code == 400 and ("gib" in said or "JSON in UTF-8" in said), said
    assert server.get("/torch-compile-kit/cache")["limit"] == 3 * 2**30
    server.post("/torch-compile-kit/cache/limit", {"gib": None})


@pytest.mark.parametrize("model", ["0" * 12, "../x", ["a"], None])
def test_nothing_begins_for_a_model_that_no_line_names(server, model):
    assert server.post("/torch-compile-kit/begin", {"model": model}) == {"begins": False}


def test_nobody_waits_while_nothing_is_compiled(server):
    assert server.post("/torch-compile-kit/wait", {}) == {"waiting": False}


MODEL = {"class_type": prompts.MODEL_NODE}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1]}, {"prompt": "text"}, {"prompt": None}, {}, {"prompt": {"1": 7}}, {"prompt": {"1": None}},
        {"prompt": {"1": MODEL}}, {"prompt": {"1": {**MODEL, "inputs": [1]}}},
        {"prompt": {"1": {**MODEL, "inputs": {"backend": {"a": []}}}}},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_prompts_leave_no_error_of_ours(server, body):
    before = len(server.log())
    with pytest.raises(urllib.error.HTTPError):
        server._request("/prompt", body)
    assert "on_prompt_handler" not in server.log()[before:] and "routes.py" not in server.log()[before:]


def test_the_cache_can_be_looked_at_and_cleared(server, shipped, saved):
    before = server.get("/torch-compile-kit/cache")
    assert {entry["class"] for entry in before["entries"]} >= {"DoubleStreamBlock", "SingleStreamBlock"}
    assert 0 < before["bytes"] <= before["limit"]
    with pytest.raises(urllib.error.HTTPError):
        server.get("/torch-compile-kit/cache/clear")  # looking must not clear
    assert server._request("/torch-compile-kit/cache/clear", {})
    assert server.get("/torch-compile-kit/cache")["entries"] == []
    entry = server.queue(prompts.change(shipped, "KSampler", seed=31))
    assert error_of(entry) is None and len(outputs_of(entry, "images")) == 1
