"""Profiles small enough to write by hand, and a process that saves many."""

from ds_adacc import planner
from ds_adacc.profile.cache import ProfileCache


def profile(seconds=0.25):
    values = (planner.Value("x", "block_input", 64, None, True), planner.Value("y", "gelu", 128, 0, True))
    graph = planner.BlockGraph(values, (planner.Op("gelu", (0,), (1,), True),), (planner.Event("end", (0, 1), 256),))
    offers = ((), (planner.CodecCost("outlier", 40, 1e-3, 0.1 + 0.2, 0.01, 16),))
    return planner.Profile(graph, (seconds,), offers)


def save_many(path, number, barrier):
    cache = ProfileCache(path)
    barrier.wait()
    for index in range(50):
        cache.save(f"{number}-{index}", profile(index))
        cache.save("both", profile(index))
