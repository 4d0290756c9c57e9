"""The `.properties` files of operators, for librdkafka and for Spark."""

from __future__ import annotations

from pathlib import Path

import javaproperties

from blackbox.config.settings_error import SettingsError

SPARK_SECRET = "spark.authenticate.secret"


def properties(variable: str, path: Path | None) -> dict[str, str]:
    """The settings in the file that this variable names; none without a file. Raises SettingsError."""
    if path is None:
        return {}
    try:
        with path.open() as file:
            return dict(javaproperties.load(file))
    except OSError as error:
        why = error.strerror
    except ValueError:
        # The cause may quote a piece of a password.
        why = r"not UTF-8, or a \u without four hex digits"
    raise SettingsError(f"{variable}={path}: {why}; wanted: a readable .properties file")


def spark_properties(variable: str, path: Path | None) -> dict[str, str]:
    """The same, for Spark's settings except its master."""
    found = properties(variable, path)
    if SPARK_SECRET in found:
        raise SettingsError(
            f"{variable}={path}: sets {SPARK_SECRET}, which would be in the process list; wanted: it "
            "in spark-defaults.conf, in the directory that SPARK_CONF_DIR names"
        )
    for name in found:
        if name == "spark.master" or not name.startswith("spark."):
            raise SettingsError(
                f"{variable}={path}: sets {name}; wanted: names that start with 'spark.'; the "
                "master is BLACKBOX_SPARK_MASTER"
            )
    return found
