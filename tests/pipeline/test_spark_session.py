"""How Spark is started on this machine."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from blackbox.config.settings import Half
from blackbox.engine.spark.driver import slots_for

pytestmark = pytest.mark.service


def test_local_spark_requires_authentication(spark: SparkSession) -> None:
    settings = dict(spark.sparkContext.getConf().getAll())

    assert settings["spark.authenticate"] == "true"
    assert settings["spark.driver.host"] == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None


@pytest.mark.parametrize(
    ("only", "intake", "dispatch"), [(None, 3, 2), ("intake", 5, 0), ("dispatch", 0, 5)]
)
def test_one_half_alone_gets_all_slots(only: Half | None, intake: int, dispatch: int) -> None:
    assert slots_for("intake", 5, only) == intake
    assert slots_for("dispatch", 5, only) == dispatch
