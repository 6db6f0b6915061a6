"""What the page and scripts can ask the server."""

import sys

from ..engine.report import report_json


def register_routes() -> None:
    """GET /torch-compile-kit/report: what is compiled right now. Does nothing where no server runs (tests, scripts)."""
    module = sys.modules.get("server")  # importing it would start what only a server needs
    server = getattr(getattr(module, "PromptServer", None), "instance", None)
    if server is None:
        return
    from aiohttp import web

    @server.routes.get("/torch-compile-kit/report")
    async def report(_request: web.Request) -> web.Response:
        return web.json_response(report_json())
