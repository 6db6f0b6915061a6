"""The texts of the nodes in other languages: none is missing, left over, English, or at odds with the schemas."""

import json
import re
from collections import Counter

import pytest
from comfy_api.latest import io
from support import ROOT

from devtools import locales

DOCS = ROOT / "js" / "docs"
HELP_LANGUAGES = ("ja", "zh")
REPORT = "report.json"
PAGES = sorted(DOCS.glob("*.md"))
MODE = "nodeDefs.json/TorchCompileKitModel/inputs/mode/tooltip"


@pytest.fixture
def schemas(pack):
    return locales.schemas_in(pack.__name__)


def wrong(language, schemas, change=lambda translation: None):
    """What is wrong with a language, after a change to what is on disk."""
    translation = locales.read(language)
    change(translation["nodeDefs.json"])
    return locales.wrong(locales.english(schemas), translation, locales.choices(schemas))


def test_english_is_what_the_schemas_say(schemas):
    assert locales.read("en") == locales.english(schemas), "run python -m devtools.locales --comfyui FOLDER"


def test_the_languages_are_the_known_ones():
    assert {folder.name for folder in locales.FOLDER.iterdir()} == {"en", *locales.LANGUAGES}
    assert all(
        {file.name for file in f.iterdir()} == set(locales.FILES) | ({REPORT} if f.name in ("en", *HELP_LANGUAGES) else set())
        for f in locales.FOLDER.iterdir()
    )


@pytest.mark.parametrize("language", locales.LANGUAGES)
def test_each_text_is_translated(schemas, language):
    assert wrong(language, schemas) == []


@pytest.mark.parametrize("language", ["en", *locales.LANGUAGES])
def test_all_nodes_inputs_and_outputs_have_texts(schemas, language):
    """Counted from the schemas by another way than the script's."""
    texts = locales.read(language)["nodeDefs.json"]
    for schema in schemas:
        node = texts[schema.node_id]
        assert list(node["inputs"]) == [given.id for given in schema.inputs]
        assert list(node["outputs"]) == [str(index) for index in range(len(schema.outputs))]
        assert all(set(given) == {"name", "tooltip"} for part in ("inputs", "outputs") for given in node[part].values())
    assert len(texts) == len(schemas) == 9


def test_nodes_have_different_names_in_each_language():
    for language in locales.LANGUAGES:
        titles = [node["display_name"] for node in locales.read(language)["nodeDefs.json"].values()]
        assert len(set(titles)) == len(titles)


def test_a_new_input_is_found_in_each_language(schemas):
    model = next(schema for schema in schemas if schema.node_id == "TorchCompileKitModel")
    model.inputs.append(io.Int.Input("planted", tooltip="A new input."))
    where = "nodeDefs.json/TorchCompileKitModel/inputs/planted"
    assert locales.read("en") != locales.english(schemas)
    for language in locales.LANGUAGES:
        assert wrong(language, schemas) == [f"{where}/name: lacks", f"{where}/tooltip: lacks"]


def test_an_input_that_is_gone_is_found(schemas):
    model = next(schema for schema in schemas if schema.node_id == "TorchCompileKitModel")
    model.inputs = [given for given in model.inputs if given.id != "mode"]
    assert f"{MODE}: English has no such text" in wrong("ja", schemas)


PLANTED = {
    "missing": (lambda mode: mode.pop("tooltip"), "lacks"),
    "empty": (lambda mode: mode.update(tooltip=" "), "is empty"),
    "no text": (lambda mode: mode.update(tooltip=None), "is empty"),
    "English": (lambda mode: mode.update(tooltip=english_of("mode")), "is English"),
    "a value translated": (lambda mode: change(mode, "reduce-overhead", "オーバーヘッド削減"), "lacks reduce-overhead"),
    "a part of a value": (lambda mode: change(mode, "max-autotune", "max-autotune-x"), "lacks max-autotune"),
    "syntax": (lambda mode: change(mode, "auto", "auto {x}"), "{ is syntax to the page"),
}


def english_of(name):
    return locales.read("en")["nodeDefs.json"]["TorchCompileKitModel"]["inputs"][name]["tooltip"]


def change(given, old, new):
    assert old in given["tooltip"]
    given["tooltip"] = given["tooltip"].replace(old, new)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_mistake_is_found(schemas, planted):
    spoil, line = PLANTED[planted]
    assert f"{MODE}: {line}" in wrong("ja", schemas, lambda nodes: spoil(nodes["TorchCompileKitModel"]["inputs"]["mode"]))


def test_a_wrong_number_is_found(schemas):
    def spoil(nodes):
        change(nodes["TorchCompileKitModel"]["inputs"]["cache_limit"], "64", "46")

    assert wrong("zh", schemas, spoil) == ["nodeDefs.json/TorchCompileKitModel/inputs/cache_limit/tooltip: lacks 64"]


def test_the_script_writes_english_and_tells_which_texts_are_new_or_changed(schemas, tmp_path):
    content = locales.english(schemas)
    assert set(locales.write_english(content, tmp_path)) == set(locales.texts(content))
    assert locales.write_english(content, tmp_path) == []
    for name in content:
        assert (tmp_path / "en" / name).read_bytes() == (locales.FOLDER / "en" / name).read_bytes()
    content["nodeDefs.json"]["TorchCompileKitModel"]["inputs"]["mode"]["tooltip"] += " More."
    assert locales.write_english(content, tmp_path) == [MODE]


def outline(page):
    """What a translation of a help page must have in common with it: headings, tables, code, links, inputs by name."""
    lines = page.splitlines()
    return {
        "headings": [re.match("#+", line)[0] for line in lines if line.startswith("#")],
        "rows": [line.count(" |") for line in lines if line.startswith("|")],
        "named": [re.findall(r"\*\*(\w+)\*\*", line.split("|")[1]) for line in lines if line.startswith("| **")],
        "lists": sum(line.startswith("- ") for line in lines),
        "code": Counter(re.findall(r"`[^`]+`", page)),
        "links": re.findall(r"\]\((\S+?)\)", page),
    }


@pytest.mark.parametrize("language", HELP_LANGUAGES)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_translated_help_page_has_what_the_english_one_has(page, language):
    translated = (DOCS / page.stem / f"{language}.md").read_text(encoding="utf-8")
    assert outline(translated) == outline(page.read_text(encoding="utf-8"))
    same = set(translated.splitlines()) & set(page.read_text(encoding="utf-8").splitlines())
    assert all(re.fullmatch(r"[|\- ]*", line) for line in same), f"untranslated: {same}"


def test_help_pages_are_those_of_the_nodes(schemas):
    assert {page.stem for page in PAGES} == {schema.node_id for schema in schemas}
    translated = {file.relative_to(DOCS).as_posix() for file in DOCS.glob("*/*")}
    assert translated == {f"{page.stem}/{language}.md" for page in PAGES for language in HELP_LANGUAGES}


@pytest.mark.parametrize("old, new", [("| **mode** |", "| **modus** |"), ("`auto`", "auto"), ("## ", "# ")])
def test_a_planted_difference_of_a_help_page_is_found(old, new):
    page = (DOCS / "TorchCompileKitModel" / "ja.md").read_text(encoding="utf-8")
    assert old in page and outline(page.replace(old, new, 1)) != outline(page)


def test_files_are_utf8_with_one_newline_at_the_end():
    for file in locales.FOLDER.rglob("*.json"):
        text = file.read_bytes().decode("utf-8")
        assert text == json.dumps(json.loads(text), ensure_ascii=False, indent=2) + "\n", file


def test_each_text_that_a_script_says_is_there_and_no_other():
    scripts = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "js").glob("*.js"))
    said = {key for call in re.findall(r"\bsay\(([^()]*)", scripts) for key in re.findall(r'"(\w+)"', call)}
    said |= set(re.findall(r'TorchCompileKit\w+: "(\w+)"', scripts))
    assert said == set(locales.read("en")["main.json"]["torchCompileKit"])


def test_each_setting_has_its_texts():
    script = (ROOT / "js" / "settings.js").read_text(encoding="utf-8")
    shown = locales.read("en")["settings.json"]
    assert {name.replace(".", "_") for name in re.findall(r'"(TorchCompileKit\.\w+)"', script)} == set(shown)
    assert all(f'name: "{texts["name"]}"' in script for texts in shown.values())


def report(language):
    return json.loads((locales.FOLDER / language / REPORT).read_text(encoding="utf-8"))


def test_each_sentence_of_reports_is_there_and_no_other():
    rooms = [ROOT / room for room in ("nodes", "engine/notices", "engine/host/nodes", "engine/host/vae", "engine/host/model")]
    code = "\n".join(file.read_text(encoding="utf-8") for room in rooms for file in room.glob("*.py"))
    code = re.sub(r"\s+", " ", code)
    said = {key for call in re.findall(r"\bsay\(([^()]*)", code) for key in re.findall(r'"(\w+)"', call)}
    assert said - {"en"} == set(report("en"))


@pytest.mark.parametrize("language", HELP_LANGUAGES)
def test_reports_speak_the_language(language):
    english, translated = report("en"), report(language)
    assert set(translated) == set(english)
    for key, text in translated.items():
        assert Counter(re.findall(r"%\d", text)) == Counter(re.findall(r"%\d", english[key])), key
        assert key in ("cure", "or", "details") or not text.isascii(), key
        for name in ("extra_sizes", "cache_limit", "dynamic", "cfg", "LoRA", "ControlNet", "auto", "true"):
            assert locales.names(english[key], name) == locales.names(text, name), (key, name)


@pytest.mark.parametrize(
    ("language", "expected"), [("ja", "準備完了"), ("de", "ready"), ("../x", "ready"), (None, "ready"), (7, "ready")]
)
def test_a_language_that_is_not_there_is_english(engine, language, expected):
    words = engine("notices.words")
    words.speak(language)
    try:
        assert words.say("ready") == expected and words.say("since", 2).replace(" ", "") != ""
    finally:
        words.speak(words.ENGLISH)
    assert words.say("since", 2) == "2 compiled since" and words.say("cure", "%2 changed", "Set it") == "%2 changed. Set it."
