"""Where a Pod finds rfork's files, and how Python finds them."""

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


def test_files_by_an_init_container() -> None:
    """It copies them as nobody in particular, into a volume that Python finds them in."""
    made = injected_pod(pod(container(env=[{"name": "PYTHONPATH", "value": "/app"}])), files="init")
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


def test_files_by_an_image_volume() -> None:
    """The whole image, read-only: its files lie where they lie in it."""
    made = injected_pod(pod(), files="image")
    assert [{"name": "rfork-files", "image": {"reference": "registry/rfork:1"}}] == made["spec"]["volumes"]
    assert [{"name": "rfork-files", "mountPath": "/opt/rfork", "readOnly": True}] == engine_container(made)[
        "volumeMounts"
    ]
    assert "/opt/rfork/opt/rfork/files/path" == engine_env(made)["PYTHONPATH"]
    assert "initContainers" not in made["spec"]


def test_a_pod_that_runs_as_root_copies_as_another() -> None:
    """Or the kubelet would refuse a container that must not be root."""
    made = injected_pod(pod(securityContext={"runAsUser": 0}), files="init")
    assert 65532 == made["spec"]["initContainers"][0]["securityContext"]["runAsUser"]


def test_files_without_an_image_are_refused() -> None:
    """The engine would not start: it does not know the load format."""
    with pytest.raises(SettingsError, match="no image of rfork's files"):
        inject_pod(pod(annotations={names.FILES: "init"}), webhook_settings())


@pytest.mark.parametrize(
    ("document", "settings"),
    [
        (pod(), webhook_settings(injection_mode="image", image_volumes=False)),
        (pod(annotations={names.FILES: "image"}), webhook_settings(injection_mode="init")),
    ],
)
def test_an_image_volume_where_the_cluster_knows_none_is_refused(
    document: Document, settings: KubernetesSettings
) -> None:
    """By setting or annotation: such a Pod would be refused, or start without the volume."""
    with pytest.raises(SettingsError, match="as an image volume, which this cluster is not said to know"):
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
def test_pythons_path_goes_on(existing_variable: Document, expected: list[Document]) -> None:
    """Behind rfork's files; from elsewhere it is referred to."""
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
def test_plugin_lists_let_rfork_through(arguments: list[str], variable: Document, expected: str) -> None:
    """The engine's own, as it reads it."""
    made = injected_pod(pod(container(command=arguments, env=[variable])))
    assert expected == engine_env(made)[variable["name"]]
