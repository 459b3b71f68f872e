"""The templates are what their tools accept: a shell, Docker, Ray's launcher, Kubernetes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from configs.runtime.process import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
SHELLS = sorted([*DEPLOY.glob("*.sh"), DEPLOY / "slurm.sbatch", REPOSITORY / ".ci" / "run"])
SHELLS.append(REPOSITORY / "requirements" / "install.sh")
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
KUBERNETES = "1.33"  # whose API the manifest is written for
# The fields of spec that the manifest may have, of KubeRay's RayCluster (ray.io/v1, its
# ray-operator/apis/ray/v1/raycluster_types.go).
_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_GROUP = {
    "groupName": {"type": "string"},
    "replicas": _COUNT,
    "minReplicas": _COUNT,
    "maxReplicas": _COUNT,
    "numOfHosts": _COUNT,
    "rayStartParams": _PARAMS,
    "template": {"type": "object"},
}
_HEAD = {
    "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "enableIngress": {"type": "boolean"},
    "rayStartParams": _PARAMS,
    "template": {"type": "object"},
}


def _strict(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


RAY_CLUSTER = _strict(
    {
        "rayVersion": {"type": "string"},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "suspend": {"type": "boolean"},
        "headGroupSpec": _strict(_HEAD, "rayStartParams", "template"),
        "workerGroupSpecs": {
            "type": "array",
            "items": _strict(
                _GROUP, "groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"
            ),
        },
    },
    "headGroupSpec",
)


def tool(name: str) -> str:
    """The path of a tool of dev.lock."""
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    found = shutil.which(name, path=folders)
    return found or pytest.skip(f"{name} is not installed: `make .venv`")


def complaints(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr if done.returncode else ""


def manifest(kind: str) -> dict[str, Any]:
    found = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    return next(each for each in found if each["kind"] == kind)


def groups() -> dict[str, dict[str, Any]]:
    spec = manifest("RayCluster")["spec"]
    return {"head": spec["headGroupSpec"], "worker": spec["workerGroupSpecs"][0]}


def test_shell_scripts_are_clean() -> None:
    assert complaints(tool("shellcheck"), *SHELLS) == ""
    assert all(os.access(path, os.X_OK) for path in SHELLS)


@pytest.mark.slow
def test_dockerfiles_are_clean() -> None:
    assert complaints(tool("hadolint"), *DOCKERFILES) == ""


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_image_holds_what_its_installation_needs(kind: str) -> None:
    text = (DEPLOY / f"Dockerfile.{kind}").read_text()
    venv = ".venv-gpu" if kind == "gpu" else ".venv"
    assert f"requirements/install.sh {venv} {kind}" in text and f"/opt/forage/{venv}/bin" in text
    kept = (REPOSITORY / ".dockerignore").read_text().splitlines()
    copied = [line.removeprefix("!") for line in kept if line.startswith("!")]
    assert {*copied} >= {"pyproject.toml", "README.md", "requirements", "deploy", "configs"}
    assert all((REPOSITORY / name).exists() for name in copied)


@pytest.mark.slow
def test_ray_up_takes_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    workers = len(config["provider"]["worker_ips"])
    (node,) = prepared["available_node_types"].values()
    assert node["min_workers"] == node["max_workers"] == workers
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepared | {"no_such_field": 1})


def test_kuberay_takes_the_cluster() -> None:
    cluster = manifest("RayCluster")
    jsonschema.validate(cluster["spec"], RAY_CLUSTER)
    assert cluster["spec"]["rayVersion"] == _locked("ray")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster["spec"] | {"replica": 1}, RAY_CLUSTER)


@pytest.mark.slow
def test_kubernetes_takes_the_volume_and_the_pods() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="`make .venv`").validate
    validate(manifest("PersistentVolumeClaim"), KUBERNETES, strict=True)
    for group in groups().values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        validate(pod, KUBERNETES, strict=True)
        wrong = {**pod, "spec": {**pod["spec"], "terminationGracePeriod": 1}}
        with pytest.raises(jsonschema.ValidationError):
            validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("group", ["head", "worker"])
def test_a_pod_drains_within_its_grace(group: str) -> None:
    spec = groups()[group]["template"]["spec"]
    (container,) = spec["containers"]
    if group == "worker":
        *script, drain_s = container["lifecycle"]["preStop"]["exec"]["command"]
        assert script == ["/opt/forage/deploy/drain.sh"]
        assert int(drain_s) < spec["terminationGracePeriodSeconds"]
    script = container["command"][0].replace("/opt/forage", str(REPOSITORY))
    assert Path(script).is_file()


@pytest.mark.parametrize("group", ["head", "worker"])
def test_a_pod_has_the_token_from_a_secret(group: str) -> None:
    (container,) = groups()[group]["template"]["spec"]["containers"]
    environment = {each["name"]: each for each in container["env"]}
    assert "secretKeyRef" in environment["RAY_AUTH_TOKEN"]["valueFrom"]
    assert environment["RAY_AUTH_MODE"]["value"] == "token"


def _locked(package: str) -> str:
    lines = (REPOSITORY / "requirements" / "gpu.lock").read_text().splitlines()
    return next(
        line.partition("==")[2].split()[0] for line in lines if line.startswith(f"{package}==")
    )
