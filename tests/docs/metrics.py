"""The metrics: the content of the registry of `Metrics`, with the labels of its tables."""

from __future__ import annotations

from blackbox.engine.metrics import COUNTERS, GAUGES, Metrics
from tests.docs.markdown import code, codes, table

LABELS = {f"blackbox_{name}": labels for name, (_, *labels) in (COUNTERS | GAUGES).items()}


def table_of_metrics() -> str:
    """Every metric: its name as it is queried, type, labels, unit and help text."""
    rows = []
    for family in Metrics().registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = codes(LABELS.get(family.name, ()))
        meaning = family.documentation
        rows.append((code(name), family.type, labels, _unit(name, meaning), meaning))
    return table(("metric", "type", "labels", "unit", "meaning"), sorted(rows))


def table_of_buckets() -> str:
    """The upper bounds of each histogram."""
    rows = []
    for family in Metrics().registry.collect():
        bounds = [one.labels["le"] for one in family.samples if "le" in one.labels]
        if bounds:
            shown = ", ".join(f"{float(bound):g}" for bound in bounds[:-1])
            rows.append((code(f"{family.name}_bucket"), shown))
    return table(("histogram", "bounds, s"), sorted(rows))


def _unit(name: str, meaning: str) -> str:
    """By Prometheus' naming rules; the text of a switch says when it is 0 or 1."""
    if name.endswith("_seconds"):
        return "s"
    if name.endswith("_position"):
        return "offset"
    words = meaning.removeprefix("Spark engine: ").split()
    return "0 or 1" if words[:2] in (["0", "while"], ["1", "while"]) else "count"
