"""What the page and scripts can ask about the cache on disk and its files."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from ..engine.cache.archive import CacheFileError
from ..engine.cache.disk import DiskCache
from ..engine.cache.environment import limit_in_bytes
from ..engine.errors import InvalidSetting
from ..engine.host.model.user_folder import open_users_cache
from ..engine.host.nodes.cache_files import cache_files, load_cache, save_all

CACHE = "/torch-compile-kit/cache"


def post(routes, path: str, answer: Callable[[dict], Awaitable[dict]]) -> None:
    """A route that changes something: takes JSON, which no page of another site can send without asking, and answers in JSON.

    Args:
        answer: called with the object that was sent; empty if nothing was.
    """
    from aiohttp import web

    @routes.post(path)
    async def handler(request: web.Request) -> web.Response:
        if request.content_type != "application/json":
            return web.json_response({"error": "send it with the header Content-Type: application/json"}, status=415)
        try:
            given = json.loads(await request.read() or b"{}")
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": f"the body is no JSON in UTF-8: {error}"}, status=400)
        try:
            return web.json_response(await answer(given if isinstance(given, dict) else {}))
        except (InvalidSetting, CacheFileError) as error:
            return web.json_response({"error": str(error)}, status=400)


def register_cache_routes(routes) -> None:
    """GET of CACHE (folder, bytes, limit, entries, files); POST of CACHE/clear (answers with the bytes removed), of CACHE/limit
    ({"gib": 4}, or null for the default; the environment variable goes before it), of CACHE/save ({"filename": "mine"}) and of
    CACHE/load ({"file": "mine.tckcache"}), which answer with a sentence.
    """
    from aiohttp import web

    @routes.get(CACHE)
    async def usage(_request: web.Request) -> web.Response:
        cache = await asyncio.to_thread(open_users_cache)
        if cache is None:
            return web.json_response({"error": "no cache folder can be written; see the log"}, status=503)
        return web.json_response({**await asyncio.to_thread(cache.usage), "files": await asyncio.to_thread(cache_files)})

    async def clear(_given: dict) -> dict:
        cache = await asyncio.to_thread(open_users_cache)
        return {"removed": await asyncio.to_thread(cache.clear) if cache is not None else 0}

    async def limit(given: dict) -> dict:
        if "gib" not in given:
            raise InvalidSetting("gib", None, 'it is missing; send {"gib": 4}, or null for the default.')
        cache = await asyncio.to_thread(open_users_cache)
        return await asyncio.to_thread(_limit, cache, given.get("gib")) if cache is not None else {"limit": 0}

    async def save(given: dict) -> dict:
        return {"text": await asyncio.to_thread(save_all, given.get("filename", ""))}

    async def load(given: dict) -> dict:
        return {"text": await asyncio.to_thread(load_cache, str(given.get("file", "")))}

    for name, answer in (("clear", clear), ("limit", limit), ("save", save), ("load", load)):
        post(routes, f"{CACHE}/{name}", answer)


def _limit(cache: DiskCache, gib: object) -> dict:
    cache.limit = limit_in_bytes(gib)
    cache.trim()
    return {"limit": cache.limit}
