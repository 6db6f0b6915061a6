"""What a page of another site can set: SECURITY.md answers for each setting and route, and no route forgets to ask."""

import re

from support import ROOT

SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def sources(folder, pattern):
    return {file: file.read_text(encoding="utf-8") for file in (ROOT / folder).rglob(pattern)}


def test_each_setting_of_the_page_is_answered_for():
    settings = re.findall(r'"(TorchCompileKit\.\w+)"', "".join(sources("js", "*.js").values()))
    assert settings and not [name for name in settings if name not in SECURITY]


def test_each_setting_that_the_server_reads_is_answered_for():
    texts = "".join((sources("engine", "*.py") | sources("nodes", "*.py")).values())
    read = re.findall(r"users_settings\(\)\.get\((.*?)\)", texts)
    constants = dict(re.findall(r'^(\w+) = "([\w.]+)"', texts, re.MULTILINE))
    assert read and texts.count("users_settings()") == len(read) + 1, "and its definition: nothing else reads them"
    names = [constants.get(name, name.strip('"')) for name in read]
    assert not [name for name in names if f"`{name}`" not in SECURITY]


def test_what_changes_something_is_registered_by_the_function_that_asks_for_json():
    texts = sources("nodes", "*.py")
    registered = [kind for text in texts.values() for kind in re.findall(r"routes\.(\w+)\(", text)]
    assert registered.count("post") == 1 and set(registered) == {"get", "post"}


def test_each_route_that_any_page_can_ask_is_answered_for():
    routes = re.findall(r'routes\.get\((?:"/torch-compile-kit(.*?)"|CACHE)\)', "".join(sources("nodes", "*.py").values()))
    assert len(routes) == 4
    assert not [route for route in routes if f"{route or '/cache'}`" not in SECURITY]
