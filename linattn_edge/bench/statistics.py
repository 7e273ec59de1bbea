"""What is kept of a contestant's samples. All of them count: nothing is trimmed."""

from collections.abc import Iterable, Mapping

import numpy as np

PERCENTILES = {"p10": 10, "p50": 50, "p90": 90, "p99": 99, "p999": 99.9}
NEEDED = {"p90": 10, "p99": 100, "p999": 1000}  # samples, so that one lies beyond
BLOCKS = 5  # that a measurement is cut into to see how well it repeats


def summary(samples: Iterable[float]) -> dict[str, float]:
    """The least, percentiles, the largest, the mean, how many, and the noise of the least.

    A percentile beyond which not one whole sample lies is left out: p99 of 50 samples would be their largest.
    noise: the samples, in the order in which they were taken, are cut into blocks; how far the blocks' minima lie
    apart, relative to the least. It says how well a measurement of a fifth of the length repeats.
    """
    values = np.asarray(list(samples), np.float64)
    found = {"min": float(values.min())}
    for name, percent in PERCENTILES.items():
        if values.size >= NEEDED.get(name, 1):
            found[name] = float(np.percentile(values, percent))
    minima = [block.min() for block in np.array_split(values, min(BLOCKS, values.size))]
    found |= {"max": float(values.max()), "mean": float(values.mean()), "samples": values.size}
    found["noise"] = float(max(minima) / min(minima) - 1) if min(minima) > 0 else 0.0
    return found


def ratio(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """a over b, of minima and of tenth percentiles."""
    return {name: a[name] / b[name] for name in ("min", "p10")}


def histogram(samples: Iterable[float], bins: int = 160) -> list[list[float]]:
    """[from, to, how many], bins of equal ratio from the least to the largest; empty ones are left out."""
    values = np.asarray(list(samples), np.float64)
    low, high = values.min(), values.max()
    edges = np.geomspace(low, high if high > low else low * 1.01, bins + 1)
    edges[[0, -1]] = low, max(high, edges[-1])  # rounding must not drop the ends
    counts, _ = np.histogram(values, edges)
    return [[float(edges[i]), float(edges[i + 1]), int(n)] for i, n in enumerate(counts) if n]
