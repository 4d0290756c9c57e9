"""How Spark is started on this machine."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.service


def test_local_spark_requires_authentication(spark: SparkSession) -> None:
    settings = dict(spark.sparkContext.getConf().getAll())

    assert settings["spark.authenticate"] == "true"
    assert settings["spark.driver.host"] == "127.0.0.1"
    assert spark.sparkContext.uiWebUrl is None
