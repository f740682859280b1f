"""Small networks and clusters."""

from itertools import pairwise

from hypothesis import strategies as st

from hetctl.methods.pipeline.stage_costs import Layer, LayerProfile, Links, PipelineCluster

LINKS = Links(intra_bytes_per_s=100.0, intra_scaling=0.5, inter_latency_s=0.1, inter_s_per_byte=0.1)
PLENTY = 10**9
TYPES = ("A", "B", "C")


def profile(*seconds, activation=10, parameters=10):
    """Layers that take so long in both passes on an A, twice as long on a B, thrice on a C."""
    return LayerProfile(
        tuple(
            Layer(
                f"l{number}",
                {name: factor * time / 3 for factor, name in enumerate(TYPES, start=1)},
                {name: factor * time * 2 / 3 for factor, name in enumerate(TYPES, start=1)},
                activation,
                parameters,
            )
            for number, time in enumerate(seconds)
        )
    )


def cluster(*nodes, memory=PLENTY, links=LINKS):
    """Nodes such as "AAB"."""
    return PipelineCluster(tuple(map(tuple, nodes)), dict.fromkeys(TYPES, memory), links)


@st.composite
def profiles(draw, most=6):
    sizes = st.integers(0, 30)
    times = st.floats(0.01, 3.0)
    return LayerProfile(
        tuple(
            Layer(
                f"l{number}",
                {name: draw(times) for name in TYPES},
                {name: draw(times) for name in TYPES},
                draw(sizes),
                draw(sizes),
                draw(st.none() | sizes),
                draw(sizes),
            )
            for number in range(draw(st.integers(1, most)))
        )
    )


@st.composite
def clusters(draw, most_gpus=4):
    gpus = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=most_gpus))
    places = [draw(st.integers(0, 2)) for _ in gpus]
    nodes = [tuple(t for t, p in zip(gpus, places, strict=True) if p == place) for place in set(places)]
    memory = {name: draw(st.integers(50, 500) | st.just(PLENTY)) for name in TYPES}
    context = {name: draw(st.integers(0, 20)) for name in draw(st.sets(st.sampled_from(TYPES)))}
    return PipelineCluster(tuple(nodes), memory, LINKS, context)


def is_whole(stages, layers):
    """Whether the stages hold all layers, each once and in order."""
    ends = [(stage.first, stage.last) for stage in stages]
    return (
        ends[0][0] == 0
        and ends[-1][1] == len(layers.layers) - 1
        and all(first <= last for first, last in ends)
        and all(a[1] + 1 == b[0] for a, b in pairwise(ends))
    )
