"""How Spark is started on this machine."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.service


def test_who_connects_to_spark_on_this_machine_must_know_its_secret(spark: SparkSession) -> None:
    settings = dict(spark.sparkContext.getConf().getAll())

    assert settings["spark.authenticate"] == "true"
    assert settings["spark.driver.host"] == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None
