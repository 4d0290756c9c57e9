from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import javaproperties
import kubernetes_validate
import pytest
import yaml
from pydantic import SecretStr

from blackbox.api.access import Access
from blackbox.config.settings import Settings, load
from blackbox.config.settings_error import SettingsError
from blackbox.formats import FORMATS
from tests.conftest import missing_tool

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "blackbox"
PAGE = (ROOT / "docs" / "deploying.md").read_text()
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = yaml.safe_load((CHART / "values.schema.json").read_text())
NO_VALUES = {"api_token", "api_read_token", "instance_id"}
"""Secrets, and settings that differ for every pod."""
SETTINGS: dict[str, dict[str, Any]] = {
    name: rules
    for name, rules in Settings.model_json_schema()["properties"].items()
    if name not in NO_VALUES
}
REQUIRED = CHART / "ci" / "required-values.yaml"
EVERY_OPTION = CHART / "ci" / "every-option-values.yaml"
ON_KUBERNETES = CHART / "ci" / "kubernetes-values.yaml"
ON_STANDALONE = CHART / "ci" / "standalone-values.yaml"
EVERY_FILE = [REQUIRED, EVERY_OPTION, ON_KUBERNETES, ON_STANDALONE]
PROCESS = ["--set", "config.engine=process"]
UNDECIDED: list[str | Path] = [
    "--values",
    REQUIRED,
    "--set",
    "config.sparkMaster=spark://spark:7077",
]
STANDALONE: list[str | Path] = ["--values", ON_STANDALONE]
AUTHENTICATED = ["--set-string", r"sparkProperties.spark\.authenticate=true"]
UNAUTHENTICATED = ["--set-string", r"sparkProperties.spark\.authenticate=false"]
OPEN = ["--set", "networkPolicy.enabled=false"]
PEERS = ["--set", "networkPolicy.executors[0].ipBlock.cidr=10.0.0.0/8"]

# Settings for which a pod cannot use the default of a laptop.
OTHER_DEFAULTS = {
    "kafka_bootstrap_servers": "",
    "kafka_config": "",
    "callers_file": "",
    "redis_url": "",
    "timer_output_topic": "",
    "oscillator_topic": "",
    "renew_after_s": "",
    "metrics_addr": "",
    "http_host": "0.0.0.0",
    "spark_master": "local[4]",
    "spark_config": "",
    "ledger": "",
}
# Rules of the schema in addition to the settings' own rule, or instead of it.
OTHER_RULES: dict[str, dict[str, Any]] = {
    "kafka_bootstrap_servers": {"minLength": None},
    "redis_url": {"pattern": "^((rediss?([+](sentinel|cluster))?|unix)://.*)?$"},
    "request_topics": {"pattern": SCHEMA["properties"]["config"]["properties"]["requestTopics"]["pattern"]},
    "dead_letter_topic": {"pattern": "^[A-Za-z0-9._-]{1,249}$"},
    "history_topic": {"pattern": "^[A-Za-z0-9._-]{1,249}$"},
    "timer_output_topic": {"pattern": "^[A-Za-z0-9._-]{0,249}$"},
    "oscillator_topic": {"pattern": "^[A-Za-z0-9._-]{0,249}$"},
    "metrics_addr": {"pattern": "^([^\\s:]*:\\d{1,5})?$"},
    "renew_after_s": {"type": None},
    "spark_master": {"pattern": SCHEMA["properties"]["config"]["properties"]["sparkMaster"]["pattern"]},
    "http_host": {"enum": ["0.0.0.0", "::"]},
    "http_port": {"minimum": 1},
}  # fmt: skip

Helm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm() -> Helm:
    binary = shutil.which("helm") or shutil.which("helm", path=_go_binaries())
    if binary is None:
        missing_tool("no helm on PATH or in Go's bin; go install helm.sh/helm/v3/cmd/helm@v3.22.0")

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
    """The rendered documents by kind; those named like `<release>-driver` by `<kind> driver`."""
    done = helm("template", "blackbox", CHART, *arguments)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    release = next(d["metadata"]["name"] for d in documents if d["kind"] == "Deployment")
    by_kind = {
        f"{document['kind']} {document['metadata']['name'].removeprefix(release)[1:]}".rstrip(): document
        for document in documents
    }
    assert len(by_kind) == len(documents)
    return by_kind


def pod_of(documents: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = documents["Deployment"]["spec"]["template"]["spec"]
    return pod


def spark_of(documents: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """The settings of Spark that the pod reads."""
    text = documents["ConfigMap spark"]["data"]["spark.properties"]
    return dict(javaproperties.loads(text))


POD_SECURITY = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def test_every_setting_is_a_value_with_its_default() -> None:
    defaults = {name: Settings.model_fields[name].default for name in SETTINGS}
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


def test_the_schema_requires_every_setting_and_allows_no_other() -> None:
    config = SCHEMA["properties"]["config"]
    assert set(config["properties"]) == set(config["required"]) == set(map(camel, SETTINGS))
    assert config["additionalProperties"] is SCHEMA["additionalProperties"] is False


def test_renew_after_may_be_empty_in_the_chart() -> None:
    [rule, none] = SETTINGS["renew_after_s"]["anyOf"]
    assert none == {"type": "null"}
    written = SCHEMA["properties"]["config"]["properties"]["renewAfterS"]
    assert written == {"anyOf": [rule, {"type": "string", "enum": [""]}]}


def test_the_schema_knows_every_format() -> None:
    pattern = SCHEMA["properties"]["config"]["properties"]["requestTopics"]["pattern"]
    for format_name in FORMATS:
        assert re.search(pattern, f"TB:{format_name},other:{format_name}")


@pytest.mark.parametrize("values", [None, *EVERY_FILE])
def test_lint_finds_nothing(helm: Helm, values: Path | None) -> None:
    done = helm("lint", "--strict", CHART, *(["--values", values] if values else []))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", EVERY_FILE)
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
        spark_master="local[4]",
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
    by_reference = {one["name"]: one["valueFrom"] for one in container["env"]}
    own = by_reference.pop("BLACKBOX_INSTANCE_ID")
    assert own == {"fieldRef": {"fieldPath": "metadata.name"}}
    found = {name: source["secretKeyRef"] for name, source in by_reference.items()}
    assert found == {
        "BLACKBOX_REDIS_URL": {"name": "blackbox-redis", "key": "url"},
        "BLACKBOX_API_TOKEN": {"name": "blackbox-api", "key": "operate"},
        "BLACKBOX_API_READ_TOKEN": {"name": "blackbox-api", "key": "read"},
    }
    assert "BLACKBOX_REDIS_URL" not in documents["ConfigMap"]["data"]
    assert {"name": "kafka-config", "secret": {"secretName": "blackbox-kafka"}} in pod["volumes"]
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "kafka-config"]
    assert mount["readOnly"]
    path = documents["ConfigMap"]["data"]["BLACKBOX_KAFKA_CONFIG"]
    assert path == f"{mount['mountPath']}/client.properties"
    assert "Secret" not in documents


@pytest.mark.parametrize("engine", [[], PROCESS])
def test_a_pod_without_a_configured_token_gets_a_generated_one(
    helm: Helm, engine: list[str | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (render(helm, "--values", REQUIRED, *engine) for _ in range(2))
    [container] = pod_of(first)["containers"]
    [variable] = [one for one in container["env"] if one["name"] == "BLACKBOX_API_TOKEN"]
    secret = first["Secret api"]
    assert variable["valueFrom"]["secretKeyRef"] == {
        "name": secret["metadata"]["name"],
        "key": "api-token",
    }
    token = b64decode(secret["data"]["api-token"]).decode()
    assert re.fullmatch("[A-Za-z0-9]{48}", token)
    assert token != b64decode(second["Secret api"]["data"]["api-token"]).decode()
    for name, value in first["ConfigMap"]["data"].items():
        monkeypatch.setenv(name, value)
    assert access(load()).is_closed
    assert not access(load(api_token=token)).is_closed


def access(settings: Settings) -> Access:
    return Access(settings.hosts, *settings.api_tokens)


class ClusterWithSecret(BaseHTTPRequestHandler):
    """The requests of helm to a cluster that has the chart's Secret."""

    ANSWERS: ClassVar = {
        "/api/v1": {
            "kind": "APIResourceList",
            "groupVersion": "v1",
            "resources": [
                {"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
            ],
        },
        "/api/v1/namespaces/default/secrets/blackbox-api": {
            "kind": "Secret",
            "apiVersion": "v1",
            "metadata": {"name": "blackbox-api", "namespace": "default"},
            "data": {"api-token": b64encode(b"made before").decode()},
        },
    }

    def do_GET(self) -> None:
        answer = self.ANSWERS.get(self.path.partition("?")[0])
        body = json.dumps(answer or {"kind": "Status", "code": 404}).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ClusterWithSecret)
    Thread(target=server.serve_forever, daemon=True).start()
    access = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(access))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("cluster")
def test_an_upgrade_keeps_the_token_that_was_made_before(helm: Helm) -> None:
    documents = render(helm, "--values", REQUIRED, "--dry-run=server", "--namespace", "default")
    assert b64decode(documents["Secret api"]["data"]["api-token"]) == b"made before"


def test_the_callers_rules_are_mounted_from_a_config_map(helm: Helm) -> None:
    documents = render(helm, "--values", EVERY_OPTION)
    pod = pod_of(documents)
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "callers"]
    assert {"name": "callers", "configMap": {"name": "blackbox-callers"}} in pod["volumes"]
    assert "subPath" not in mount
    path = documents["ConfigMap"]["data"]["BLACKBOX_CALLERS_FILE"]
    assert path == f"{mount['mountPath']}/rules.toml"


@pytest.mark.parametrize("engine", [[], PROCESS, STANDALONE])
def test_the_pod_has_no_rights_it_does_not_need(helm: Helm, engine: list[str | Path]) -> None:
    documents = render(helm, "--values", REQUIRED, *engine)
    pod = pod_of(documents)
    [container] = pod["containers"]
    assert documents["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is False
    assert not documents.keys() & {"Role", "RoleBinding"}
    assert pod["securityContext"] == POD_SECURITY
    assert container["securityContext"] == CONTAINER_SECURITY


def test_a_driver_on_kubernetes_may_only_manage_pods_of_its_namespace(
    helm: Helm,
) -> None:
    documents = render(helm, "--values", ON_KUBERNETES, "--namespace", "reminders")
    pod = pod_of(documents)
    assert documents["Role"]["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["pods"],
            "verbs": ["get", "list", "watch", "create", "delete", "deletecollection"],
        }
    ]
    binding = documents["RoleBinding"]
    assert binding["roleRef"]["name"] == documents["Role"]["metadata"]["name"]
    account = {"kind": "ServiceAccount", "name": "blackbox", "namespace": "reminders"}
    assert binding["subjects"] == [account]
    assert pod["serviceAccountName"] == documents["ServiceAccount"]["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is True
    assert pod["securityContext"] == POD_SECURITY
    assert pod["containers"][0]["securityContext"] == CONTAINER_SECURITY


def test_spark_settings_avoid_further_permissions(helm: Helm) -> None:
    settings = spark_of(render(helm, "--values", ON_KUBERNETES))
    assert settings["spark.kubernetes.executor.disableConfigMap"] == "true"
    assert settings["spark.kubernetes.driver.service.deleteOnTermination"] == "false"
    assert settings["spark.kubernetes.driver.ownPersistentVolumeClaim"] == "false"
    assert settings["spark.kubernetes.driver.reusePersistentVolumeClaim"] == "false"


@pytest.mark.parametrize("cluster", [["--values", ON_KUBERNETES], STANDALONE])
def test_executors_reach_the_driver_by_the_name_and_ports_of_a_headless_service(
    helm: Helm, cluster: list[str | Path]
) -> None:
    documents = render(helm, *cluster, "--namespace", "reminders")
    service = documents["Service driver"]
    settings = spark_of(documents)
    assert service["spec"]["clusterIP"] == "None"
    assert settings["spark.driver.host"] == f"{service['metadata']['name']}.reminders.svc"
    assert settings["spark.driver.bindAddress"] == "0.0.0.0"
    [container] = pod_of(documents)["containers"]
    open_ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port, setting in {"driver": "driver.port", "block-manager": "blockManager.port"}.items():
        [served] = [each for each in service["spec"]["ports"] if each["name"] == port]
        assert served["targetPort"] == port
        assert str(open_ports[port]) == str(served["port"]) == settings[f"spark.{setting}"]


@pytest.mark.parametrize("cluster", [["--values", ON_KUBERNETES], STANDALONE])
def test_the_driver_service_resolves_to_one_pod_even_before_it_is_ready(
    helm: Helm, cluster: list[str | Path]
) -> None:
    documents = render(helm, *cluster)
    deployment = documents["Deployment"]["spec"]
    service = documents["Service driver"]["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == deployment["selector"]["matchLabels"]
    assert deployment["strategy"] == {"type": "Recreate"}
    assert deployment["replicas"] == 1


@pytest.mark.parametrize("engine", [[], PROCESS, [*PROCESS, *STANDALONE]])
def test_without_remote_executors_there_is_no_driver_service(
    helm: Helm, engine: list[str | Path]
) -> None:
    documents = render(helm, "--values", REQUIRED, *engine)
    assert "Service driver" not in documents
    assert "ConfigMap spark" not in documents
    assert "strategy" not in documents["Deployment"]["spec"]
    assert "BLACKBOX_SPARK_CONFIG" not in documents["ConfigMap"]["data"]


def test_executors_are_of_the_same_image_and_end_with_their_driver(helm: Helm) -> None:
    documents = render(helm, "--values", ON_KUBERNETES, "--namespace", "reminders")
    settings = spark_of(documents)
    [container] = pod_of(documents)["containers"]
    assert settings["spark.kubernetes.container.image"] == container["image"]
    assert settings["spark.kubernetes.container.image.pullPolicy"] == container["imagePullPolicy"]
    assert settings["spark.kubernetes.namespace"] == "reminders"
    variable = re.fullmatch(r"\$\{env:(\w+)}", settings["spark.kubernetes.driver.pod.name"])
    assert variable is not None
    field = {"fieldRef": {"fieldPath": "metadata.name"}}
    assert {"name": variable[1], "valueFrom": field} in container["env"]


def test_traffic_between_driver_and_executors_is_encrypted(helm: Helm) -> None:
    settings = spark_of(render(helm, "--values", ON_KUBERNETES))
    assert settings["spark.authenticate"] == "true"
    assert settings["spark.network.crypto.enabled"] == "true"


@pytest.mark.parametrize("kubernetes", ["1.25", "1.31", "1.37"])
def test_an_executor_has_the_files_of_the_driver_and_no_rights(helm: Helm, kubernetes: str) -> None:
    documents = render(helm, "--values", ON_KUBERNETES)
    pod = pod_of(documents)
    template = spark_of(documents)["spark.kubernetes.executor.podTemplateFile"]
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "spark-config"]
    folder, _, name = template.rpartition("/")
    assert folder == mount["mountPath"]
    executor = yaml.safe_load(documents["ConfigMap spark"]["data"][name])
    kubernetes_validate.validate(executor, kubernetes, strict=True)
    [container] = executor["spec"]["containers"]
    assert executor["spec"]["automountServiceAccountToken"] is False
    assert executor["spec"]["securityContext"] == POD_SECURITY
    assert container["securityContext"] == CONTAINER_SECURITY
    for part in ("imagePullSecrets", "priorityClassName", "nodeSelector", "tolerations"):
        assert executor["spec"][part] == pod[part]
    mounts = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] != "spark-config"]
    assert container["volumeMounts"] == mounts
    assert {"kafka-config", "redis-ca"} < {each["name"] for each in mounts}
    assert executor["spec"]["volumes"] == [v for v in pod["volumes"] if v["name"] != "spark-config"]


@pytest.mark.parametrize("engine", [[], PROCESS], ids=["spark", "process"])
@pytest.mark.parametrize("values", EVERY_FILE)
def test_a_pod_can_write_to_tmp_and_nowhere_else(
    helm: Helm, values: Path, engine: list[str]
) -> None:
    # Also with the process engine: an audit in its pod runs on Spark.
    pod = pod_of(render(helm, "--values", values, *engine))
    [container] = pod["containers"]
    writable = [mount for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert writable == [{"name": "tmp", "mountPath": "/tmp"}]
    assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]


def test_spark_properties_are_mounted_as_a_readable_file(helm: Helm, tmp_path: Path) -> None:
    documents = render(helm, "--values", EVERY_OPTION)
    pod = pod_of(documents)
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "spark-config"]
    assert mount["readOnly"]
    path = Path(documents["ConfigMap"]["data"]["BLACKBOX_SPARK_CONFIG"])
    assert str(path.parent) == mount["mountPath"]
    name = documents["ConfigMap spark"]["metadata"]["name"]
    assert {"name": "spark-config", "configMap": {"name": name}} in pod["volumes"]
    file = tmp_path / path.name
    file.write_text(documents["ConfigMap spark"]["data"][path.name])
    read = load(kafka_bootstrap_servers="kafka:9092", spark_config=file).spark_settings()
    assert read == {
        "spark.driver.memory": "2g",
        "spark.scheduler.mode": "FAIR",
        "spark.task.maxFailures": "8",
    }


def test_spark_properties_of_the_operator_take_precedence(helm: Helm) -> None:
    changed = ["--set", r"sparkProperties.spark\.executor\.cores=7"]
    settings = spark_of(render(helm, "--values", ON_KUBERNETES, *changed))
    assert settings["spark.executor.cores"] == "7"
    assert settings["spark.executor.instances"] == "8"


def tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def ingress_of(documents: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The traffic that the policy of the pods admits."""
    spec = documents["NetworkPolicy"]["spec"]
    assert spec["podSelector"] == documents["Deployment"]["spec"]["selector"]
    assert spec["policyTypes"] == ["Ingress"]
    rules: list[dict[str, Any]] = spec["ingress"]
    return rules


def executors_labels(documents: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Spark's own label, and those that the chart adds."""
    prefix = "spark.kubernetes.executor.label."
    settings = spark_of(documents).items()
    asked = {name.removeprefix(prefix): v for name, v in settings if name.startswith(prefix)}
    return {"spark-role": "executor", **asked}


@pytest.mark.parametrize("engine", [[], PROCESS, [*PROCESS, *STANDALONE]])
def test_only_the_http_port_of_a_pod_is_reachable(helm: Helm, engine: list[str | Path]) -> None:
    documents = render(helm, "--values", REQUIRED, *engine)
    assert ingress_of(documents) == [{"ports": tcp(8000)}]
    assert "NetworkPolicy executors" not in documents


@pytest.mark.parametrize(
    ("address", "ports"),
    [
        (":9001", [8000, 9001]),
        ("0.0.0.0:9001", [8000, 9001]),
        (":0", [8000]),
        ("127.0.0.1:9001", [8000]),
        ("localhost:9001", [8000]),
    ],
)
def test_the_metrics_port_is_reachable_unless_it_is_on_loopback(
    helm: Helm, address: str, ports: list[int]
) -> None:
    documents = render(helm, "--values", REQUIRED, "--set", f"config.metricsAddr={address}")
    assert ingress_of(documents) == [{"ports": tcp(*ports)}]


def test_http_can_be_limited_to_some_peers(helm: Helm) -> None:
    peers = yaml.safe_load(EVERY_OPTION.read_text())["networkPolicy"]["http"]
    documents = render(helm, "--values", EVERY_OPTION)
    assert ingress_of(documents) == [{"ports": tcp(9000, 9001), "from": peers}]


@pytest.mark.parametrize("cluster", [["--values", ON_KUBERNETES], STANDALONE])
def test_only_executors_reach_the_ports_of_the_driver(
    helm: Helm, cluster: list[str | Path]
) -> None:
    documents = render(helm, *cluster)
    http, driver = ingress_of(documents)
    served = documents["Service driver"]["spec"]["ports"]
    assert http == {"ports": tcp(8000)}
    assert driver["ports"] == tcp(*(port["port"] for port in served))
    assert driver["from"]


def test_executors_are_selected_by_labels_of_their_release(helm: Helm) -> None:
    documents = render(helm, "--values", ON_KUBERNETES)
    labels = executors_labels(documents)
    assert labels == {
        "spark-role": "executor",
        "app.kubernetes.io/name": "blackbox-executor",
        "app.kubernetes.io/instance": "blackbox",
    }
    _, driver = ingress_of(documents)
    assert driver["from"] == [{"podSelector": {"matchLabels": labels}}]
    wanted = documents["Deployment"]["spec"]["selector"]["matchLabels"]
    assert not wanted.items() <= labels.items()


def test_executors_accept_only_their_driver_and_each_other(helm: Helm) -> None:
    documents = render(helm, "--values", ON_KUBERNETES)
    spec = documents["NetworkPolicy executors"]["spec"]
    executors = {"matchLabels": executors_labels(documents)}
    assert spec["podSelector"] == executors
    assert spec["policyTypes"] == ["Ingress"]
    driver = documents["Deployment"]["spec"]["selector"]
    assert spec["ingress"] == [{"from": [{"podSelector": driver}, {"podSelector": executors}]}]


def test_executors_with_their_own_spark_config_are_selected_by_the_spark_label(helm: Helm) -> None:
    own_file = ["--set", "config.sparkMaster=k8s://x,config.sparkConfig=/x"]
    documents = render(helm, "--values", REQUIRED, *own_file)
    _, driver = ingress_of(documents)
    assert driver["from"] == [{"podSelector": {"matchLabels": {"spark-role": "executor"}}}]
    assert "NetworkPolicy executors" not in documents


@pytest.mark.parametrize(
    "arguments",
    [
        ["--values", ON_KUBERNETES, *PEERS],
        [*UNDECIDED, *PEERS],
        [*UNDECIDED, *PEERS, *AUTHENTICATED],
    ],
)
def test_the_operator_can_set_the_peers_of_the_driver(
    helm: Helm, arguments: list[str | Path]
) -> None:
    _, driver = ingress_of(render(helm, *arguments))
    assert driver["from"] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]


def test_a_driver_with_authentication_accepts_executors_anywhere(helm: Helm) -> None:
    _, driver = ingress_of(render(helm, *UNDECIDED, *AUTHENTICATED))
    assert driver == {"ports": tcp(7078, 7079)}


def test_executors_on_kubernetes_need_no_secret_behind_network_policies(helm: Helm) -> None:
    documents = render(helm, "--values", ON_KUBERNETES, *UNAUTHENTICATED)
    assert spark_of(documents)["spark.authenticate"] == "false"
    assert {"NetworkPolicy", "NetworkPolicy executors"} < documents.keys()


@pytest.mark.parametrize("values", EVERY_FILE)
def test_network_policies_can_be_left_to_the_operator(helm: Helm, values: Path) -> None:
    documents = render(helm, "--values", values, *OPEN, *AUTHENTICATED)
    assert not [kind for kind in documents if kind.startswith("NetworkPolicy")]


def test_the_memory_request_depends_on_the_engine(helm: Helm) -> None:
    def memory(*arguments: str) -> str:
        [container] = pod_of(render(helm, "--values", REQUIRED, *arguments))["containers"]
        return str(container["resources"]["requests"]["memory"])

    assert memory() == "2Gi"
    assert memory(*PROCESS) == "256Mi"
    assert memory("--set", "resources.requests.memory=5Gi") == "5Gi"


def test_the_probes_wait_for_spark_to_start(helm: Helm) -> None:
    [container] = pod_of(render(helm, "--values", REQUIRED))["containers"]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 60


def test_a_service_named_like_the_prefix_sets_no_variables(helm: Helm) -> None:
    assert pod_of(render(helm, "--values", REQUIRED))["enableServiceLinks"] is False


@pytest.mark.parametrize("values", EVERY_FILE)
def test_probes_and_service_reach_the_port_that_is_served(helm: Helm, values: Path) -> None:
    documents = render(helm, "--values", values)
    [container] = pod_of(documents)["containers"]
    [port] = [each for each in container["ports"] if each["name"] == "http"]
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


def test_a_changed_setting_of_spark_replaces_the_pods(helm: Helm) -> None:
    def checksum(*arguments: str) -> str:
        documents = render(helm, "--values", ON_KUBERNETES, *arguments)
        annotations = documents["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/spark"])

    assert checksum() != checksum("--set", r"sparkProperties.spark\.executor\.cores=7")
    assert checksum() != checksum("--set", "priorityClassName=low")


def out_of_range() -> list[tuple[str, object]]:
    below = [(name, rule["minimum"] - 1) for name, rule in SETTINGS.items() if "minimum" in rule]
    above = [(name, rule["maximum"] + 1) for name, rule in SETTINGS.items() if "maximum" in rule]
    return below + above


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *out_of_range(),
        ("renew_after_s", 0),
        ("renew_after_s", 315360001),
        ("renew_after_s", "daily"),
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
        ("redis_url", "unix+cluster://redis:6379"),
        ("spark_master", "yarn"),
        ("spark_master", "local[0]"),
        ("spark_master", "spark://host"),
        ("spark_master", "k8s://"),
        ("kafka_bootstrap_servers", ""),
    ],
)
def test_the_chart_refuses_what_the_settings_refuse(helm: Helm, name: str, value: object) -> None:
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
        (["--set", "callersConfigMap.name=callers,config.callersFile=/x"], "both set; keep one"),
        (["--set", "redisUrlSecret.value=secret"], "'value' not allowed"),
        (
            ["--set", "config.sparkConfig=/x", "--set", r"sparkProperties.spark\.x=1"],
            "both set; keep one",
        ),
        (["--set", r"sparkProperties.spark\.master=yarn"], "has spark.master; give"),
        (["--set", "sparkProperties.cores=1"], "has cores; give"),
        (
            ["--set", r"sparkProperties.spark\.authenticate\.secret=pa55"],
            "would be in a ConfigMap",
        ),
        (["--set", "sparkDriver.port=80"], "minimum"),
        ([*STANDALONE, "--set", "replicas=2"], "keep one replica"),
        (UNDECIDED, "spark.authenticate is not set and networkPolicy.executors is empty"),
        (UNDECIDED, "config.sparkMaster is spark://spark:7077"),
        (
            UNDECIDED,
            'give spark.authenticate: "true" where the cluster has a secret, or let network',
        ),
        ([*UNDECIDED, *UNAUTHENTICATED], 'is "false" and networkPolicy.executors is empty'),
        ([*UNDECIDED, *PEERS, *OPEN], "is not set and networkPolicy.enabled is false"),
        ([*STANDALONE, *OPEN], 'is "false" and networkPolicy.enabled is false'),
        (
            ["--set", "config.sparkMaster=k8s://x", *UNAUTHENTICATED, *OPEN],
            'is "false" and networkPolicy.enabled is false',
        ),
        (
            ["--set", "config.sparkMaster=k8s://x", *UNAUTHENTICATED, *PEERS, *OPEN],
            'give spark.authenticate: "true" or let networkPolicy.enabled be true',
        ),
        (["--set", "networkPolicy.egress=true"], "'egress' not allowed"),
        (["--set", "networkPolicy.http[0].cidr=10.0.0.0/8"], "'cidr' not allowed"),
        (["--set-json", "networkPolicy.executors=[{}]"], "minProperties"),
        (
            ["--set", "config.sparkMaster=k8s://x,serviceAccount.create=false"],
            "serviceAccount.name",
        ),
        (["--set", "config.redisUrl=redis://:pa55@redis:6379"], "(value hidden)"),
        (["--set", "config.redisUrl=redis://redis:6379?password=pa55"], "(value hidden)"),
    ],
)
def test_a_bad_value_is_refused_and_named(
    helm: Helm, arguments: list[str | Path], said: str
) -> None:
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


def test_the_init_container_of_the_page_is_valid_and_matches_the_command() -> None:
    [command] = re.findall(r"```yaml\n(command:.*?)```", PAGE, re.DOTALL)
    [snippet] = re.findall(r"```yaml\n(initContainers:.*?)```", PAGE, re.DOTALL)
    [checking] = yaml.safe_load(snippet)["initContainers"]
    spec = {"initContainers": [checking], "containers": [{"name": "redis", "image": "redis"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "redis"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    starting = yaml.safe_load(command)["command"][-1]
    assert checking["command"][-1] == starting.partition("exec ")[0]
