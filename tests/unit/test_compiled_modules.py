"""PySpark's zip file: Python does not compile its modules at each start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from blackbox.spark.compiled_modules import make


def test_modules_are_imported_as_they_were_compiled(tmp_path: Path) -> None:
    path = tmp_path / "modules.zip"
    with ZipFile(path, "w") as made:
        made.writestr("package/__init__.py", "")
        made.writestr("package/module.py", "def fail():\n    raise ValueError('as written')\n")
        made.writestr("package/invalid.py", "print 'of Python 2'\n")

    make(path)
    make(path)

    code = "import package.module as m; print(m.__file__); m.fail()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == f"{path}/package/module.pyc"
    assert f'File "{path}/package/module.py", line 2, in fail' in done.stderr
    assert sorted(ZipFile(path).namelist()) == [
        "package/__init__.py", "package/__init__.pyc", "package/invalid.py", "package/module.py",
        "package/module.pyc",
    ]  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == ["modules.zip"]
