from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import SecretStr

from blackbox.settings import FORMATS, Settings, SettingsError, load

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "blackbox"
PAGE = (ROOT / "docs" / "deploying.md").read_text()
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = yaml.safe_load((CHART / "values.schema.json").read_text())
SETTINGS: dict[str, dict[str, Any]] = Settings.model_json_schema()["properties"]
REQUIRED = CHART / "ci" / "required-values.yaml"
EVERY_OPTION = CHART / "ci" / "every-option-values.yaml"

# Where a pod cannot use the default of a laptop.
OTHER_DEFAULTS = {
    "kafka_bootstrap_servers": "",
    "kafka_config": "",
    "redis_url": "",
    "http_host": "0.0.0.0",
}
# What the schema says beside or instead of the settings' own rule.
OTHER_RULES: dict[str, dict[str, Any]] = {
    "kafka_bootstrap_servers": {"minLength": None},
    "redis_url": {"pattern": "^((redis|rediss|unix)://.*)?$"},
    "request_topics": {"pattern": SCHEMA["properties"]["config"]["properties"]["requestTopics"]["pattern"]},
    "dead_letter_topic": {"pattern": "^[A-Za-z0-9._-]{1,249}$"},
    "http_host": {"enum": ["0.0.0.0", "::"]},
    "http_port": {"minimum": 1},
}  # fmt: skip

Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm() -> Helm:
    binary = shutil.which("helm") or shutil.which("helm", path=_go_binaries())
    if binary is None:
        reason = "no helm on PATH or in Go's bin; go install helm.sh/helm/v3/cmd/helm@v3.22.0"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [binary, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    return run


def _go_binaries() -> str:
    go = shutil.which("go")
    asked = [go, "env", "GOBIN", "GOPATH"] if go else ["echo"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    return os.pathsep.join([*answer, *(f"{folder}/bin" for folder in answer)])


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def render(helm: Helm, *arguments: str | Path) -> dict[str, dict[str, Any]]:
    """The rendered documents by kind; there is one of each."""
    done = helm("template", "blackbox", CHART, *arguments)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def pod_of(documents: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = documents["Deployment"]["spec"]["template"]["spec"]
    return pod


def test_every_setting_is_a_value_with_its_default() -> None:
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    expected = {camel(name): default for name, default in (defaults | OTHER_DEFAULTS).items()}
    assert VALUES["config"] == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_the_schema_has_the_rules_of_the_setting(name: str) -> None:
    rules = ("type", "minimum", "maximum", "pattern", "enum", "minLength")
    own = {"type": "string", **SETTINGS[name]}
    if "const" in own:
        own["enum"] = [own["const"]]
    expected = {rule: own[rule] for rule in rules if rule in own} | OTHER_RULES.get(name, {})
    written = SCHEMA["properties"]["config"]["properties"][camel(name)]
    assert {rule: written.get(rule) for rule in rules} == {
        rule: expected.get(rule) for rule in rules
    }


def test_the_schema_knows_no_other_settings_and_demands_each() -> None:
    config = SCHEMA["properties"]["config"]
    assert set(config["properties"]) == set(config["required"]) == set(map(camel, SETTINGS))
    assert config["additionalProperties"] is SCHEMA["additionalProperties"] is False


def test_the_schema_knows_every_format() -> None:
    pattern = SCHEMA["properties"]["config"]["properties"]["requestTopics"]["pattern"]
    for contract in FORMATS:
        assert re.search(pattern, f"TB:{contract},other:{contract}")


@pytest.mark.parametrize("values", [None, REQUIRED, EVERY_OPTION])
def test_lint_finds_nothing(helm: Helm, values: Path | None) -> None:
    done = helm("lint", "--strict", CHART, *(["--values", values] if values else []))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", [REQUIRED, EVERY_OPTION])
@pytest.mark.parametrize("kubernetes", ["1.25", "1.31", "1.37"])
def test_every_document_is_valid_for_kubernetes(helm: Helm, values: Path, kubernetes: str) -> None:
    documents = render(helm, "--values", values)
    for document in documents.values():
        assert kubernetes_validate.validate(document, kubernetes, strict=True) == kubernetes


def test_the_rendered_variables_are_the_settings(
    helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = render(helm, "--values", REQUIRED)["ConfigMap"]["data"]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert load() == Settings(
        kafka_bootstrap_servers="kafka:9092",
        redis_url=SecretStr("redis://redis:6379/0"),
        http_host="0.0.0.0",
    )


def test_every_setting_reaches_the_pod(helm: Helm) -> None:
    documents = render(helm, "--values", EVERY_OPTION)
    [container] = pod_of(documents)["containers"]
    variables = {*documents["ConfigMap"]["data"], *(each["name"] for each in container["env"])}
    assert variables == {f"BLACKBOX_{name.upper()}" for name in Settings.model_fields}
    assert documents["ConfigMap"]["data"]["BLACKBOX_POLL_INTERVAL_MS"] == "250"
    assert documents["ConfigMap"]["data"]["BLACKBOX_BATCH_LIMIT"] == "5000"


def test_secrets_come_by_reference(helm: Helm) -> None:
    documents = render(helm, "--values", EVERY_OPTION)
    pod = pod_of(documents)
    [container] = pod["containers"]
    reference = {"secretKeyRef": {"name": "blackbox-redis", "key": "url"}}
    assert container["env"] == [{"name": "BLACKBOX_REDIS_URL", "valueFrom": reference}]
    assert "BLACKBOX_REDIS_URL" not in documents["ConfigMap"]["data"]
    assert {"name": "kafka-config", "secret": {"secretName": "blackbox-kafka"}} in pod["volumes"]
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "kafka-config"]
    assert mount["readOnly"]
    path = documents["ConfigMap"]["data"]["BLACKBOX_KAFKA_CONFIG"]
    assert path == f"{mount['mountPath']}/client.properties"
    assert "Secret" not in documents


def test_the_pod_has_no_rights_it_does_not_need(helm: Helm) -> None:
    documents = render(helm, "--values", REQUIRED)
    pod = pod_of(documents)
    [container] = pod["containers"]
    assert documents["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_service_named_like_the_prefix_sets_no_variables(helm: Helm) -> None:
    assert pod_of(render(helm, "--values", REQUIRED))["enableServiceLinks"] is False


@pytest.mark.parametrize("values", [REQUIRED, EVERY_OPTION])
def test_probes_and_service_reach_the_port_that_is_served(helm: Helm, values: Path) -> None:
    documents = render(helm, "--values", values)
    [container] = pod_of(documents)["containers"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == documents["ConfigMap"]["data"]["BLACKBOX_HTTP_PORT"]
    assert documents["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    for probe, path in {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}.items():
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": port["name"]}


def test_the_service_and_the_budget_select_the_pods(helm: Helm) -> None:
    documents = render(helm, "--values", EVERY_OPTION)
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    wanted = documents["Deployment"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= labels.items()
    assert documents["Service"]["spec"]["selector"] == wanted
    assert documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == wanted


def test_one_replica_has_no_disruption_budget(helm: Helm) -> None:
    assert "PodDisruptionBudget" not in render(helm, "--values", REQUIRED)


def test_a_changed_setting_replaces_the_pods(helm: Helm) -> None:
    def checksum(*arguments: str) -> str:
        documents = render(helm, "--values", REQUIRED, *arguments)
        annotations = documents["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/config"])

    assert checksum() == checksum("--set", "replicas=2")
    assert checksum() != checksum("--set", "config.batchLimit=999")


def out_of_range() -> list[tuple[str, object]]:
    below = [(name, rule["minimum"] - 1) for name, rule in SETTINGS.items() if "minimum" in rule]
    above = [(name, rule["maximum"] + 1) for name, rule in SETTINGS.items() if "maximum" in rule]
    return below + above


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *out_of_range(),
        ("poll_interval_ms", "soon"),
        ("poll_interval_ms", 10.5),
        ("wake_up", "perhaps"),
        ("engine", "sparks"),
        ("delivery", "twice"),
        ("group_id", "two words"),
        ("request_topics", "TB"),
        ("request_topics", "TB:teatime"),
        ("dead_letter_topic", "dead letters"),
        ("redis_url", "http://redis:6379"),
        ("kafka_bootstrap_servers", ""),
    ],
)
def test_what_the_settings_refuse_the_chart_refuses(helm: Helm, name: str, value: object) -> None:
    good = {"kafka_bootstrap_servers": "kafka:9092", "redis_url": "redis://redis:6379/0"}
    with pytest.raises(SettingsError, match=f"BLACKBOX_{name.upper()}"):
        load(**{**good, name: value})
    changed = f"config.{camel(name)}={value}"
    done = helm("template", "blackbox", CHART, "--values", REQUIRED, "--set", changed)
    assert done.returncode != 0
    assert camel(name) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "config.pollInterval=5"], "'pollInterval' not allowed"),
        (["--set", "pollIntervalMs=5"], "'pollIntervalMs' not allowed"),
        (["--set", "replicas=-1"], "minimum"),
        (["--set", "config.httpHost=127.0.0.1"], "0.0.0.0"),
        (["--set", "config.httpPort=0"], "minimum"),
        (["--set", "config.redisUrl="], "neither config.redisUrl nor redisUrlSecret.name"),
        (["--set", "redisUrlSecret.name=redis"], "both set; keep one"),
        (["--set", "kafkaConfigSecret.name=kafka,config.kafkaConfig=/x"], "both set; keep one"),
        (["--set", "redisUrlSecret.value=secret"], "'value' not allowed"),
        (["--set", "config.redisUrl=redis://:pa55@redis:6379"], "(value hidden)"),
        (["--set", "config.redisUrl=redis://redis:6379?password=pa55"], "(value hidden)"),
    ],
)
def test_a_bad_value_is_refused_and_named(helm: Helm, arguments: list[str], said: str) -> None:
    done = helm("template", "blackbox", CHART, "--values", REQUIRED, *arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert "pa55" not in done.stderr


def test_the_chart_the_package_and_the_changelog_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## \[?v?(\d[^\]\s]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert chart["appVersion"] == package == newest[1]


def helm_commands() -> list[list[str]]:
    """The helm commands of the page, installs as templates, which need no cluster."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line)[1:] for line in blocks.splitlines() if line.startswith("helm ")]
    return [["template", *line[1:]] if line[0] == "install" else line for line in lines]


def test_every_helm_command_of_the_page_runs(helm: Helm) -> None:
    commands = helm_commands()
    assert {command[0] for command in commands} == {"lint", "template"}
    for command in commands:
        done = helm(*command)
        assert done.returncode == 0, done.stderr


def test_the_init_container_of_the_page_is_valid_and_checks_as_the_command_does() -> None:
    [command] = re.findall(r"```yaml\n(command:.*?)```", PAGE, re.DOTALL)
    [snippet] = re.findall(r"```yaml\n(initContainers:.*?)```", PAGE, re.DOTALL)
    [checking] = yaml.safe_load(snippet)["initContainers"]
    spec = {"initContainers": [checking], "containers": [{"name": "redis", "image": "redis"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "redis"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    starting = yaml.safe_load(command)["command"][-1]
    assert checking["command"][-1] == starting.partition("exec ")[0]
