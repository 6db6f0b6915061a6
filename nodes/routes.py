"""What the page and scripts can ask the server."""

import sys

from ..engine import watch
from ..engine.report import report_json

EVENT = "torch-compile-kit.compiled"


def register_routes() -> None:
    """GET /torch-compile-kit/report: what is compiled right now; and an event when a run compiled something unexpected.

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

    def tell_page(model: str, sentence: str) -> None:
        server.send_sync(EVENT, {"model": model, "text": sentence})

    watch.listeners.append(tell_page)
