"""Send a prompt that nobody should send to a server, and judge what the server answers and logs."""

import json
import re
import time
import urllib.error
import urllib.request

from devtools.prompts import KIT, without_kit
from devtools.server import PACK_NAME, ROOT, error_of

# Errors that the pack raises on purpose; each says what to do.
OURS = {"InvalidSetting", "TorchCompileKitError", "BlockCompileError", "CacheFileError"}
NAMES_AN_INPUT = re.compile(r"\w+ = .+: .+", re.DOTALL)
TRACEBACK = "Traceback (most recent call last):"
CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# A node's error with its stack takes 2 to 8 KiB, and a prompt may have a line or two of each node.
LOG_BYTES = 32 * 1024
SHOWN = 300
SECONDS = 180


class Judge:
    """Send prompts to a server that runs, and say what became of them."""

    def __init__(self, server):
        self.server = server

    def judged(self, prompt: dict) -> dict:
        """What became of a prompt, in a row."""
        self.server.log_file.touch()
        before, began = self.server.log_file.stat().st_size, time.perf_counter()
        kit = {node_id for node_id, node in prompt.items() if isinstance(node, dict) and _is_ours(node)}
        answer, echoed, entry = self._send(prompt)
        with open(self.server.log_file, encoding="utf-8", errors="replace") as log:
            log.seek(before)
            said = log.read()
        row = {"outcome": "", "seconds": round(time.perf_counter() - began, 1), "log_bytes": len(said.encode())}
        try:
            row |= self._outcome(prompt, kit, answer, entry)
            self._check_log(said, echoed, row)
        except _WrongError as error:
            row |= {"outcome": "wrong", "why": str(error)[:2000]}
        return row

    def _send(self, prompt: dict):
        """(the server's answer, or an HTTP status; its size in bytes; the history's entry, or None)."""
        body = json.dumps({"prompt": prompt, "client_id": self.server.client_id}).encode()
        request = urllib.request.Request(self.server.url + "/prompt", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                content = reply.read()
        except urllib.error.HTTPError as error:
            content = error.read()
            if error.code >= 500:
                return error.code, len(content), None
        answer = json.loads(content)
        entry = self.server.finished(answer["prompt_id"], SECONDS) if "prompt_id" in answer else None
        return answer, len(content), entry

    def _outcome(self, prompt: dict, kit: set[str], answer, entry) -> dict:
        if isinstance(answer, int):
            return {"outcome": "the host cannot read the prompt", "message": f"HTTP {answer}"}
        errors = answer.get("node_errors") or {}
        for node_id in kit & set(errors):
            for error in errors[node_id]["errors"]:
                _check_refusal(prompt[node_id], error)
        said = [f"{e['message']}: {e['details']}" for node in errors.values() for e in node["errors"]]
        if entry is None:
            message = said or [f"{answer['error']['message']}: {answer['error']['details']}"]
            return {"outcome": "refused before it runs" if said else "no prompt", "message": message[0][:SHOWN]}
        error = error_of(entry)
        if error is None:
            if entry["status"]["status_str"] != "success":
                raise _WrongError(f"neither an error nor a success: {str(entry['status'])[:SHOWN]}")
            return {"outcome": "ran in part", "message": said[0][:SHOWN]} if said else {"outcome": "ran"}
        kind, message = error["exception_type"].rpartition(".")[2], error["exception_message"].strip()
        row = {"message": f"{kind}: {message}"[:SHOWN], "node": error["node_type"]}
        if len(message) > 10_000:
            raise _WrongError(f"a message of {len(message):,} characters: {message[:SHOWN]}")
        if kind in OURS:
            if kind == "InvalidSetting" and not NAMES_AN_INPUT.match(message):
                raise _WrongError(f"names no input: {message[:SHOWN]}")
            return {"outcome": "our error", **row}
        if error["node_id"] in kit:
            raise _WrongError(f"{error['node_type']} raises {kind}: {message[:SHOWN]}\n{''.join(error['traceback'][-3:])}")
        without = self._send(without_kit(prompt))[2]
        eager = error_of(without) if without else None
        if eager is None or eager["exception_type"] != error["exception_type"]:
            raise _WrongError(f"{error['node_type']} raises {kind} with our nodes only: {message[:SHOWN]}")
        return {"outcome": "the host's error, as without our nodes", **row}

    @staticmethod
    def _check_log(said: str, echoed: int, row: dict) -> None:
        # The host writes what it refuses into the log as it answers it.
        allowed = LOG_BYTES + 3 * echoed
        if row["log_bytes"] > allowed:
            raise _WrongError(f"{row['log_bytes']:,} bytes of log, allowed {allowed:,}: {said[:SHOWN]!r}")
        for stack, error in tracebacks(said):
            ours = f"/{PACK_NAME}/" in stack or f"{ROOT}/engine" in stack or f"{ROOT}/nodes" in stack
            if ours and error.rpartition(".")[2] not in OURS and not row["outcome"].startswith("the host's error"):
                raise _WrongError(f"a traceback of ours in the log: {error}\n{stack[-1500:]}")


def tracebacks(log: str) -> list[tuple[str, str]]:
    """(stack, class of the error) of each traceback in a log; of a chain the last, which is the one that got out."""
    found = []
    for block in log.split(TRACEBACK)[1:]:
        if block.rstrip().endswith(CHAINED):
            continue
        lines = block.strip("\n").splitlines()
        last = next((at for at, line in enumerate(lines) if line and not line.startswith(" ")), len(lines) - 1)
        found.append(("\n".join(lines[: last + 1]), lines[last].partition(":")[0]))
    return found


class _WrongError(Exception):
    """An answer that nobody should get; says why."""


def _is_ours(node: dict) -> bool:
    return str(node.get("class_type", "")).startswith(KIT)


def _check_refusal(node: dict, error: dict) -> None:
    named = (error.get("extra_info") or {}).get("input_name")
    if error["type"] in ("dependency_cycle", "exception_during_validation") and not named:
        return  # of links that lead nowhere or in a circle: the host's own words
    if not named:
        raise _WrongError(f"a refusal of {node.get('class_type')} names no input: {str(error)[:SHOWN]}")
