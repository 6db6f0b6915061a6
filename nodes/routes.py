"""Register the pack's HTTP routes, and send pages events on compiled blocks, status lines and progress."""

import asyncio
import functools
import sys
import threading

from ..engine.background.thread import compiler
from ..engine.compile.registry import live_models
from ..engine.failures.machine import preflight_here
from ..engine.host import adapter
from ..engine.host.adapter import device_type
from ..engine.host.model.payback import begin_now
from ..engine.host.model.user_folder import get_ready, get_ready_again, prompt_came
from ..engine.host.nodes import progress
from ..engine.host.nodes.cache_files import pack_version
from ..engine.log import logger
from ..engine.messages import recompile_log as watch
from ..engine.messages import status, words
from ..engine.messages.report import report_json
from ..engine.settings import CompileSettings
from ..engine.threads import started
from .cache_routes import language_for, post, register_cache_routes

EVENT = "torch-compile-kit.compiled"
STATUS = "torch-compile-kit.status"
PROGRESS = "torch-compile-kit.progress"
COMPILES = "TorchCompileKitModel"
WARMS = "TorchCompileKitWarmup"
IDLE = 2.0  # seconds after the server's start, in which a page or script may already queue a prompt
# Client id -> language of its page, for the MOST_PAGES newest pages.
_languages: dict[str, str] = {}
MOST_PAGES = 100
LANGUAGE = "torch_compile_kit_language"  # in the extra data of a prompt


def register_routes() -> None:
    """Register the routes, send events to pages, and get ready to compile before a prompt needs compiled code.

    GET /torch-compile-kit/report (in ?language=), GET /torch-compile-kit/status (status lines by node, of all clients or those
    of ?client_id= and ?workflow=; prompts that this client queues later report in ?language=), GET /torch-compile-kit/machine
    (what compiling needs and this machine lacks), POST /torch-compile-kit/wait (the sampler waits for the code that is being
    compiled), POST /torch-compile-kit/begin ({"model": `begins` of a status line}: compile that model now), and the routes of
    `cache_routes.py`.

    Does nothing where no server runs (tests, scripts).
    """
    module = sys.modules.get("server")  # not imported: that would start what only a server needs
    server = getattr(getattr(module, "PromptServer", None), "instance", None)
    if server is None:
        return
    from aiohttp import web

    @server.routes.get("/torch-compile-kit/report")
    async def report(request: web.Request) -> web.Response:
        with words.speaking(language_for(request.query.get("language"))):
            return web.json_response(await asyncio.to_thread(report_json))

    register_cache_routes(server.routes)

    @server.routes.get("/torch-compile-kit/machine")
    async def check_machine(_request: web.Request) -> web.Response:
        machine, missing = await asyncio.to_thread(preflight_here, device_type() != "cpu")
        here = f"Torch Compile Kit {pack_version()}, ComfyUI {adapter.version()}, {machine}"
        return web.json_response({"here": here, "missing": missing})

    async def wait(_body: dict) -> dict:
        pending = any(code.is_being_compiled for _, code in live_models())
        return {"waiting": compiler.have_awaited(pending)}

    async def begin(body: dict) -> dict:
        return {"begins": await asyncio.to_thread(begin_now, body.get("model"))}

    post(server.routes, "/torch-compile-kit/wait", wait)
    post(server.routes, "/torch-compile-kit/begin", begin)

    def prompt_now() -> tuple[dict, dict]:
        """The nodes by id of the prompt that runs, and its extra data."""
        for _number, _prompt_id, prompt, extra, *_ in dict(server.prompt_queue.currently_running).values():
            return prompt, extra
        return {}, {}

    def owner_now() -> status.Owner:
        _prompt, extra = prompt_now()
        return _text_in(extra, "client_id"), _text_in(extra, "extra_pnginfo", "workflow", "id")

    def language_of_prompt() -> object:
        return language_for(_text_in(prompt_now()[1], LANGUAGE))

    def send(event: str, owner: status.Owner, **detail: object) -> None:
        client, workflow = owner
        if client is not None:  # else `send_sync` would send to every page
            server.send_sync(event, {**detail, "workflow": workflow}, client)

    def tell_page(model: str, sentence: str, size: str | None, node: str | None) -> None:
        send(EVENT, owner_now(), model=model, text=sentence, size=size, warmups=warmups_of(prompt_now()[0], node))

    def tell_node(owner: status.Owner, node: str, line: status.News) -> None:
        send(STATUS, owner, node=node, **line._asdict())

    def tell_progress(owner: status.Owner, node: str, text: str) -> None:
        send(PROGRESS, owner, node=node, text=text)

    @server.routes.get("/torch-compile-kit/status")
    async def node_status(request: web.Request) -> web.Response:
        client = request.query.get("client_id")
        remember_language(client, request.query.get("language"))
        lines = status.lines_of(client, request.query.get("workflow"))
        return web.json_response({node: line._asdict() for node, line in lines.items()})

    watch.listeners.append(tell_page)
    status.listeners.append(tell_node)
    status.owner_now = owner_now
    words.language_of_prompt = language_of_prompt
    progress.tell_page = tell_progress
    server.add_on_prompt_handler(prepare_for)

    def when_idle() -> None:
        if not server.prompt_queue.get_tasks_remaining():  # in parallel with a model's loading, both take twice as long
            server.loop.run_in_executor(None, get_ready_again)

    async def when_started(_app: web.Application) -> None:  # all packs are loaded
        server.loop.call_later(IDLE, when_idle)

    server.app.on_startup.append(when_started)


def _text_in(data: object, *names: str) -> str | None:
    """The string at the path `names` in JSON of a client, else None: the JSON may have any shape."""
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, str) else None


def warmups_of(prompt: dict, node: str | None) -> list[str]:
    """The ids of the prompt's Warmup nodes that have `node` upstream of their model input."""
    return [found for found, given in prompt.items() if given["class_type"] == WARMS and node in _before(prompt, found)]


def _before(prompt: dict, warmup: str) -> set[str]:
    """The ids of all nodes upstream of a Warmup's model input."""
    seen: set[str] = set()
    links = [prompt[warmup]["inputs"].get("model")]
    while links:
        link = links.pop()
        if isinstance(link, list) and link and isinstance(link[0], str) and link[0] in prompt.keys() - seen:
            seen.add(link[0])
            links += prompt[link[0]]["inputs"].values()
    return seen


def remember_language(client: str | None, language: str | None) -> None:
    if client and language:
        _languages.pop(client, None)
        _languages[client] = language
        if len(_languages) > MOST_PAGES:
            del _languages[next(iter(_languages))]


def prepare_for(request: dict) -> dict:
    """When a prompt is queued, give it the page's language, open the store, and get ready if its first step will compile."""
    prompt_came()
    language = language_for(_languages.get(_text_in(request, "client_id") or ""))
    if isinstance(request, dict) and isinstance(extra := request.setdefault("extra_data", {}), dict):
        extra[LANGUAGE] = language
    prompt = request.get("prompt") if isinstance(request, dict) else None
    nodes = [node for node in prompt.values() if isinstance(node, dict)] if isinstance(prompt, dict) else []
    warms = any(node.get("class_type") == WARMS for node in nodes)
    for node in nodes:
        if node.get("class_type") == COMPILES and isinstance(node.get("inputs"), dict):
            # In a thread: this handler runs on the server's event loop, and the user's folder may be on a slow drive.
            get = functools.partial(_get_ready, node["inputs"], warms)
            started(threading.Thread(target=get, name="torch-compile-kit start", daemon=True))
    return request


def _get_ready(inputs: dict, warms: bool) -> None:
    try:
        # A linked input has no value yet.
        typed = {name: inputs[name] for name in ("backend", "mode", "compile_when") if isinstance(inputs.get(name), str)}
        get_ready(CompileSettings(**{**typed, **({"compile_when": "before first image"} if warms else {})}))
    except Exception as error:  # ComfyUI refuses invalid prompts; the first compilation gets ready, too
        logger.warning("getting ready to compile failed: %s: %s", type(error).__name__, error)
