"""Location and version of Java."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from blackbox.embedded.guarded_process import EmbeddedError, version_output

MINIMUM_JAVA = 17


def find_java() -> str:
    """The path of a Java of version 17 or newer: from JAVA_HOME if set, else from PATH."""
    java = _locate()
    # Java 8 calls itself 1.8.
    found = re.search(r'version "(?:1\.)?(\d+)', version_output(java, "-version"))
    version = int(found.group(1)) if found else 0
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
