"""Access to a folder on any file system that Hadoop supports, through the Spark session's JVM."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from blackbox.spark.job_failures import LedgerError


class FoundFile(NamedTuple):
    """A file or a folder; `path` is relative to the root."""

    path: str
    is_folder: bool
    bytes: int


class Files:
    """Files by their path below one root.

    Every method raises LedgerError when the file system does not answer or refuses; the text has the
    path and the file system's message.

    A root without a scheme is on the default file system: this machine's, unless Hadoop is
    configured otherwise.
    """

    def __init__(self, session: SparkSession, root: str) -> None:
        jvm: Any = session.sparkContext._jvm
        self._jvm = jvm
        self._gateway: Any = session.sparkContext._gateway
        self._hadoop: Any = session.sparkContext._jsc.hadoopConfiguration()
        with _explained(root):
            path = jvm.org.apache.hadoop.fs.Path(root)
            self._system = path.getFileSystem(self._hadoop)
            self._root = self._system.makeQualified(path)
        self.root = str(self._root.toString()).rstrip("/")
        self._is_local = self._root.toUri().getScheme() == "file"

    def uri(self, path: str) -> str:
        """The full path, as Spark takes it."""
        return f"{self.root}/{path}"

    def listed(self, folder: str) -> list[FoundFile]:
        """The contents of a folder, ordered by name; nothing if the folder is missing."""
        with _explained(self.uri(folder)):
            try:
                found = [self._found(one) for one in self._system.listStatus(self._at(folder))]
            except Py4JJavaError as error:
                if _is(error, "FileNotFoundException"):
                    return []
                raise
        return sorted(found)

    def walk(self, folder: str) -> Iterator[FoundFile]:
        """Every file below a folder, without names that start with `.` or `_`."""
        for found in self.listed(folder):
            name = found.path.rpartition("/")[2]
            if name.startswith((".", "_")):
                continue
            if found.is_folder:
                yield from self.walk(found.path)
            else:
                yield found

    def read(self, path: str) -> bytes:
        with _explained(self.uri(path)), closing(self._system.open(self._at(path))) as stream:
            return bytes(stream.readAllBytes())

    def publish(self, path: str, content: bytes) -> bool:
        """Write a file atomically; returns False, and changes nothing, when it exists."""
        folder, _, name = path.rpartition("/")
        # Readers skip names that begin with a dot.
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}"
        with _explained(self.uri(path)):
            with closing(self._system.create(self._at(temporary), False)) as stream:
                stream.write(content)
            try:
                return self._moved(temporary, path)
            finally:
                self.delete(temporary)

    def delete(self, path: str) -> None:
        """Delete a file, or a folder with its contents; a missing path is not an error."""
        with _explained(self.uri(path)):
            self._system.delete(self._at(path), True)

    def _moved(self, source: str, target: str) -> bool:
        if self._is_local:
            # Hadoop's local rename checks first and then moves; creating a link is atomic.
            try:
                os.link(self._local(source), self._local(target))
            except FileExistsError:
                return False
            except OSError:  # the file system has no hard links
                pass
            else:
                return True
        # NONE: the rename fails if the target exists.
        never_over = getattr(self._jvm.org.apache.hadoop.fs, "Options$Rename")
        options = self._gateway.new_array(never_over, 1)
        options[0] = never_over.NONE
        at = self._at(target)
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(
            at.toUri(), self._hadoop
        )
        try:
            context.rename(self._at(source), at, options)
        except Py4JJavaError as error:
            # A run that published the same file may have removed this one's temporary file.
            if _is(error, "FileAlreadyExistsException") or _is(error, "FileNotFoundException"):
                return False
            raise
        return True

    def _local(self, path: str) -> Path:
        return Path(self._at(path).toUri().getPath())

    def _at(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path)

    def _found(self, status: Any) -> FoundFile:
        uri = str(status.getPath().toString())
        return FoundFile(
            uri[len(self.root) + 1 :], bool(status.isDirectory()), int(status.getLen())
        )


def _is(error: Py4JJavaError, name: str) -> bool:
    return str(error.java_exception.getClass().getSimpleName()) == name


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except Py4JJavaError as error:
        raise LedgerError(f"{path}: {error.java_exception.toString()}") from None
