"""What deploy/ holds fits the code: it names no setting, port, path, command, metric or file that is not there.

There is no container engine and no cluster here, so nothing is deployed. What can be run without them is run: the
linter of the Dockerfile, its health check, the schemas of Kubernetes, the configuration checks of NATS and of
Prometheus, the workers' own command with the manifests' settings.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import nats
import pytest
import yaml
from tests.integration.test_readme import free_port, read_lines, started
from typer.main import get_command

from parti.cli.main import build_app
from parti.config import Settings, load_settings
from parti.config.sources import ENV_PREFIX
from parti.embedded import Server
from parti.embedded.binary import find_binary
from parti.telemetry.health import Health
from parti.telemetry.http import MetricsServer
from parti.telemetry.metrics import Metrics
from parti.telemetry.reference import metrics_reference
from parti.version import __version__

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
BIN = Path(sys.executable).parent
MANIFESTS = sorted(KUBERNETES.rglob("*.yaml"))
PORT = 9108

STAGES = re.findall(r"^FROM (\S+) AS (\S+)", DOCKERFILE, re.MULTILINE)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


COMPOSE = load(DEPLOY / "compose.yml")
STATEFUL = load(KUBERNETES / "statefulset.yaml")
DEPLOYMENT = load(KUBERNETES / "autoscaling" / "deployment.yaml")
SETTINGS = load(KUBERNETES / "settings.yaml")["data"]
WORKLOADS = {"statefulset": STATEFUL, "deployment": DEPLOYMENT}


def container(workload: Any) -> Any:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


def get(port: int, path: str) -> int:
    """What a probe would see."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


# ── images ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_dockerfile_has_no_lint() -> None:
    done = subprocess.run(
        [BIN / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def images() -> Iterator[str]:
    own = {stage for _, stage in STAGES}
    yield from (image for image, _ in STAGES if image not in own)
    yield from (service["image"] for service in COMPOSE["services"].values() if "build" not in service)
    yield from (container(workload)["image"] for workload in WORKLOADS.values())


@pytest.mark.parametrize("image", sorted(set(images()) - {"parti-spark"}))
def test_images_are_pinned_by_version(image: str) -> None:
    assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+\S*", image)


def test_the_manifests_name_this_version() -> None:
    assert {container(workload)["image"].partition(":")[2] for workload in WORKLOADS.values()} == {__version__}


def test_what_the_dockerfile_copies_is_there_and_sent_to_the_builder() -> None:
    sent = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    for arguments in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in arguments.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == each or source.startswith(f"{each}/") for each in sent), source
    assert [each for each in sent if not (ROOT / each).exists()] == []


def test_stages_and_what_they_copy_from_exist() -> None:
    stages = [stage for _, stage in STAGES]
    assert set(re.findall(r"--from=(\S+)", DOCKERFILE)) <= set(stages)
    targets = {s["build"]["target"] for s in COMPOSE["services"].values() if "build" in s}
    assert targets <= set(stages)


def test_requirements_are_hashed() -> None:
    for name in re.findall(r"requirements/(\w+\.txt)", DOCKERFILE):
        text = (ROOT / "requirements" / name).read_text()
        assert len(re.findall(r"^[a-z0-9-]+==", text, re.MULTILINE)) <= text.count("--hash=sha256:")
    assert DOCKERFILE.count("-r requirements/") == DOCKERFILE.count("--require-hashes")


def test_nobody_is_root() -> None:
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert user == "10001:10001"
    assert DOCKERFILE.index("useradd --uid 10001 --gid 10001 ") < DOCKERFILE.index("USER ")
    for workload in WORKLOADS.values():
        context = workload["spec"]["template"]["spec"]["securityContext"]
        assert (context["runAsNonRoot"], f"{context['runAsUser']}:{context['runAsGroup']}") == (True, user)
        assert container(workload)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_health_check_of_the_image_tells_a_healthy_worker_from_another() -> None:
    (check,) = re.findall(r"^    CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    _, *arguments = yaml.safe_load(check)
    health = Health()
    with MetricsServer(Metrics("w"), health) as server:
        environment = {**os.environ, "PARTI_METRICS_PORT": str(server.port)}

        def ask() -> int:
            command = [sys.executable, *arguments]
            return subprocess.run(command, env=environment, capture_output=True, timeout=20, check=False).returncode

        assert ask() == 0
        health.raise_signal("connection", "lost")
        assert ask() == 1


# ── settings, ports, commands ─────────────────────────────────────────────────────────────────────────────────────


def named_settings() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in [p for p in DEPLOY.rglob("*") if p.is_file() and p.suffix != ".json"]:
        for name in re.findall(rf"\b{ENV_PREFIX}([A-Z_]+)\b", path.read_text()):
            found.setdefault(name.lower(), set()).add(path.name)
    return found


def test_every_variable_is_a_setting() -> None:
    named = named_settings()
    assert {name: where for name, where in named.items() if name not in Settings.model_fields} == {}
    assert len(named) > 8


@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_settings_of_the_manifests_are_accepted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = container(WORKLOADS[kind])
    assert pod["envFrom"] == [{"configMapRef": {"name": "orders-settings"}}]
    own = {each["name"]: "orders-0" for each in pod.get("env", [])}
    credentials = tmp_path / "worker.creds"
    credentials.write_text("x")
    for name, value in {**SETTINGS, **own, "PARTI_CREDENTIALS_FILE": str(credentials)}.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    (secret,) = [m for m in pod["volumeMounts"] if m["name"] == "credentials"]
    assert SETTINGS["PARTI_CREDENTIALS_FILE"].startswith(secret["mountPath"] + "/")
    assert settings.identity == ("orders-0" if kind == "statefulset" else None)
    grace_s = WORKLOADS[kind]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > settings.drain_timeout_s + 10, "a drain must be able to end"
    assert settings.rejoin_s > grace_s, "a pod that drains and comes back gets its partitions back"


def test_the_grace_period_of_compose_is_longer_than_a_drain() -> None:
    grace_s = int(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings.model_fields["drain_timeout_s"].default + 10


def test_all_speak_of_the_same_port() -> None:
    policy = load(KUBERNETES / "networkpolicy.yaml")["spec"]
    service = load(KUBERNETES / "service.yaml")["spec"]
    (scrape,) = load(DEPLOY / "compose" / "prometheus.yml")["scrape_configs"]
    ports = {
        "settings": int(SETTINGS["PARTI_METRICS_PORT"]),
        "image": int(re.findall(r"PARTI_METRICS_PORT=(\d+)", DOCKERFILE)[0]),
        "exposed": int(re.findall(r"^EXPOSE (\d+)", DOCKERFILE, re.MULTILINE)[0]),
        "service": service["ports"][0]["port"],
        "policy": policy["ingress"][0]["ports"][0]["port"],
        "scraped": scrape["dns_sd_configs"][0]["port"],
        **{kind: container(each)["ports"][0]["containerPort"] for kind, each in WORKLOADS.items()},
    }
    assert set(ports.values()) == {PORT}, ports
    assert {container(each)["ports"][0]["name"] for each in WORKLOADS.values()} == {service["ports"][0]["targetPort"]}
    assert scrape["dns_sd_configs"][0]["names"] == ["worker"]


def test_nats_may_be_reached() -> None:
    policy = load(KUBERNETES / "networkpolicy.yaml")["spec"]
    host, _, port = SETTINGS["PARTI_NATS"].removeprefix("nats://").partition(":")
    (rule,) = [r for r in policy["egress"] if r["ports"][0]["port"] == int(port)]
    namespace = rule["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert host.split(".")[1] == namespace


@pytest.mark.parametrize("kind", WORKLOADS)
def test_probes_ask_for_what_is_served(kind: str) -> None:
    pod = container(WORKLOADS[kind])
    health = Health()
    with MetricsServer(Metrics("w"), health) as server:
        for probe in ("readinessProbe", "livenessProbe"):
            asked = pod[probe]["httpGet"]
            assert asked["port"] == pod["ports"][0]["name"]
            assert get(server.port, asked["path"]) == 200
        health.raise_signal("connection", "lost")
        alive = pod["livenessProbe"]["httpGet"]["path"]
        assert get(server.port, alive) == 200, "a lost server is no reason for a restart"
        ready = pod["readinessProbe"]["httpGet"]["path"]
        assert get(server.port, ready) == 503


def commands() -> Iterator[list[str]]:
    for service in COMPOSE["services"].values():
        if "parti-" in service["image"] and "entrypoint" not in service:
            yield service["command"]
    yield from (container(workload)["args"] for workload in WORKLOADS.values())
    yield from (yaml.safe_load(found) for found in re.findall(r"^CMD (\[.*\])", DOCKERFILE, re.MULTILINE))


@pytest.mark.parametrize("arguments", list(commands()), ids=" ".join)
def test_commands_are_understood(arguments: list[str]) -> None:
    command: Any = get_command(build_app())
    rest = [argument for argument in arguments if argument != "--help"]
    while rest and hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context("parti", rest, resilient_parsing="--help" in arguments)


# ── compose ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_services_and_files_of_compose_exist() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", [])) <= services.keys(), name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing listens beyond this machine"
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert (DEPLOY / COMPOSE["configs"]["nats"]["file"]).is_file()
    servers = services["worker"]["environment"]["PARTI_NATS"]
    assert [url.removeprefix("nats://").partition(":")[0] for url in servers.split(",")] == [
        "nats-1",
        "nats-2",
        "nats-3",
    ]


def test_the_server_takes_its_configuration_and_is_the_one_that_parti_is_tested_with() -> None:
    binary = find_binary()
    command = [str(binary.path), "--config", str(DEPLOY / "nats" / "cluster.conf"), "-t"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    version = subprocess.run([str(binary.path), "--version"], capture_output=True, text=True, check=True).stdout
    assert COMPOSE["services"]["nats-1"]["image"] == f"nats:{version.split('v')[-1].strip()}-alpine"
    for name in ("nats-1", "nats-2", "nats-3"):
        assert COMPOSE["services"][name]["command"][-2:] == ["--name", name]
        assert f"nats-route://{name}:6222" in (DEPLOY / "nats" / "cluster.conf").read_text()


def test_prometheus_takes_its_configuration_with_the_rules(tmp_path: Path, debian_tool: Callable[[str], str]) -> None:
    promtool = debian_tool("promtool")
    shutil.copy(DEPLOY / "compose" / "prometheus.yml", tmp_path)
    shutil.copytree(DEPLOY / "prometheus", tmp_path / "rules")
    command = [promtool, "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    mounted = [v.split(":")[1] for v in COMPOSE["services"]["prometheus"]["volumes"]]
    assert mounted == ["/etc/prometheus/prometheus.yml", "/etc/prometheus/rules"]


async def test_the_traffic_of_compose_makes_the_stream_and_sends(
    nats_server_factory: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = nats_server_factory()
    monkeypatch.setenv("PARTI_NATS", server.url)
    for _ in range(2):  # a restart finds the stream
        with started(f"python {DEPLOY / 'compose' / 'traffic.py'} --rate 1000 --count 60", tmp_path) as sending:
            _, errors = sending.communicate(timeout=20)
            assert sending.returncode == 0, errors
    assert (tmp_path / "stream-is-there").exists()
    client = await nats.connect(server.url)
    assert (await client.jetstream().stream_info("ORDERS")).state.messages == 120
    await client.close()


# ── kubernetes ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.relative_to(KUBERNETES).as_posix())
def test_manifests_fit_the_schemas_of_kubernetes(path: Path) -> None:
    document = load(path)
    if document["apiVersion"].startswith(("kustomize.", "keda.sh/")):
        return  # not Kubernetes' own; looked at below
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_every_manifest_is_applied() -> None:
    for folder in (KUBERNETES, KUBERNETES / "autoscaling"):
        listed = load(folder / "kustomization.yaml")["resources"]
        assert sorted(listed) == sorted(p.name for p in folder.glob("*.yaml") if p.name != "kustomization.yaml")


def test_selectors_find_the_pods() -> None:
    labels = {"app.kubernetes.io/name": "orders"}
    for workload in WORKLOADS.values():
        assert workload["spec"]["selector"]["matchLabels"] == labels
        assert workload["spec"]["template"]["metadata"]["labels"] == labels
    assert load(KUBERNETES / "poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert load(KUBERNETES / "networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"] == labels
    assert load(KUBERNETES / "service.yaml")["spec"]["selector"] == labels
    assert STATEFUL["spec"]["serviceName"] == load(KUBERNETES / "service.yaml")["metadata"]["name"]


def test_both_workloads_run_the_same_pod_but_for_its_identity() -> None:
    stateful = copy.deepcopy(STATEFUL)
    (identity,) = container(stateful).pop("env")
    assert identity["name"] == "PARTI_IDENTITY"
    assert stateful["spec"]["template"] == DEPLOYMENT["spec"]["template"]


def test_the_autoscaler_asks_for_metrics_that_there_are() -> None:
    scaled = load(KUBERNETES / "autoscaling" / "scaledobject.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    assert scaled["spec"]["scaleTargetRef"]["kind"] == DEPLOYMENT["kind"]
    (trigger,) = scaled["spec"]["triggers"]
    names = set(re.findall(r"\bparti_\w+", trigger["metadata"]["query"]))
    kinds = dict(re.findall(r"^\| `(parti_\w+)` \| (\w+) \|", metrics_reference(), re.MULTILINE))
    assert names <= kinds.keys() | {f"{name}_count" for name, kind in kinds.items() if kind == "histogram"}
    assert len(names) == 3
    assert trigger["metadata"]["query"].replace(" / ", "\n/ ") in (ROOT / "docs" / "deployment.md").read_text()
    (job,) = set(re.findall(r'job="(\w+)"', trigger["metadata"]["query"]))
    assert job == load(DEPLOY / "compose" / "prometheus.yml")["scrape_configs"][0]["job_name"]


def test_the_query_of_the_autoscaler_is_promql(debian_tool: Callable[[str], str], tmp_path: Path) -> None:
    (trigger,) = load(KUBERNETES / "autoscaling" / "scaledobject.yaml")["spec"]["triggers"]
    rule = {"groups": [{"name": "g", "rules": [{"record": "seconds", "expr": trigger["metadata"]["query"]}]}]}
    (tmp_path / "rule.yml").write_text(yaml.safe_dump(rule))
    command = [debian_tool("promtool"), "check", "rules", str(tmp_path / "rule.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_a_worker_with_these_settings_is_ready_and_drains_on_sigterm(
    nats_server_factory: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, port = nats_server_factory(), free_port()
    client = await nats.connect(server.url)
    await client.jetstream().add_stream(name="ORDERS", subjects=["orders.*.*"])
    await client.jetstream().publish("orders.eu.ada", b'{"number": 1, "amount": 5}')
    await client.close()
    here = {"PARTI_NATS": server.url, "PARTI_METRICS_PORT": str(port), "PARTI_REPLICAS": "1", "PARTI_IDENTITY": "o-0"}
    for name, value in {**SETTINGS, **here}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PARTI_CREDENTIALS_FILE")
    shutil.copy(ROOT / "examples" / "orders.py", tmp_path)
    with started(shlex.join(["parti", *container(STATEFUL)["args"]]), tmp_path) as working:
        assert read_lines(working, 1) == ["ada order 1"]
        ready = container(STATEFUL)["readinessProbe"]["httpGet"]["path"]
        assert get(port, ready) == 200
        working.send_signal(signal.SIGTERM)
        _, errors = working.communicate(timeout=30)
        assert working.returncode == 0, errors
        assert '"clean": true' in errors
