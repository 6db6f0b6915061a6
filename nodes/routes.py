"""What the page and scripts can ask the server."""

from ..engine.report import report_json


def register_routes() -> None:
    """GET /torch-compile-kit/report: what is compiled right now. Does nothing where no server runs (tests, scripts)."""
    from aiohttp import web
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return

    @server.routes.get("/torch-compile-kit/report")
    async def report(_request: web.Request) -> web.Response:
        return web.json_response(report_json())
