"""The figures show the planner's own numbers, and are files that others can read."""

from itertools import combinations
from xml.etree import ElementTree

import pytest
import zoo
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from recorded import profile_of, random_policy, record

from ds_adacc import planner
from ds_adacc.cli.plots import frontier_figure, graph_figure, save, timeline_figure
from ds_adacc.cli.plots.layers import Layers
from ds_adacc.planner.peak import simulations, timeline_of

MIB = 1 << 20
MIXED = planner.Policy(("retain", "int4", None, "offload", None))


def place(profile, policy):
    call = planner.simulate(profile, policy)
    return [call.held / MIB, 1000 * call.seconds]


def by_label(artists):
    return {artist.get_label(): artist for artist in artists}


def texts(path):
    """The text elements of an SVG."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]


def chain(length):
    """A block of one value after the other, and a residual past all of them."""
    values = [planner.Value(f"v{n}", "other", MIB, n - 1 if n else None, True) for n in range(length)]
    ops = [planner.Op(f"op{n}", (n,), (n + 1,), True) for n in range(length - 2)]
    ops.append(planner.Op("residual", (length - 2, 0), (length - 1,), True))
    events = [planner.Event(f"e{n}", (n,), 0) for n in reversed(range(length))]
    graph = planner.BlockGraph(tuple(values), tuple(ops), tuple(events))
    return planner.Profile(graph, (1e-3,) * len(ops), ((),) * length)


# save


def test_a_figure_is_saved_as_png_and_svg_and_the_same_one_as_the_same_bytes(tmp_path):
    def drawn():
        figure = Figure(figsize=(2, 1))
        figure.subplots().set_title("a title & <more>")
        return figure

    paths = save(drawn(), tmp_path / "made" / "here", "name")
    assert paths == [tmp_path / "made" / "here" / "name.png", tmp_path / "made" / "here" / "name.svg"]
    assert imread(paths[0]).shape == (120, 240, 4)
    assert "a title & <more>" in texts(paths[1])
    again = save(drawn(), tmp_path / "again", "name")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


# frontier


def test_the_frontier_the_baselines_and_the_policies_are_drawn_where_the_simulator_puts_them(block_type, tmp_path):
    points = planner.frontier(block_type.profile, max_seconds=5.0)
    retained = planner.retain_policy(block_type.profile)
    baselines = {
        "retain": retained,
        "recompute": planner.recompute_policy(block_type.profile),
        "compress": planner.compress_policy(block_type.profile),
        "greedy": retained,
    }
    figure = frontier_figure(block_type, points, baselines, [retained, points[-1].policy, retained, retained])
    (axes,) = figure.axes
    (curve,) = axes.lines
    assert curve.get_drawstyle() == "steps-post"
    assert curve.get_xydata().tolist() == sorted(place(block_type.profile, point.policy) for point in points)
    drawn = by_label(axes.collections)
    assert drawn.keys() == {"retain\ngreedy", "recompute", "compress", "chosen"}
    for label in ("recompute", "compress"):
        assert drawn[label].get_offsets().tolist() == [place(block_type.profile, baselines[label])]
    assert drawn["retain\ngreedy"].get_offsets().tolist() == [place(block_type.profile, retained)]
    used = [place(block_type.profile, points[-1].policy), place(block_type.profile, retained)]
    assert drawn["chosen"].get_offsets().tolist() == used
    assert [(note.get_text(), list(note.xy)) for note in axes.texts] == [("1 block", used[0]), ("3 blocks", used[1])]
    shown = texts(save(figure, tmp_path, "frontier")[1])
    for label in ("block <1>", "frontier", "retain", "greedy", "recompute", "compress", "chosen", "3 blocks"):
        assert label in shown
    assert "MiB held by one call" in shown and "added ms of one call" in shown


# timeline


def test_the_timelines_are_the_planner_s_own(block_type, problem, tmp_path):
    plans = {
        "plan": [[planner.retain_policy(block_type.profile)] * 2 + [MIXED] * 2],
        "full checkpointing": [[planner.recompute_policy(block_type.profile)] * 4],
    }
    figure = timeline_figure(problem, plans, 30 * MIB)
    (axes,) = figure.axes
    lines = by_label(axes.lines)
    assert lines.keys() == {"plan", "full checkpointing", "budget"}
    for name, policies in plans.items():
        expected = [alive / MIB for _, alive in timeline_of(problem, simulations(problem, policies))]
        assert lines[name].get_ydata().tolist() == expected
        peak = planner.peak_bytes(problem, policies)
        # What is offloaded makes the peak in forward: it is copied to the host while the next block runs.
        assert max(expected) * MIB < peak if name == "plan" else max(expected) * MIB == peak
    assert list(lines["budget"].get_ydata()) == [30, 30]
    assert [
        (tick, label.get_text()) for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    ] == [
        (0, "4"),
        (4, "3"),
        (7, "2"),
        (10, "1"),
    ]
    shown = texts(save(figure, tmp_path, "timeline")[1])
    assert {"plan", "full checkpointing", "budget", "MiB alive"} <= set(shown)


def test_of_many_blocks_sixteen_are_named(block_type):
    many = planner.BlockType("many", block_type.profile, 100)
    problem = planner.Problem((many,), order=("many",) * 100)
    figure = timeline_figure(problem, {"plan": [[planner.retain_policy(block_type.profile)] * 100]}, MIB)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == [str(number) for number in range(100, 0, -7)] and len(labels) <= 16


def test_without_an_order_there_is_no_timeline(block_type):
    with pytest.raises(ValueError, match="order of the problem is empty"):
        timeline_figure(planner.Problem((block_type,)), {"plan": [[MIXED] * 4]}, MIB)


# graph


def test_values_are_coloured_by_choice_and_sized_by_bytes(block_type, tmp_path):
    made = ["retain", "int4", "recompute", "offload", "not needed"]
    figure = graph_figure(block_type.profile, MIXED, "xabcd", "a plan")
    (axes,) = figure.axes
    drawn, layers = by_label(axes.collections), Layers.of(block_type.profile.graph)
    for value, choice in enumerate(made):
        assert drawn[choice].get_offsets().tolist() == [list(layers.values[value])]
    sizes = {choice: drawn[choice].get_sizes().tolist() for choice in ("int4", "offload", "retain", "recompute")}
    assert sizes == {"int4": [420.0], "offload": [210.0], "retain": [52.5], "recompute": [12.0]}
    assert drawn["operator, replayed"].get_offsets().tolist() == [list(layers.ops[0])]
    assert drawn["operator"].get_offsets().tolist() == [list(place) for place in layers.ops[1:]]
    assert len({tuple(artist.get_facecolor()[0]) for artist in drawn.values()}) == 6  # replayed ones as recomputed
    assert len(axes.patches) == 9  # of what each operator reads and makes
    shown = texts(save(figure, tmp_path, "graph")[1])
    assert {"a plan", "8.00 MiB → 2.00 MiB", "4.00 MiB", "4 B", "x", "a", "b", "c", "d"} <= set(shown)
    assert {"retain", "int4", "recompute", "offload", "not needed", "operator", "operator, replayed"} <= set(shown)


def test_a_policy_that_does_not_fit_is_refused(block_type):
    with pytest.raises(ValueError, match="needs value 'x'"):
        graph_figure(block_type.profile, planner.Policy((None, None, None, "retain", None)), "xabcd", "a plan")


def test_long_names_keep_their_beginning_and_their_end():
    labels = ("self_attention.core_attention logsumexp", "y")
    figure = graph_figure(chain(2), planner.Policy(("retain",) * 2), labels, "long")
    assert figure.axes[0].texts[0].get_text() == "self_attenti\N{HORIZONTAL ELLIPSIS}n logsumexp\n1.00 MiB"


@pytest.mark.parametrize("length", [25, 100])
def test_no_two_things_of_a_block_lie_in_one_place(length, tmp_path):
    profile = chain(length)
    layers = Layers.of(profile.graph)
    assert layers.values == tuple((0, row) for row in range(length))
    assert layers.ops == tuple((0, row + 0.5) for row in range(length - 1))
    policy = planner.recompute_policy(profile)
    png, svg = save(graph_figure(profile, policy, [f"v{n}" for n in range(length)], "chain"), tmp_path, "chain")
    assert imread(png).shape[0] == round(120 * (1 + 0.45 * length))
    assert {f"v{n}" for n in range(length)} <= set(texts(svg))


def test_layers_go_down_and_columns_apart(block_type):
    layers = Layers.of(block_type.profile.graph)
    assert layers.values == ((0, 0), (0, 1), (1, 1), (0, 2), (0, 3))
    assert layers.ops == ((0, 0.5), (0, 1.5), (0, 2.5))


def test_what_no_operator_makes_stands_above_its_first_reader():
    values = (
        planner.Value("x", "block_input", 8, None, True),
        planner.Value("y", "other", 8, 0, True),
        planner.Value("mask", "other", 8, None, True),
        planner.Value("z", "other", 8, 1, True),
        planner.Value("unread", "other", 8, None, True),
    )
    ops = (
        planner.Op("first", (0,), (1,), True),
        planner.Op("second", (1, 2), (3,), True),
        planner.Op("none", (3,), (), True),
    )
    layers = Layers.of(planner.BlockGraph(values, ops, (planner.Event("e", (3,), 0),)))
    assert layers.values == ((0, 0), (0, 1), (1, 1), (0, 2), (1, 0))
    assert layers.ops == ((0, 0.5), (0, 1.5), (0, 2.5))


def test_many_codecs_have_a_colour_each():
    names = [f"codec{n:02}" for n in range(12)]
    values = tuple(planner.Value(f"v{n}", "", MIB, None, True) for n in range(12))
    offers = tuple((planner.CodecCost(name, 1, 0.0, 0.0, 0.1, 0),) for name in names)
    graph = planner.BlockGraph(values, (), (planner.Event("e", tuple(range(12)), 0),))
    figure = graph_figure(planner.Profile(graph, (), offers), planner.Policy(tuple(names)), names, "many")
    drawn = by_label(figure.axes[0].collections)
    assert sorted(drawn) == names
    assert len({tuple(artist.get_facecolor()[0]) for artist in drawn.values()}) == 12


@pytest.mark.parametrize("name", ["gpt", "llama", "eager", "bert"])
def test_no_label_of_a_block_is_crossed(name):
    """Neither by another label nor by an edge, nor does any lie outside of the figure."""
    recording = record(*zoo.example(name))
    labels = [value.label for value in recording.values]
    figure = graph_figure(profile_of(recording), random_policy(recording, 3), labels, name)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (axes,) = figure.axes
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert not any(box.overlaps(legend.get_window_extent(renderer)) for box in boxes for legend in figure.legends)
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    edges = [patch.get_path().transformed(patch.get_transform()) for patch in axes.patches]
    crossed = [
        label for label, box in zip(labels, boxes, strict=True) if any(e.intersects_bbox(box, False) for e in edges)
    ]
    assert crossed == []
