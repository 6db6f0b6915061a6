"""What a real server hands to a page in another language."""

import copy
import re
import urllib.request

import pytest

from devtools import locales, prompts

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("server")]


def test_the_page_gets_our_texts_in_each_language(server):
    given = server.get("/i18n")
    for language in ("en", *locales.LANGUAGES):
        files = locales.read(language)
        assert {name: given[language]["nodeDefs"][name] for name in files["nodeDefs.json"]} == files["nodeDefs.json"]
        assert given[language]["nodeCategories"]["torch compile"] == files["main.json"]["nodeCategories"]["torch compile"]


def test_english_is_what_the_server_says_of_the_nodes(server):
    """The texts that the page falls back to, from the running server instead of the schemas."""
    info, english = server.get("/object_info"), server.get("/i18n")["en"]["nodeDefs"]
    for node, texts in locales.read("en")["nodeDefs.json"].items():
        assert (info[node]["display_name"], info[node]["description"]) == (texts["display_name"], texts["description"])
        told = {name: options["tooltip"] for name, _, options in prompts.inputs_in_order(info[node])}
        assert told == {name: given["tooltip"] for name, given in english[node]["inputs"].items()}
        assert info[node]["output_name"] == [given["name"] for given in english[node]["outputs"].values()]


@pytest.mark.parametrize("language", ["ja", "zh"])
def test_help_pages_are_where_the_page_looks_for_them(server, language):
    """`/extensions/PACK/docs/NODE/LOCALE.md`, before `/extensions/PACK/docs/NODE.md`."""
    for node in locales.read("en")["nodeDefs.json"]:
        pack = server.get(f"/object_info/{node}")[node]["python_module"].removeprefix("custom_nodes.")
        with urllib.request.urlopen(f"{server.url}/extensions/{pack}/docs/{node}/{language}.md", timeout=30) as answer:
            assert "text/html" not in (answer.headers["Content-Type"] or "")  # the page takes HTML for "there is none"
            text = answer.read().decode("utf-8")
        assert text == (locales.ROOT / "js" / "docs" / node / f"{language}.md").read_text(encoding="utf-8")


def test_each_prompt_reports_in_the_language_of_the_page_that_queued_it(server, monkeypatch):
    """Another page queues one in another language while the first still runs."""
    shipped = prompts.shrink(prompts.to_api(prompts.load(), server.get("/object_info")), width=64, height=64, steps=2)
    queued = {}
    for number, language in enumerate(("ja", "en", "ru")):
        prompt = copy.deepcopy(prompts.only_warmup(shipped))
        prompt = prompts.change(prompt, prompts.MODEL_NODE, backend="eager")
        prompt[prompts.find(prompt, prompts.WARMUP_NODE)]["inputs"]["cfg"] = 2.0 + number  # none comes from ComfyUI's cache
        monkeypatch.setattr(server, "client_id", f"page in {language}")
        server.get(f"/torch-compile-kit/status?client_id=page%20in%20{language}&language={language}")
        queued[language] = server.start(prompt)
    for language, prompt_id in queued.items():
        (report,) = [text for output in server.finished(prompt_id)["outputs"].values() for text in output.get("text", ())]
        letters = {"ja": "[ぁ-ん]", "ru": r"[\u0400-\u04ff]", "en": "[^ -~]"}  # the last: there is none but these
        seen = {name: bool(re.search(some, report.partition("\n")[0])) for name, some in letters.items()}
        assert seen == {"ja": language == "ja", "ru": language == "ru", "en": language != "en"}, report
