"""The routes of the cache leave the server's event loop free while they use the drive."""

import asyncio
import json
import threading
import types

import pytest

pytestmark = pytest.mark.host
CACHE = "/torch-compile-kit/cache"


@pytest.mark.parametrize(
    ("slow", "asked"),
    [
        ("open_users_store", ("GET", CACHE)),
        ("cache_files", ("GET", CACHE)),
        ("open_users_store", ("POST", f"{CACHE}/clear")),
        ("open_users_store", ("POST", f"{CACHE}/limit")),
    ],
)
def test_the_event_loop_runs_while_a_slow_drive_is_asked(pack_module, monkeypatch, asked, slow):
    from aiohttp import web

    module, routes = pack_module("nodes.cache_routes"), web.RouteTableDef()
    waiting, looped, ran = threading.Event(), threading.Event(), []
    module.register_cache_routes(routes)
    (handler,) = (route.handler for route in routes if (route.method, route.path) == asked)
    store = types.SimpleNamespace(usage=dict, clear=lambda: 0, trim=lambda: 0)
    answers = {"open_users_store": store, "cache_files": []}

    def waits():
        waiting.set()
        ran.append(looped.wait(2))
        return answers[slow]

    for name, answer in answers.items():
        monkeypatch.setattr(module, name, waits if name == slow else lambda answer=answer: answer)

    async def read():
        return b'{"gib": 1}'

    async def goes_on():
        while not waiting.is_set():
            await asyncio.sleep(0.01)
        looped.set()

    async def both():
        request = types.SimpleNamespace(content_type="application/json", read=read)
        return (await asyncio.gather(handler(request), goes_on()))[0]

    assert asyncio.run(both()).status == 200 and ran == [True]


@pytest.mark.parametrize(("sent", "expected"), [({"language": "ja"}, "ファイルが選ばれていません"), ({}, "No file chosen")])
def test_what_a_page_asks_for_is_answered_in_its_language(pack_module, engine, monkeypatch, sent, expected):
    from aiohttp import web

    routes, words = web.RouteTableDef(), engine("messages.words")
    pack_module("nodes.cache_routes").register_cache_routes(routes)
    (handler,) = (route.handler for route in routes if route.path == f"{CACHE}/load")

    async def read():
        return json.dumps({"file": "none", **sent}).encode()

    monkeypatch.setattr(words, "language_of_prompt", lambda: "ru")
    answer = asyncio.run(handler(types.SimpleNamespace(content_type="application/json", read=read)))
    assert expected in json.loads(answer.text)["text"]
    assert words.say("noFileChosen") == words._texts("ru")["noFileChosen"], "the prompt that runs keeps its own"
