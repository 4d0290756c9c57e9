"""The bugs that are put into the product, by the package that each of them changes first."""

from __future__ import annotations

from tests.mutations.bugs import (
    admin,
    api,
    cli,
    client,
    core,
    embedded,
    engine,
    formats,
    index,
    jobs,
    journal,
    rebind,
    records,
    rules,
    spark,
)
from tests.mutations.bugs.bug import Bug, Change

__all__ = ["BUGS", "Bug", "Change"]

PACKAGES = (
    records,
    formats,
    rules,
    index,
    core,
    journal,
    rebind,
    engine,
    spark,
    jobs,
    api,
    admin,
    cli,
    client,
    embedded,
)
BUGS: tuple[Bug, ...] = tuple(bug for package in PACKAGES for bug in package.BUGS)
