"""The benchmark's figures: what follows from given times, and the table."""

import math

import pytest
import torch


@pytest.fixture
def result(engine):
    """result(eager, compiled, **fields): lists of rounds in seconds, or one time for three even rounds of 20 steps."""
    module = engine("benchmark.figures")

    def timing(times):
        return module.Timing(tuple(map(tuple, times)) if isinstance(times, list) else ((times,) * 20,) * 3)

    def make(eager=0.2, compiled=0.1, cost=None, **fields):
        given = {
            "model": "Flux",
            "device": "NVIDIA H200, PyTorch 2.11.0",
            "settings": "inductor, dynamic auto",
            "size": "1024x1024 batch 1",
            "steps": 20,
            "cfg": 1.0,
            "batch": 1,
            "error": 0.0072,
            "repeat_error": 0.0,
            **fields,
        }
        cost = cost or module.CompileCost(5.0, 2, 0, 0, (5.4, 0.3))
        return module.BenchmarkResult(eager=timing(eager), compiled=timing(compiled), cost=cost, **given)

    return make


@pytest.fixture
def cost(engine):
    return engine("benchmark.figures").CompileCost


def test_median_and_spread_are_over_the_steps_of_all_rounds(engine):
    timing = engine("benchmark.figures").Timing(((5.0, 1.0, 2.0, 3.0), (4.0, 6.0, 7.0), (8.0, 9.0, 10.0, 11.0)))
    assert timing.median == 6.0
    assert timing.fastest == 1.0
    assert timing.spread == (2.0, 10.0)
    alone = engine("benchmark.figures").Timing(((0.25,),))
    assert (alone.median, alone.spread) == (0.25, (0.25, 0.25))


def test_break_even_is_cost_over_what_an_image_saves(result, cost):
    warm = cost(seconds=7.0, graphs=2, graphs_before=2, from_disk=0, first_steps=(0.1, 0.1))
    figures = result(0.2, 0.1, warm)  # saves 2 s an image
    assert figures.speedup == pytest.approx(2)
    assert figures.image_seconds(figures.eager) == pytest.approx(4)
    assert figures.cost_seconds == 7.0 and figures.break_even == 4
    assert result(0.2, 0.1, warm, batch=4).break_even == 14
    assert result(0.2, 0.1, warm, steps=200).break_even == 1


def test_cold_cost_is_what_the_first_steps_took_longer(result, cost):
    cold = result(0.2, 0.1, cost(5.0, 2, 0, 0, (5.6, 0.3)))
    assert cold.cost_seconds == pytest.approx(5.7)  # 5.5 and 0.2 beside two warm steps
    assert "First-step cost: 5.70 s longer than warm steps, 5.00 s of it compiling 2 graphs." in cold.table()
    warm = result(0.2, 0.1, cost(5.0, 3, 2, 0, (5.6, 0.3)))
    assert warm.cost_seconds == 5.0
    assert "Already warm when the benchmark began. Compiling took 5.00 s in this process (3 graphs" in warm.table()
    assert "cache on disk" not in cold.table()
    assert "cache on disk" in result(0.2, 0.1, cost(5.0, 2, 0, 1, (5.6, 0.3))).table()


def test_slower_is_said_plainly_and_has_no_break_even(result):
    slower = result(0.1, 0.2)
    assert (slower.verdict, slower.break_even) == ("slower", None)
    assert slower.table().startswith("Slower: 2.00x the time of uncompiled\n")
    assert "Break-even" not in slower.table() and "never pays off" in slower.table()
    assert "Slower" in slower.headline()


@pytest.mark.parametrize(
    ("eager", "compiled"),
    [
        (0.2, 0.199),  # under 1 %
        ([[0.20] * 4, [0.24] * 4, [0.21] * 4], [[0.19] * 4, [0.205] * 4, [0.18] * 4]),  # rounds overlap
        # Equal variants on a busy machine: the medians of all rounds of one are above those of the other.
        (
            [[0.1, 0.1, 0.3, 0.1], [0.1, 0.3, 0.1, 0.12], [0.11, 0.1, 0.3, 0.1]],
            [[0.1, 0.2, 0.2, 0.3], [0.2] * 4, [0.1, 0.2, 0.2, 0.3]],
        ),
    ],
)
def test_what_the_rounds_do_not_show_is_not_claimed(result, eager, compiled):
    for figures in (result(eager, compiled), result(compiled, eager)):
        assert (figures.verdict, figures.break_even) == ("no clear difference", None)
        assert figures.headline() in ("No clear difference", "Too noisy: repeat with more steps")
        assert "Break-even" not in figures.table() and "paid off" not in figures.table()


def test_the_reason_for_no_clear_difference_is_the_one_there_is(result):
    small = result(0.2, 0.199).table()
    assert small.startswith("No clear difference\n") and "differ by under 1 %" in small and "overlap" not in small
    busy = result([[2.5] * 4, [0.43] * 4, [2.6] * 4], [[0.44] * 4, [0.45] * 4, [0.43] * 4]).table()
    assert busy.startswith("Too noisy: repeat with more steps\n") and "2.50 s" in busy and "under 1 %" not in busy
    assert (
        "The steps of the two overlap (8 of 10 steps, above)" in busy
        and "430 ms - 2.60 s" in busy
        and "change the steps and run it again" in busy
    )


def test_table_names_what_was_measured_in_aligned_columns(result, engine):
    trace = engine("benchmark.figures").Trace("CUDA kernels", 1843, 612, ("out/a.json", "out/b.json"))
    limits = ["What limits this workflow", "2.61 s: matrix products"]
    lines = result(0.1752, 0.1384, trace=trace, late_graphs=1, notes=["Attention: cudnn."], limits=limits).table().splitlines()
    assert lines[0] == f"1.27x as fast, paid off by image {result(0.1752, 0.1384).break_even}"
    assert lines[1] == "Flux, 1024x1024 batch 1, 20 steps, cfg 1"
    start = lines.index("") + 1
    columns = lines[start : lines.index("", start)]
    assert len({len(line) for line in columns}) == 1
    cells = {line[:20].strip(): line[20:].split() for line in columns}
    assert cells["a step, median"] == ["175", "ms", "138", "ms"]
    assert cells["an image"] == ["3.50", "s", "2.77", "s"]
    assert cells["CUDA kernels a step"] == ["1,843", "612"]
    at = lines.index(limits[0])
    assert lines[at - 1 : at + 3] == ["", *limits, ""]
    text = "\n".join(lines)
    assert "Compiled saves 36.8 ms a step, 736 ms an image." in text
    assert "60 warm steps each in 3 alternating rounds" in text
    assert "0.0072 (uncompiled against itself: 0)" in text
    assert "1 graph was compiled while measuring" in text
    assert "Attention: cudnn." in text and "  out/a.json" in text and "  out/b.json" in text


def test_videos_are_called_so_and_nothing_compiled_too(result, cost):
    text = result(2.0, 1.0, cost(0.0, 0, 0, 0, (1.0, 1.0)), video=True).table()
    assert "a video" in text and "image" not in text.replace("latent_image", "")
    assert "Nothing was compiled" in text


def test_a_latent_that_is_not_finite_has_no_error(result):
    assert "not finite" in result(error=math.nan).table()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0000123, "0.0123 ms"),
        (0.00911, "9.11 ms"),
        (0.09996, "100 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (12.345, "12.3 s"),
        (99.97, "100 s"),
        (119.6, "2 min"),
        (185.2, "3 min 5 s"),
        (3599.7, "1 h"),
        (5400, "1 h 30 min"),
    ],
)
def test_durations_are_three_digits_in_a_unit_people_use(engine, seconds, text):
    assert engine("benchmark.figures").duration(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.174, 0.176, "174 - 176 ms"),
        (0.9, 1.1, "900 ms - 1.10 s"),
        (0.1752, 0.17521, "175 ms"),
        (61.2, 130, "61.2 s - 2 min 10 s"),
    ],
)
def test_a_range_repeats_its_unit_only_where_it_changes(engine, low, high, text):
    assert engine("benchmark.figures").between(low, high) == text


def test_relative_error(engine):
    error = engine("benchmark.figures").relative_error
    one = torch.tensor([3.0, 4.0])
    assert error(one, one) == 0.0
    assert error(one + torch.tensor([0.3, 0.4]), one) == pytest.approx(0.1)
    assert error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert error(one, torch.zeros(2)) == math.inf
    assert math.isnan(error(torch.tensor([math.nan, 1.0]), one))


def test_bars_are_as_long_as_their_values(result):
    def bars(*medians):
        lines = [line for line in result(*medians).table().splitlines() if "█" in line]
        assert [line.split()[0] for line in lines] == ["uncompiled", "compiled"]
        return [(line.count("█"), line.split("█ ")[1]) for line in lines]

    assert bars(0.2, 0.1) == [(40, "200 ms"), (20, "100 ms")]
    assert bars(0.1, 0.13) == [(31, "100 ms"), (40, "130 ms")]
    assert bars(5412.0, 0.0008) == [(40, "1 h 30 min"), (1, "0.800 ms")]


def test_the_first_line_is_in_the_users_language_and_the_rest_says_that_it_is_english(result, engine):
    words = engine("messages.words")
    with words.speaking("ja"):
        headline, note, *figures = result(0.1752, 0.1384).table().splitlines()
    assert headline.startswith("1.27 倍の速さ") and "英語" in note and any("median" in line for line in figures)
    assert "英語" not in result().table() and result().table().splitlines()[1].startswith("Flux")
