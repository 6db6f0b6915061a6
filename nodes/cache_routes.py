"""Register the routes through which the page and scripts report, clear, limit, save and load the compile cache."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from ..engine.cache.archive import CacheFileError
from ..engine.cache.code_store import CodeStore
from ..engine.cache.environment import limit_in_bytes
from ..engine.errors import InvalidSetting
from ..engine.host.model.user_folder import open_users_store, users_settings
from ..engine.host.nodes.cache_files import cache_files, load_cache, save_all
from ..engine.messages import words

CACHE = "/torch-compile-kit/cache"


def post(routes, path: str, answer: Callable[[dict], Awaitable[dict]]) -> None:
    """Register a POST route. Requires JSON, which a page of another site cannot send without a preflight."""
    from aiohttp import web

    @routes.post(path)
    async def handler(request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return web.json_response({"error": "send it with the header Content-Type: application/json"}, status=415)
        try:
            body = json.loads(await request.read() or b"{}")
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": f"the body is no JSON in UTF-8: {error}"}, status=400)
        body = body if isinstance(body, dict) else {}
        try:
            with words.speaking(language_for(body.get("language"))):
                return web.json_response(await answer(body))
        except (InvalidSetting, CacheFileError) as error:
            return web.json_response({"error": str(error)}, status=400)


def language_for(page: object) -> object:
    """The page's language, else the one in ComfyUI's settings, which hold a language only once a user has chosen one."""
    return page or users_settings().get("Comfy.Locale")


def register_cache_routes(routes) -> None:
    """Register GET of CACHE (folder, bytes, limit, entries, files) and POST of CACHE/clear (answers with the bytes removed),
    CACHE/limit ({"gib": 4}, or null for the default; an environment variable overrides this limit), CACHE/save
    ({"filename": "mine"}) and CACHE/load ({"file": "mine.tckcache"}). Save and load answer with a sentence."""
    from aiohttp import web

    @routes.get(CACHE)
    async def usage(_request: web.Request) -> web.Response:
        cache = await asyncio.to_thread(open_users_store)
        if cache is None:
            return web.json_response({"error": "no cache folder can be written; see the log"}, status=503)
        return web.json_response({**await asyncio.to_thread(cache.usage), "files": await asyncio.to_thread(cache_files)})

    async def clear(_body: dict) -> dict:
        cache = await asyncio.to_thread(open_users_store)
        return {"removed": await asyncio.to_thread(cache.clear) if cache is not None else 0}

    async def limit(body: dict) -> dict:
        if "gib" not in body:
            raise InvalidSetting("gib", None, 'it is missing; send {"gib": 4}, or null for the default.')
        cache = await asyncio.to_thread(open_users_store)
        return await asyncio.to_thread(_limit, cache, body["gib"]) if cache is not None else {"limit": 0}

    async def save(body: dict) -> dict:
        return {"text": await asyncio.to_thread(save_all, body.get("filename", ""))}

    async def load(body: dict) -> dict:
        return {"text": await asyncio.to_thread(load_cache, str(body.get("file", "")))}

    for name, answer in (("clear", clear), ("limit", limit), ("save", save), ("load", load)):
        post(routes, f"{CACHE}/{name}", answer)


def _limit(cache: CodeStore, gib: object) -> dict:
    cache.limit = limit_in_bytes(gib)
    cache.trim()
    return {"limit": cache.limit}
