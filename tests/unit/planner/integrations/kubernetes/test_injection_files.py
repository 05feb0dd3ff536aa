"""Rfork's files in a Pod, and Python's path to them."""

from __future__ import annotations

import pytest

from planner.integrations.kubernetes import names
from rfork.errors import SettingsError
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.injected_pods import (
    engine_container,
    engine_env,
    inject_pod,
    injected_pod,
)
from tests.unit.planner.integrations.kubernetes.pod_documents import (
    SGLANG,
    VLLM,
    Document,
    container,
    pod,
    webhook_settings,
)


def test_an_init_container_copies_the_files() -> None:
    """It runs as a non-root user and copies them to a volume in Python's path."""
    made = injected_pod(pod(container(env=[{"name": "PYTHONPATH", "value": "/app"}])), injection_mode="init")
    small = {"cpu": "100m", "memory": "64Mi"}
    expected = {
        "name": "rfork-files",
        "image": "registry/rfork:1",
        "command": ["cp", "-R", "/opt/rfork/files/.", "/target"],
        "resources": {"requests": small, "limits": small},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [{"name": "rfork-files", "mountPath": "/target"}],
    }
    assert [expected] == made["spec"]["initContainers"]
    assert [{"name": "rfork-files", "emptyDir": {}}] == made["spec"]["volumes"]
    assert [{"name": "rfork-files", "mountPath": "/opt/rfork"}] == engine_container(made)["volumeMounts"]
    assert "/opt/rfork/path:/app" == engine_env(made)["PYTHONPATH"]
    assert ["/bin/sh", "/opt/rfork/bin/rfork", "drain", "--own", "--wait", "60"] == (
        engine_container(made)["lifecycle"]["preStop"]["exec"]["command"]
    )


def test_an_image_volume_is_mounted_read_only() -> None:
    """The complete image is mounted read-only."""
    made = injected_pod(pod(), injection_mode="image")
    assert [{"name": "rfork-files", "image": {"reference": "registry/rfork:1"}}] == made["spec"]["volumes"]
    assert [{"name": "rfork-files", "mountPath": "/opt/rfork", "readOnly": True}] == engine_container(made)[
        "volumeMounts"
    ]
    assert "/opt/rfork/opt/rfork/files/path" == engine_env(made)["PYTHONPATH"]
    assert "initContainers" not in made["spec"]


def test_the_init_container_of_a_root_pod_has_its_own_user() -> None:
    """Otherwise the kubelet would reject a container that must not run as root."""
    made = injected_pod(pod(securityContext={"runAsUser": 0}), injection_mode="init")
    assert 65532 == made["spec"]["initContainers"][0]["securityContext"]["runAsUser"]


def test_files_without_an_image_are_rejected() -> None:
    """The engine would not start, because it does not know the load format."""
    with pytest.raises(SettingsError, match="no image with rfork's files"):
        inject_pod(pod(annotations={names.INJECTION_MODE: "init"}), webhook_settings())


@pytest.mark.parametrize(
    ("document", "settings"),
    [
        (pod(), webhook_settings(injection_mode="image", image_volumes=False)),
        (pod(annotations={names.INJECTION_MODE: "image"}), webhook_settings(injection_mode="init")),
    ],
)
def test_an_image_volume_is_rejected_if_unsupported(document: Document, settings: KubernetesSettings) -> None:
    """By setting or annotation: the Pod would be rejected, or start without the volume."""
    with pytest.raises(SettingsError, match="this cluster is not known to support image volumes"):
        inject_pod(document, settings)


@pytest.mark.parametrize(
    ("existing_variable", "expected"),
    [
        ({"name": "PYTHONPATH"}, [{"name": "PYTHONPATH", "value": "/opt/rfork/path"}]),
        (
            {"name": "PYTHONPATH", "value": "$(A):/b"},
            [{"name": "PYTHONPATH", "value": "/opt/rfork/path:$(A):/b"}],
        ),
        (
            {"name": "PYTHONPATH", "value": "/a:/opt/rfork/path"},
            [{"name": "PYTHONPATH", "value": "/a:/opt/rfork/path"}],
        ),
        (
            {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
            [
                {"name": "RFORK_OWN_PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
                {"name": "PYTHONPATH", "value": "/opt/rfork/path:$(RFORK_OWN_PYTHONPATH)"},
            ],
        ),
    ],
)
def test_the_python_path_is_extended(existing_variable: Document, expected: list[Document]) -> None:
    """The existing value follows rfork's files; a valueFrom is referenced."""
    made, _ = inject_pod(pod(container(env=[existing_variable])), webhook_settings(injection_mode="init"))
    assert expected == [each for each in engine_container(made)["env"] if "PYTHONPATH" in each["name"]]


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        (VLLM, {"name": "VLLM_PLUGINS", "value": "lora"}, "lora,rfork"),
        (VLLM, {"name": "VLLM_PLUGINS"}, "rfork"),
        (VLLM, {"name": "VLLM_PLUGINS", "value": "rfork,lora"}, "rfork,lora"),
        (VLLM, {"name": "SGLANG_PLUGINS", "value": "lora"}, "lora"),
        (SGLANG, {"name": "SGLANG_PLUGINS", "value": "lora"}, "lora,rfork"),
        (SGLANG, {"name": "SGLANG_PLUGINS", "value": ""}, ""),
    ],
)
def test_plugin_lists_include_rfork(arguments: list[str], variable: Document, expected: str) -> None:
    """In the engine's own format."""
    made = injected_pod(pod(container(command=arguments, env=[variable])))
    assert expected == engine_env(made)[variable["name"]]
