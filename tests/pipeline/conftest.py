"""One Spark session for all tests that do not need an application of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from blackbox.spark.spark_session import start_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = start_session("local[4]")
    yield session
    session.stop()
