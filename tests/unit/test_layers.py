"""Imports have one direction: the table of packages in CONTRIBUTING.md is correct."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import blackbox

ROOT = Path(blackbox.__file__).parent
CONTRIBUTING = ROOT.parent / "CONTRIBUTING.md"

ONLY_IN = {
    "redis": {"index"},
    "hiredis": {"index"},
    "confluent_kafka": {"journal", "client", "demo", "embedded.kafka"},
    "pyspark": {"spark", "engine.spark", "jobs", "cli.batch", "embedded.jars"},
    "py4j": {"spark", "engine.spark", "jobs"},
    "pyarrow": {"spark", "engine.spark", "jobs"},
    "pandas": set(),
    "numpy": set(),
    "matplotlib": {"jobs.audit"},
    "jinja2": {"jobs.audit"},
    "markupsafe": {"jobs.audit"},
    "fastapi": {"api"},
    "starlette": {"api"},
    "h11": {"api"},
    "uvicorn": {"api"},
    "rich": {"cli", "demo"},
    "typer": {"cli", "demo"},
}
"""Where a library may be imported: a package of blackbox, or one module of it."""

MODULES = frozenset(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
)


def packages() -> dict[str, set[str]]:
    """The packages that CONTRIBUTING.md lists, from the bottom up, and those that each of them uses."""
    rows = re.findall(r"^\| `([\w/]+)` \|[^|]*\|([^|]*)\|$", CONTRIBUTING.read_text(), re.MULTILINE)
    return {
        package.replace("/", "."): set(re.findall(r"[a-z][\w/]+", uses)) for package, uses in rows
    }


PACKAGES = packages()


def imported(source: str) -> Iterator[str]:
    """Every module that the source imports, including imports inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their targets"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            is_package = str(node.module).partition(".")[0] == "blackbox"
            yield from (
                name
                if is_package and name.removeprefix("blackbox.") in MODULES
                else str(node.module)
                for name in full
            )


@cache
def imports_of(module: str) -> set[str]:
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return set(imported(source.read_text()))


def own_imports(module: str) -> set[str]:
    return {name for name in imports_of(module) if name.startswith("blackbox.")}


def package_of(module: str) -> str:
    """`index` for `blackbox.index.keys` as well as for `index.keys`; the innermost that is listed."""
    name = module.removeprefix("blackbox.")
    while name not in PACKAGES and "." in name:
        name = name.rpartition(".")[0]
    return name


def is_within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def test_every_module_is_in_a_package_that_is_listed() -> None:
    assert {package_of(module) for module in MODULES} == PACKAGES.keys() | {"__main__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_uses_only_its_listed_packages_and_these_are_above_it_in_the_table(
    package: str,
) -> None:
    modules = [module for module in MODULES if package_of(module) == package]
    used = {package_of(name) for module in modules for name in own_imports(module)} - {
        package,
        "blackbox",
    }
    assert {name.replace(".", "/") for name in used} == PACKAGES[package]
    order = list(PACKAGES)
    assert all(order.index(name) < order.index(package) for name in used)


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = {
        module
        for module in MODULES
        if library in {name.partition(".")[0] for name in imports_of(module)}
    }

    assert {module for module in users if not is_within(module, ONLY_IN[library])} == set()


def test_only_the_entry_point_imports_the_command_line() -> None:
    users = {m for m in sorted(MODULES) if "cli" in {package_of(name) for name in own_imports(m)}}

    assert {module for module in users if package_of(module) not in ("cli", "__main__")} == set()


def test_only_the_spark_engine_needs_spark() -> None:
    needs_none = (
        "import sys, blackbox.cli, blackbox.run, blackbox.engine.process; print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", needs_none], capture_output=True, check=True)
    assert {"pyspark", "py4j", "pyarrow", "pandas", "numpy"} & set(
        run.stdout.decode().split()
    ) == set()


def test_the_client_imports_neither_redis_nor_the_server() -> None:
    needs_kafka = "import sys, blackbox.client; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", needs_kafka], capture_output=True, check=True)
    others = {"redis", "hiredis", "fastapi", "apscheduler", "typer", "rich", "pyspark", "py4j"}
    assert others & set(run.stdout.decode().split()) == set()


TASKS = [module for module in sorted(MODULES) if module.endswith(("task", "tasks"))]


@pytest.mark.parametrize("module", TASKS)
def test_a_spark_task_imports_nothing_of_its_driver(module: str) -> None:
    of_spark = {name for name in imports_of(module) if name.partition(".")[0] == "pyspark"}
    assert of_spark <= {"pyspark"}, "a task uses only its own context of Spark, and no session"
    ours = {name.removeprefix("blackbox.") for name in own_imports(module)}
    needed = {name for other in ours - {*TASKS} for name in imports_of(other)}
    assert not [name for name in needed if name.startswith("pyspark.sql")]


def test_the_checked_modules_exist() -> None:
    assert len(TASKS) >= 6
    assert imports_of("index.connection") >= {"redis", "hiredis"}
    assert "confluent_kafka" in imports_of("journal.shard_writer")


def test_imports_are_found_in_every_scope() -> None:
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
