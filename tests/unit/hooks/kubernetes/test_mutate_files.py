"""Where a Pod finds rfork's files, and how Python finds them."""

from __future__ import annotations

import pytest

from planner.hooks.kubernetes import names
from rfork.errors import SettingsError
from rfork.settings import HookSettings
from tests.unit.hooks.kubernetes.changed import change, engine_of, environment_of, injected
from tests.unit.hooks.kubernetes.documents import SGLANG, VLLM, Document, container, hook, pod


def test_files_by_an_init_container() -> None:
    """It copies them as nobody in particular, into a volume that Python finds them in."""
    made = injected(pod(container(env=[{"name": "PYTHONPATH", "value": "/app"}])), files="init")
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
    assert [{"name": "rfork-files", "mountPath": "/opt/rfork"}] == engine_of(made)["volumeMounts"]
    assert "/opt/rfork/path:/app" == environment_of(made)["PYTHONPATH"]
    assert ["/bin/sh", "/opt/rfork/bin/rfork", "drain", "--own", "--wait", "60"] == (
        engine_of(made)["lifecycle"]["preStop"]["exec"]["command"]
    )


def test_files_by_an_image_volume() -> None:
    """The whole image, read-only: its files lie where they lie in it."""
    made = injected(pod(), files="image")
    assert [{"name": "rfork-files", "image": {"reference": "registry/rfork:1"}}] == made["spec"]["volumes"]
    assert [{"name": "rfork-files", "mountPath": "/opt/rfork", "readOnly": True}] == engine_of(made)[
        "volumeMounts"
    ]
    assert "/opt/rfork/opt/rfork/files/path" == environment_of(made)["PYTHONPATH"]
    assert "initContainers" not in made["spec"]


def test_a_pod_that_runs_as_root_copies_as_another() -> None:
    """Or the kubelet would refuse a container that must not be root."""
    made = injected(pod(securityContext={"runAsUser": 0}), files="init")
    assert 65532 == made["spec"]["initContainers"][0]["securityContext"]["runAsUser"]


def test_files_without_an_image_are_refused() -> None:
    """The engine would not start: it does not know the load format."""
    with pytest.raises(SettingsError, match="no image of rfork's files"):
        change(pod(annotations={names.FILES: "init"}), hook())


@pytest.mark.parametrize(
    ("document", "settings"),
    [
        (pod(), hook(files="image", image_volumes=False)),
        (pod(annotations={names.FILES: "image"}), hook(files="init")),
    ],
)
def test_an_image_volume_where_the_cluster_knows_none_is_refused(
    document: Document, settings: HookSettings
) -> None:
    """By setting or annotation: such a Pod would be refused, or start without the volume."""
    with pytest.raises(SettingsError, match="as an image volume, which this cluster is not said to know"):
        change(document, settings)


@pytest.mark.parametrize(
    ("given_variable", "expected"),
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
def test_pythons_path_goes_on(given_variable: Document, expected: list[Document]) -> None:
    """Behind rfork's files; from elsewhere it is referred to."""
    made, _ = change(pod(container(env=[given_variable])), hook(files="init"))
    assert expected == [each for each in engine_of(made)["env"] if "PYTHONPATH" in each["name"]]


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        (VLLM, {"name": "VLLM_PLUGINS", "value": "lora"}, "lora,rfork"),
        (VLLM, {"name": "VLLM_PLUGINS"}, "rfork"),
        (VLLM, {"name": "VLLM_PLUGINS", "value": "rfork,lora"}, "rfork,lora"),
        (VLLM, {"name": "SGLANG_PLUGINS", "value": "lora"}, "lora"),
        (SGLANG, {"name": "SGLANG_PLUGINS", "value": "lora"}, "lora,rfork"),
        (SGLANG, {"name": "SGLANG_PLUGINS", "value": ""}, ""),
    ],
)
def test_plugin_lists_let_rfork_through(words: list[str], variable: Document, expected: str) -> None:
    """The engine's own, as it reads it."""
    made = injected(pod(container(command=words, env=[variable])))
    assert expected == environment_of(made)[variable["name"]]
