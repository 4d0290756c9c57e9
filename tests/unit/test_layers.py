"""Imports point one way: what is asked ← what happens to it ← who calls ← how people reach it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import blackbox

ROOT = Path(blackbox.__file__).parent
PURE = {
    "request", "cancel", "cold", "recurrence", "formats", "entry", "plan", "receipt", "outgoing", "limits", "doubt", "clock",
    "ended", "outcomes", "parking",
}  # fmt: skip
VERBS = {
    "intake",
    "dispatch",
    "sorting",
    "endings",
    "recovery",
    "settling",
    "barrier",
    "marks",
    "ports",
    "promotion",
    "fate",
}

MAY_IMPORT = {
    **dict.fromkeys(PURE, PURE),
    "ended": PURE | {"index"},
    **dict.fromkeys(VERBS, PURE | VERBS | {"rules"}),
    "rules": PURE | {"rules"},
    "index": PURE | {"index"},
    "journal": PURE | {"journal"},
    "embedded": {"embedded"},
}
"""The parts of blackbox that a part may use; parts that are not named here may use any but `cli`."""

ONLY_IN = {
    "redis": {"index"},
    "hiredis": {"index"},
    "confluent_kafka": {"journal", "client", "demo", "embedded.kafka"},
    "pyspark": {"pipeline", "cli.batch", "embedded.jars"},
    "py4j": {"pipeline"},
    "pyarrow": {"pipeline"},
    "pandas": set(),
    "numpy": set(),
    "matplotlib": {"pipeline.audit"},
    "jinja2": {"pipeline.audit"},
    "markupsafe": {"pipeline.audit"},
    "fastapi": {"api"},
    "starlette": {"api"},
    "h11": {"api"},
    "uvicorn": {"api"},
    "rich": {"cli", "demo"},
    "typer": {"cli", "demo"},
}
"""Where a library may be imported: a part of blackbox, or one module of it."""

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
)


def imported(source: str) -> Iterator[str]:
    """Every module that the source imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where they point"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "blackbox" else [str(node.module)]


def imports_of(module: str) -> set[str]:
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return set(imported(source.read_text()))


def own_imports(module: str) -> set[str]:
    return {name for name in imports_of(module) if name.startswith("blackbox.")}


def part_of(module: str) -> str:
    """`index` for `blackbox.index.keys` as well as for `index.keys`."""
    return module.removeprefix("blackbox.").partition(".")[0]


def is_within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) in MAY_IMPORT])
def test_a_module_uses_only_the_layers_below_it(module: str) -> None:
    assert {part_of(name) for name in own_imports(module)} <= MAY_IMPORT[part_of(module)]


def test_of_the_index_what_is_pure_uses_only_its_bits() -> None:
    assert own_imports("ended") == {"blackbox.core.bits"}
    assert own_imports("index.bits") == set()


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = {
        module
        for module in MODULES
        if library in {name.partition(".")[0] for name in imports_of(module)}
    }

    assert {module for module in users if not is_within(module, ONLY_IN[library])} == set()


def test_nothing_imports_the_command_line_but_its_entry_point() -> None:
    users = {m for m in MODULES if "cli" in {part_of(name) for name in own_imports(m)}}

    assert {module for module in users if part_of(module) not in ("cli", "__main__")} == set()


def test_only_the_spark_engine_needs_spark() -> None:
    needs_none = (
        "import sys, blackbox.cli, blackbox.run, blackbox.engine.process; print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", needs_none], capture_output=True, check=True)
    assert {"pyspark", "py4j", "pyarrow", "pandas", "numpy"} & set(
        run.stdout.decode().split()
    ) == set()


def test_a_caller_needs_neither_redis_nor_a_server() -> None:
    needs_kafka = "import sys, blackbox.client; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", needs_kafka], capture_output=True, check=True)
    others = {"redis", "hiredis", "fastapi", "apscheduler", "typer", "rich", "pyspark", "py4j"}
    assert others & set(run.stdout.decode().split()) == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("pipeline.tasks.")])
def test_a_task_uses_nothing_of_its_driver(module: str) -> None:
    ours = {name for name in own_imports(module) if part_of(name) == "pipeline"}

    assert {name for name in ours if not name.startswith("blackbox.spark.tasks")} == set()
    of_spark = {name for name in imports_of(module) if name.partition(".")[0] == "pyspark"}
    assert of_spark <= {"pyspark"}, "of Spark a task knows its own context, and no session"


def test_the_named_parts_exist() -> None:
    assert {part_of(module) for module in MODULES} >= MAY_IMPORT.keys()
    assert imports_of("index.connection") >= {"redis", "hiredis"}
    assert "confluent_kafka" in imports_of("journal.writer")


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import redis.client as r
from blackbox.records import entry as entries
if True:
    def late():
        from blackbox.index.keys import Keys
        import rich, typer
"""
    assert set(imported(source)) == {
        "redis.client", "blackbox.records.entry", "blackbox.index.keys", "rich", "typer",
    }  # fmt: skip
