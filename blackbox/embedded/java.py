"""Location and version of Java."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from blackbox.embedded.errors import EmbeddedError
from blackbox.embedded.process import said_of_itself

MINIMUM_JAVA = 17


def find_java() -> str:
    """The path of a Java of version 17 or newer: from JAVA_HOME if set, else from PATH."""
    java = _locate()
    version = java_version(java)
    if version < MINIMUM_JAVA:
        raise EmbeddedError(
            f"Java {MINIMUM_JAVA} or newer is needed, but {java} is version {version or 'unknown'};"
            f" install a newer one and put it on PATH, or set JAVA_HOME to it"
        )
    return java


def _locate() -> str:
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not os.access(java, os.X_OK):
            raise EmbeddedError(
                f"JAVA_HOME is {home}, but there is no {java};"
                f" set it to a Java {MINIMUM_JAVA} or newer, or unset it"
            )
        return str(java)
    found = shutil.which("java")
    if found is None:
        raise EmbeddedError(
            f"Java {MINIMUM_JAVA} or newer is needed for the embedded Kafka, but there is no java"
            " on PATH and JAVA_HOME is not set; install one"
        )
    return found


def java_version(java: str) -> int:
    """The feature version (8, 11, 17, …) of this executable; 0 if it is unknown."""
    match = re.search(r'version "(?:1\.)?(\d+)', said_of_itself(java, "-version"))
    return int(match.group(1)) if match else 0
