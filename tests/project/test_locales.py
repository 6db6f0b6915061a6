"""The checks of texts find what is planted; that nothing is wrong with the texts themselves: `python dev.py lint`."""

import shutil

import pytest
from comfy_api.latest import io

from devtools import help_pages, locales, texts

MODE = "nodeDefs.json/TorchCompileKitModel/inputs/mode/tooltip"


@pytest.fixture
def schemas(pack):
    return locales.schemas_in(pack.__name__)


def wrong(language, schemas, change=lambda translation: None):
    """What is wrong with a language, after a change to what is on disk."""
    translation = locales.read(language)
    change(translation["nodeDefs.json"])
    return locales.wrong(locales.english(schemas), translation, locales.choices(schemas))


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
    assert locales.read("en", tmp_path) == content
    content["nodeDefs.json"]["TorchCompileKitModel"]["inputs"]["mode"]["tooltip"] += " More."
    assert locales.write_english(content, tmp_path) == [MODE]


def test_a_file_of_a_language_that_is_missing_unknown_or_otherwise_written_is_found(tmp_path):
    shutil.copytree(locales.FOLDER, tmp_path / "locales")
    folder = tmp_path / "locales"
    assert texts.wrong_files(folder) == []
    (folder / "ko" / "main.json").unlink()
    (folder / "xx").mkdir()
    (folder / "xx" / "main.json").write_text("{}\n")
    (folder / "ja" / "main.json").write_text("{}")
    assert [line.partition(": ")[0] for line in texts.wrong_files(folder)] == ["ko/main.json", "xx/main.json", "ja/main.json"]


@pytest.mark.parametrize(
    ("key", "text", "found"),
    [
        ("lacks", None, "lacks"),
        ("more", "x", "English has no such text"),
        ("sizes", "何か", "has other places for values"),
        ("sizes", "for %1", "is English"),
        ("sizes", "auto %1 以降", "auto is in one of the languages only"),
    ],
)
def test_a_wrong_sentence_of_a_report_is_found(key, text, found):
    english, translated = {"sizes": "for %1", "lacks": "a"}, {"sizes": "%1 以降", "lacks": "無い"}
    assert texts.wrong_report(english, translated) == []
    if text is None:
        del translated[key]
    else:
        translated[key] = text
    (line,) = texts.wrong_report(english, translated)
    assert line.startswith(f"report.json/{key}: {found}")


def test_a_text_that_is_not_there_or_not_used_is_found(tmp_path):
    for room in ("js", "nodes", "engine"):
        shutil.copytree(texts.ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    assert texts.unused_or_missing(tmp_path) == []
    (tmp_path / "js" / "more.js").write_text('say("planted");')
    (tmp_path / "nodes" / "more.py").write_text('say(\n    "planted"\n), told("plantedToo")')
    settings = tmp_path / "js" / "settings.js"
    settings.write_text(
        settings.read_text().replace('"TorchCompileKit.', '"TorchCompileKit.More', 1).replace('name: "', 'name: "x')
    )
    lines = texts.unused_or_missing(tmp_path)
    for start in (
        "main.json: planted is used",
        "main.json: plantedToo is used",
        "report.json: planted is used",
        "settings.json: ",
        "js/settings.js: has no name",
    ):
        assert any(line.startswith(start) for line in lines), start
    for file in (tmp_path / "js").glob("*.js"):
        file.write_text("")
    assert any(line.startswith("main.json: nothing uses") for line in texts.unused_or_missing(tmp_path))


@pytest.mark.parametrize(("old", "new"), [("### mode ", "### modus "), ("`auto`", "auto"), ("## ", "# "), ("<details>", "")])
def test_a_planted_difference_of_a_help_page_is_found(old, new):
    english = (help_pages.FOLDER / "TorchCompileKitModel.md").read_text(encoding="utf-8")
    page = (help_pages.FOLDER / "TorchCompileKitModel" / "ja.md").read_text(encoding="utf-8")
    assert old in page and help_pages.differences(english, page) == []
    assert help_pages.differences(english, page.replace(old, new, 1))


def test_a_help_page_that_is_missing_left_over_or_english_is_found(tmp_path):
    (tmp_path / "One").mkdir()
    for name, text in (("One.md", "# One\nText.\n"), ("One/ja.md", "# 一\nText.\n"), ("Two.md", "# Two\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert help_pages.check(["One"], tmp_path) == [
        "One/zh.md: is missing",
        "Two.md: there is no such node or language",
        "One/ja.md: is English: Text.",
    ]


@pytest.mark.parametrize(
    ("language", "expected"),
    [("ja", "準備完了"), ("de", "Bereit"), ("it", "Warm"), ("../x", "Warm"), (None, "Warm"), (7, "Warm")],
)
def test_a_language_that_is_not_there_is_english(engine, language, expected):
    words = engine("messages.words")
    with words.speaking(language):
        assert words.say("warm") == expected and words.say("graphsCompiled", 2).replace(" ", "") != ""
    assert words.say("graphsCompiled", 2) == "2 kinds of blocks compiled"
    assert words.say("cure", "%2 changed", "Set it") == "%2 changed. Set it."
