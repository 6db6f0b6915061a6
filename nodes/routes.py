"""What the page and scripts can ask the server."""

import asyncio
import sys

from ..engine import watch
from ..engine.host.users_folder import get_ready, get_ready_again, open_users_cache
from ..engine.report import report_json

EVENT = "torch-compile-kit.compiled"
COMPILES = "TorchCompileKitModel"
# Seconds, at the least: by then the other packs are loaded.
IDLE = 5.0


def register_routes() -> None:
    """What is compiled right now, the cache on disk, and an event when a run compiled something unexpected.

    GET /torch-compile-kit/report, GET /torch-compile-kit/cache (folder, bytes, limit, entries), POST
    /torch-compile-kit/cache/clear (answers with the bytes removed).

    Has the process get ready to compile when a prompt is queued that will, and soon after the server's start where this user
    has compiled before.

    Does nothing where no server runs (tests, scripts).
    """
    module = sys.modules.get("server")  # importing it would start what only a server needs
    server = getattr(getattr(module, "PromptServer", None), "instance", None)
    if server is None:
        return
    from aiohttp import web

    @server.routes.get("/torch-compile-kit/report")
    async def report(_request: web.Request) -> web.Response:
        return web.json_response(report_json())

    @server.routes.get("/torch-compile-kit/cache")
    async def cache_usage(_request: web.Request) -> web.Response:
        cache = open_users_cache()
        if cache is None:
            return web.json_response({"error": "no cache folder can be written; see the log"}, status=503)
        return web.json_response(await asyncio.to_thread(cache.usage))

    @server.routes.post("/torch-compile-kit/cache/clear")
    async def clear_cache(_request: web.Request) -> web.Response:
        cache = open_users_cache()
        removed = await asyncio.to_thread(cache.clear) if cache is not None else 0
        return web.json_response({"removed": removed})

    def tell_page(model: str, sentence: str) -> None:
        server.send_sync(EVENT, {"model": model, "text": sentence})

    watch.listeners.append(tell_page)
    server.add_on_prompt_handler(prepare_for)
    server.loop.call_soon(server.loop.call_later, IDLE, get_ready_again)  # from when the loop runs


def prepare_for(request: dict) -> dict:
    """When a prompt that will compile is queued: get ready while its models load from disk. Returns the request unchanged."""
    for node in request.get("prompt", {}).values():
        if node.get("class_type") == COMPILES:
            get_ready(node["inputs"].get("backend", "inductor"))
    return request
