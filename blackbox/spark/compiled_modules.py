"""`python -m blackbox.spark.compiled_modules`: compiles the modules in PySpark's zip file.

Spark's JVM starts Python with `pyspark.zip` first on its path. It holds no compiled modules, and Python cannot add them:
each process would compile for more than a second, on a busy machine for so long that Spark gives it up.
"""

from __future__ import annotations

import os
import shutil
from compileall import compile_dir
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory
from warnings import catch_warnings
from zipfile import ZipFile

import pyspark

ZIP = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"


def make(path: Path = ZIP) -> None:
    """Add the compiled form of each module that has none. A Python of another version ignores it."""
    with TemporaryDirectory(dir=path.parent, prefix="compiled-") as scratch:
        folder, whole = Path(scratch, "modules"), Path(scratch, path.name)
        with ZipFile(path) as old:
            old.extractall(folder)
        # Unchecked: the time of a module in the zip is not that of its copy here.
        with catch_warnings(action="ignore", category=SyntaxWarning):
            compile_dir(
                folder, maxlevels=20, quiet=2, legacy=True,
                stripdir=str(folder), prependdir=str(path),
                invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
            )  # fmt: skip
        # What was there keeps its place: processes that run now have read the directory.
        shutil.copyfile(path, whole)
        with ZipFile(whole, "a") as new:
            there = set(new.namelist())
            for compiled in sorted(folder.rglob("*.pyc")):
                name = compiled.relative_to(folder).as_posix()
                if name not in there:
                    new.write(compiled, name)
        with whole.open("rb") as written:
            os.fsync(written.fileno())
        shutil.copymode(path, whole)
        whole.replace(path)


if __name__ == "__main__":
    make()
