"""What runs is told where it runs: two workflows with the same node ids in one page, and two tabs of the browser."""

import copy

import pytest
from browsing import BOTH, MARKS, TWINS

from devtools import prompts

pytestmark = MARKS
EMPTY = "Press Run to see the status."
SIZES = "\n".join(f"{128 + 16 * i}x128" for i in range(1, 40))


def load(page, prompt, **warmup):
    """Open a prompt as a workflow with an id."""
    page.load(prompts.change(prompt, prompts.WARMUP_NODE, width=128, height=128, **warmup))
    page.js("() => app.loadGraphData({ ...app.graph.serialize(), id: crypto.randomUUID() }, true, true, 'first')")
    drawn(page)


def drawn(page):
    page.until("() => kit.node('Warmup') && kit.node('Model')")
    page.js("() => kit.frames()")


def duplicate(page):
    """As the page's own command does: the same node ids, another workflow."""
    page.js("() => { kit.first = app.rootGraph.id; }")
    page.js("() => app.loadGraphData({ ...app.graph.serialize(), id: crypto.randomUUID() }, true, true, 'second')")
    page.until("() => app.rootGraph.id !== kit.first")
    drawn(page)


# From its start, or what it does for how long.
RUNS = "^(Running\\.|.*, \\d+ s)$"


def go_back(page):
    page.js("() => app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
    page.until("() => app.rootGraph.id === kit.first")
    drawn(page)


def shown(page):
    """The text of each node of ours, as it stands on the page in Nodes 2.0."""
    page.js("() => kit.frames()")
    texts = [page.text(name) for name in ("Model", "Warmup")]
    if page.js("() => !!LiteGraph.vueNodesMode"):
        texts += page.js(
            "() => Array.from(document.querySelectorAll('.torch-compile-kit-report'), (found) => found.textContent)"
        )
    return set(texts)


@BOTH
def test_a_workflow_tells_nothing_of_another_with_the_same_nodes(page, prompt):
    load(page, prompt, extra_sizes=SIZES)
    over = page.press_run()
    page.until_shown("Warmup", RUNS)
    duplicate(page)
    assert shown(page) == {EMPTY}
    go_back(page)
    page.until_shown("Warmup", RUNS)
    page.js("() => app.extensionManager.command.execute('Workspace.NextOpenedWorkflow')")
    page.until("() => app.rootGraph.id !== kit.first")
    drawn(page)
    page.js("() => fetch('/interrupt', { method: 'POST' })")
    page.until(over)
    assert shown(page) == {EMPTY}
    page.set("Warmup", "extra_sizes", "")
    page.run()
    page.until_shown("Warmup", "^Ready for 128x128")
    go_back(page)
    assert "Ready" not in page.text("Warmup")


@BOTH
def test_a_report_that_comes_while_another_workflow_is_open_is_shown_in_its_own(page, prompt):
    load(page, prompt, extra_sizes="")
    over = page.press_run()
    duplicate(page)
    page.until(over)
    assert shown(page) == {EMPTY}
    go_back(page)
    page.until_shown("Warmup", "^Ready for 128x128")
    page.until_shown("Model", "^ready")
    page.js("() => app.extensionManager.command.execute('Workspace.NextOpenedWorkflow')")
    page.until("() => app.rootGraph.id !== kit.first")
    drawn(page)
    page.js("() => new Promise((resolve) => setTimeout(resolve, 1000))")  # the page has put back what it takes for its outputs
    assert shown(page) == {EMPTY}


@TWINS
def test_a_report_inside_a_subgraph_comes_back_with_its_tab_and_after_undo(page, prompt):
    load(page, prompt, extra_sizes="")
    page.js("() => app.rootGraph.convertToSubgraph(new Set([kit.node('Warmup')]))")
    page.run()
    page.until_shown("Warmup", "^Ready for 128x128")
    duplicate(page)
    assert shown(page) == {EMPTY}
    go_back(page)
    page.until_shown("Warmup", "^Ready for 128x128")
    page.js(
        """() => {
            const tracker = app.extensionManager.workflow.activeWorkflow.changeTracker;
            (tracker.captureCanvasState ?? tracker.checkState).call(tracker);
            kit.undone = kit.node('Warmup');
            kit.node('KSampler').title = 'another';
            (tracker.captureCanvasState ?? tracker.checkState).call(tracker);
            return app.extensionManager.command.execute('Comfy.Undo');
        }"""
    )
    page.until("() => kit.node('Warmup') && kit.node('Warmup') !== kit.undone && kit.node('KSampler').title !== 'another'")
    page.until_shown("Warmup", "^Ready for 128x128")


@pytest.fixture
def another_tab(page):
    """Another tab of the same browser, with the same page."""
    tab = copy.copy(page)
    tab.errors, tab.window = [], page.context.new_page()
    tab.window.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.window.set_default_timeout(180_000)
    yield tab.open()
    tab.window.close()
    assert not [error for error in tab.errors if "torch-compile-kit" in error]


@TWINS
def test_a_tab_tells_nothing_of_another_that_shows_the_same_workflow(page, another_tab, prompt):
    load(page, prompt, extra_sizes="")
    another_tab.js("(graph) => app.loadGraphData(graph, true, true, 'first')", page.js("() => app.graph.serialize()"))
    drawn(another_tab)
    page.run()
    page.until_shown("Warmup", "^Ready for 128x128")
    page.until_shown("Model", "^ready")
    assert shown(another_tab) == {EMPTY}
    another_tab.set("Warmup", "extra_sizes", "144x128")
    before = page.text("Warmup")
    another_tab.run()
    another_tab.until_shown("Warmup", "^Ready for 128x128, 144x128")
    another_tab.until_shown("Model", "^ready")
    assert page.text("Warmup") == before and page.text("Model").startswith("ready"), "the model is both's"
