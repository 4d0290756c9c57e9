"""A soak's verdict names lost, duplicated, early and late messages and growth, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.soak.monitor import EVERY_S, ROUND_S, Life, Sample
from tests.soak.report import LATEST, Fault, Soak

COUNT = 10_000
SECONDS = 1800
ROUND = int(ROUND_S / EVERY_S)


def soak() -> Soak:
    """A clean soak: each request is 10 ms late, those during a fault in the middle 5 s."""
    due_ms = np.linspace(1, SECONDS * 1000, COUNT).astype(np.int64)
    late_ms = np.where(abs(due_ms - 900_000) < 5000, 5000, 10)
    return Soak(
        engine="process",
        cores=2,
        capacity=20,
        per_s=10,
        seconds=SECONDS,
        began_ms=0,
        faults=[Fault("Kafka frozen", 894, 906)],
        due_ms=due_ms,
        delivered_ms=due_ms + late_ms,
        times=np.ones(COUNT, np.uint8),
        partitions=(np.arange(COUNT) % 4).astype(np.uint8),
        lives=[Life("service", 7, [Sample(at_s, 80, 40) for at_s in range(5, SECONDS, 5)])],
    )


def test_a_clean_soak_has_no_complaints_and_a_page_with_its_plot(tmp_path: Path) -> None:
    clean = soak()
    assert clean.complaints() == []
    docs = tmp_path / "docs"
    clean.write(docs)
    assert "Lost 0, delivered twice 0, early 0" in (docs / "soak.md").read_text()
    assert "outside of faults | 10 ms | 10 ms | 10 ms" in (docs / "soak.md").read_text()
    assert (docs / "soak.svg").stat().st_size > 10_000


def test_lost_duplicated_and_early_deliveries_are_complaints() -> None:
    broken = soak()
    broken.times[1], broken.times[2] = 0, 2
    broken.delivered_ms[3] = broken.due_ms[3] - 1
    assert broken.complaints() == ["1 lost", "1 delivered twice", "1 early"]


def test_lateness_counts_outside_of_faults_only() -> None:
    broken = soak()
    broken.delivered_ms[: COUNT // 50] += 2000
    assert broken.complaints() == ["outside of faults p99 is 2,010 ms late"]


@pytest.mark.parametrize(
    ("grown", "complaint"),
    [
        ((80 * 1.06, 40), "service: memory changed by +6.0% after the warm-up"),
        ((80, 44), "service: descriptors changed by +10.0% after the warm-up"),
    ],
)
def test_growth_after_the_warm_up_is_a_complaint(grown: tuple[float, int], complaint: str) -> None:
    broken = soak()
    samples = broken.lives[0].samples
    samples[-ROUND:] = [Sample(one.at_s, *grown) for one in samples[-ROUND:]]
    assert broken.complaints() == [complaint]


def test_fewer_file_descriptors_are_no_complaint() -> None:
    one = soak()
    samples = one.lives[0].samples
    samples[-ROUND:] = [sample._replace(descriptors=30) for sample in samples[-ROUND:]]
    assert one.complaints() == []


def test_the_latest_requests_are_in_the_figures(tmp_path: Path) -> None:
    one = soak()
    one.delivered_ms[4000] = one.due_ms[4000] + 60_000
    one.write(tmp_path)
    [latest, *others] = json.loads((tmp_path / "soak.json").read_text())["latest"]
    assert latest["request"] == 4000
    assert latest["delivered_s"] - latest["due_s"] == pytest.approx(60, abs=0.1)
    assert len(others) == LATEST - 1


def test_the_page_names_the_fault_before_the_latest_requests(tmp_path: Path) -> None:
    one = soak()
    late = COUNT // 2 + 120  # in partition 0
    one.delivered_ms[late] = one.due_ms[late] + 60_000
    assert one.latest_of_each()[0] == pytest.approx((60.0, "Kafka frozen", 0, 27.7), abs=0.1)
    one.write(tmp_path)
    assert "| 60.0 s | Kafka frozen | 0 | +27.7 s |" in (tmp_path / "soak.md").read_text()


def test_growth_during_a_fault_is_no_complaint() -> None:
    one = soak()
    samples = one.lives[0].samples
    samples[-12:] = [Sample(sample.at_s, 160, 90) for sample in samples[-12:]]
    assert one.complaints() == []


def test_growth_during_the_warm_up_is_no_complaint() -> None:
    samples = soak().lives[0].samples
    life = Life("service", 7, [one._replace(memory_mb=min(80, one.at_s)) for one in samples])
    assert life.drift(lambda one: one.memory_mb) == 0
