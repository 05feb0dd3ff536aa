"""Injection into a Pod's document."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate
import pytest

import rfork
from planner.integrations.kubernetes import names
from rfork.settings import InstanceSettings
from tests.unit.planner.integrations.kubernetes.injected_pods import (
    engine_container,
    engine_env,
    field_ref,
    inject_pod,
    injected_pod,
)
from tests.unit.planner.integrations.kubernetes.pod_documents import (
    PLANNER,
    SGLANG,
    VLLM,
    Document,
    container,
    pod,
    webhook_settings,
)


def test_the_default_settings_patch_a_vllm_pod_and_keep_its_values() -> None:
    """All changes of the default settings; existing values stay."""
    before = pod()
    kept = copy.deepcopy(before)
    after = injected_pod(before)
    expected = pod(
        container(
            command=["vllm", "serve", "org/llama", "--load-format", "rfork"],
            env=[
                {"name": "RFORK_PLANNER", "value": PLANNER},
                {"name": "RFORK_MODEL", "value": "llama"},
                {"name": "RFORK_REPLICA", "valueFrom": field_ref("metadata.uid")},
                {"name": "RFORK_POD_NAMESPACE", "valueFrom": field_ref("metadata.namespace")},
                {"name": "RFORK_POD_NAME", "valueFrom": field_ref("metadata.name")},
                {"name": "RFORK_POD", "value": "$(RFORK_POD_NAMESPACE)/$(RFORK_POD_NAME)"},
                {"name": "RFORK_NODE_NAME", "valueFrom": field_ref("spec.nodeName")},
                {"name": "RFORK_BIND", "valueFrom": field_ref("status.podIP")},
                {"name": "RFORK_ADVERTISE", "valueFrom": field_ref("status.podIP")},
                {"name": "RFORK_PEER_PORT", "value": "18700"},
                {"name": "RFORK_HTTP_PORT", "value": "18800"},
                {"name": "RFORK_PORT_RANGE_SIZE", "value": "64"},
                {"name": "RFORK_ZONE", "valueFrom": field_ref("metadata.annotations['rfork.dev/zone']")},
                {"name": "RFORK_RACK", "valueFrom": field_ref("metadata.annotations['rfork.dev/rack']")},
                {"name": "RFORK_NVLINK", "valueFrom": field_ref("metadata.annotations['rfork.dev/nvlink']")},
                {
                    "name": "RFORK_TOKEN",
                    "valueFrom": {"secretKeyRef": {"name": "rfork-instance", "key": "token", "optional": True}},
                },
                {"name": "RFORK_DRAIN_TIMEOUT_S", "value": "0"},
            ],
            lifecycle={"preStop": {"exec": {"command": ["rfork", "drain", "--own", "--wait", "60"]}}},
        ),
        annotations={names.INJECTED: rfork.__version__},
        readinessGates=[{"conditionType": "rfork.dev/weights-ready"}],
        terminationGracePeriodSeconds=90,
    )
    assert expected == after
    assert kept == before


@pytest.mark.parametrize(
    ("container_fields", "expected"),
    [
        ({"command": VLLM}, {"command": [*VLLM, "--load-format", "rfork"]}),
        ({"command": VLLM, "args": ["--x"]}, {"command": VLLM, "args": ["--x", "--load-format", "rfork"]}),
        ({"command": VLLM, "args": []}, {"command": [*VLLM, "--load-format", "rfork"], "args": []}),
        ({"args": SGLANG}, {"args": [*SGLANG, "--load-format", "rfork"]}),
        (
            {"args": ["--model", "m"], "image": "vllm/vllm-openai:v1"},
            {"args": ["--model", "m", "--load-format", "rfork"]},
        ),
        ({"command": [*VLLM, "--load-format=rfork"]}, {"command": [*VLLM, "--load-format=rfork"]}),
    ],
)
def test_the_load_format_is_the_last_argument(container_fields: Document, expected: Document) -> None:
    """In `args`, or in the command if there are none; only once."""
    made = engine_container(injected_pod(pod(container(**container_fields))))
    assert expected == {key: made[key] for key in ("command", "args") if key in made}


def test_pytorch_gets_only_the_environment() -> None:
    """Its command stays; it has the drain hook and the readiness gate."""
    made = injected_pod(pod(container(command=["sh", "-c", "x"]), annotations={names.ENGINE: "pytorch"}))
    assert ["sh", "-c", "x"] == engine_container(made)["command"]
    assert PLANNER == engine_env(made)["RFORK_PLANNER"]


def test_annotations_override_settings() -> None:
    """Snapshot, fail-if-not-forked, same-host, injection mode and drain timeout."""
    annotations = {
        names.MODEL_NAME: "org/$(x)", names.SNAPSHOT: "s3://b/$(MODEL)", names.FAIL_IF_NOT_FORKED: "true",
        names.SAME_HOST: "true", names.INJECTION_MODE: "none", names.DRAIN_TIMEOUT_S: "1.5",
    }  # fmt: skip
    made = injected_pod(
        pod(annotations=annotations, terminationGracePeriodSeconds=10), injection_mode="init", same_host=False
    )
    seen = engine_env(made)
    expected = ("org/$$(x)", "s3://b/$(MODEL)", "1", "/run/rfork", 12, "1.5")
    assert expected == (
        *(seen[f"RFORK_{name}"] for name in ("MODEL", "SNAPSHOT", "FAIL_IF_NOT_FORKED", "UNIX_SOCKET_DIR")),
        made["spec"]["terminationGracePeriodSeconds"],
        engine_container(made)["lifecycle"]["preStop"]["exec"]["command"][-1],
    )
    assert "initContainers" not in made["spec"]
    assert "PYTHONPATH" not in seen


def test_a_stated_version_is_set_verbatim() -> None:
    """References in it are escaped."""
    made = engine_env(injected_pod(pod(annotations={names.VERSION: "v1-$(X)"})))
    assert "v1-$$(X)" == made["RFORK_VERSION"]


def test_a_pod_that_states_no_version_gets_none() -> None:
    """The instance then determines the version from its files."""
    assert "RFORK_VERSION" not in engine_env(injected_pod(pod()))


def test_a_version_set_by_the_container_is_kept() -> None:
    """The Pod's notes name the variable."""
    own = pod(container(env=[{"name": "RFORK_VERSION", "value": "v0"}]), annotations={names.VERSION: "v1"})
    made, notes = inject_pod(own, webhook_settings())
    assert "v0" == engine_env(made)["RFORK_VERSION"]
    assert ("kept as set by the Pod: RFORK_VERSION",) == notes


def test_a_drain_timeout_of_zero_adds_no_hook() -> None:
    """The server then waits for its readers itself, within its grace period."""
    made = injected_pod(pod(), drain_timeout_s=0)
    assert "lifecycle" not in engine_container(made)
    assert "RFORK_DRAIN_TIMEOUT_S" not in engine_env(made)
    assert "terminationGracePeriodSeconds" not in made["spec"]


@pytest.mark.parametrize(
    ("setting", "led", "expected"),
    [(True, True, [names.WEIGHTS_READY]), (True, False, []), (False, True, []), (False, False, [])],
)
def test_the_gate_is_added_only_while_a_controller_leads(setting: bool, led: bool, expected: list[str]) -> None:
    """There is no note about it. On reinjection the Pod keeps its state, regardless of the leader."""
    settings = webhook_settings(readiness_gate=setting)
    once, notes = inject_pod(pod(), settings, led=led)
    assert () == notes
    assert expected == [each["conditionType"] for each in once["spec"].get("readinessGates", ())]
    assert [(once, ())] * 2 == [inject_pod(once, settings, led=later) for later in (True, False)]


def test_a_missing_readiness_probe_is_noted() -> None:
    """Only once; PyTorch programs need none."""
    bare = pod(container(readinessProbe=None))
    note = (
        "container engine has no readinessProbe, so the Pod counts as ready before the engine responds: "
        "add a probe of the engine's /health"
    )
    made, notes = inject_pod(bare, webhook_settings())
    assert (note,) == notes
    assert note == made["metadata"]["annotations"][names.NOTES]
    assert (made, ()) == inject_pod(made, webhook_settings())
    training = pod(container(command=["x"], readinessProbe=None), annotations={names.ENGINE: "pytorch"})
    assert () == inject_pod(training, webhook_settings())[1]


def test_the_files_of_the_tls_secret_are_mounted() -> None:
    """The Secret's three files are mounted; a Pod without the Secret still starts."""
    made = injected_pod(pod(), tls_secret="mtls")
    seen = engine_env(made)
    assert ["/etc/rfork/tls/tls.crt", "/etc/rfork/tls/tls.key", "/etc/rfork/tls/ca.crt"] == [
        seen[f"RFORK_TLS_{name}"] for name in ("CERTIFICATE", "KEY", "CA")
    ]
    assert [{"name": "rfork-tls", "secret": {"secretName": "mtls", "optional": True}}] == made["spec"]["volumes"]


@pytest.mark.parametrize(
    ("annotation", "setting", "spec", "expected"),
    [
        (None, True, {}, (True, None, None)),
        (None, False, {}, (False, None, None)),
        ("false", True, {}, (False, None, None)),
        ("true", False, {}, (True, None, None)),
        ("ipc", False, {}, (True, True, True)),
        ("ipc", False, {"hostUsers": False}, (True, None, None)),
        ("ipc", False, {"shareProcessNamespace": True}, (True, None, None)),
    ],
)
def test_host_namespaces_need_an_annotation(
    annotation: str | None, setting: bool, spec: Document, expected: tuple[bool, Any, Any]
) -> None:
    """Sockets by setting or annotation; host namespaces only by annotation, if the Pod allows them."""
    document = pod(annotations={} if annotation is None else {names.SAME_HOST: annotation}, **spec)
    made, notes = inject_pod(document, webhook_settings(same_host=setting))
    path = {"path": "/run/rfork", "type": "DirectoryOrCreate"}
    sockets = [{"name": "rfork-sockets", "hostPath": path}] == made["spec"].get("volumes")
    assert expected == (sockets, made["spec"].get("hostIPC"), made["spec"].get("hostPID"))
    assert bool(spec) == bool(notes)


def test_existing_values_are_kept_and_noted() -> None:
    """Variables, preStop, gates and volumes. Values equal to ours cause no note."""
    before = pod(
        container(
            env=[
                {"name": "RFORK_NODE_NAME", "valueFrom": field_ref("spec.nodeName")},
                {"name": "RFORK_PLANNER", "value": "http://mine"},
                {"name": "RFORK_REPLICA", "value": "mine"},
                {"name": "VLLM_PLUGINS", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
            ],
            lifecycle={"preStop": {"exec": {"command": ["sleep", "5"]}}},
            volumeMounts=[{"name": "mine", "mountPath": "/opt/rfork/"}],
        ),
        readinessGates=[{"conditionType": names.WEIGHTS_READY}],
        volumes=[{"name": "mine", "emptyDir": {}}, {"name": "rfork-sockets", "emptyDir": {}}],
        terminationGracePeriodSeconds=600,
    )
    after, notes = inject_pod(before, webhook_settings(injection_mode="init", same_host=True))
    kept = ("lifecycle", "readinessGates", "terminationGracePeriodSeconds")
    assert [before["spec"].get(key) for key in kept] == [after["spec"].get(key) for key in kept]
    assert before["spec"]["volumes"] == after["spec"]["volumes"]
    assert engine_container(before)["env"] == engine_container(after)["env"][:4]
    assert engine_container(before)["lifecycle"] == engine_container(after)["lifecycle"]
    assert "initContainers" not in after["spec"]
    assert "RFORK_DRAIN_TIMEOUT_S" not in engine_env(after)
    expected = (
        "the container's own mount at /opt/rfork is used unchanged",
        "container engine has its own preStop hook: call `rfork drain --own` there, or the server "
        "waits for readers only while it shuts down",
        "the Pod's own volume rfork-sockets is used unchanged",
        "kept as set by the Pod: RFORK_PLANNER, RFORK_REPLICA",
        "the Pod sets its own RFORK_REPLICA, so its instances cannot be matched to this Pod",
        "VLLM_PLUGINS is set with valueFrom: it must include rfork",
    )
    assert expected == notes
    assert "\n".join(expected) == after["metadata"]["annotations"][names.NOTES]


def test_each_variable_is_a_valid_setting() -> None:
    """Every name is known and every value is accepted."""
    annotations = {names.SNAPSHOT: "s3://b/m", names.FAIL_IF_NOT_FORKED: "true"}
    made = injected_pod(pod(annotations=annotations), tls_secret="tls", same_host=True)
    known = {f"RFORK_{name}".upper() for name in InstanceSettings.model_fields}
    helpers = {"RFORK_POD_NAMESPACE", "RFORK_POD_NAME"}
    tls = {"RFORK_TLS_CERTIFICATE", "RFORK_TLS_KEY", "RFORK_TLS_CA"}
    assert set() == set(engine_env(made)) - known - helpers - tls


@pytest.mark.parametrize(
    ("version", "files"),
    [("1.37", "none"), ("1.37", "init"), ("1.37", "image"), ("1.25", "init"), ("1.25", "none")],
)
@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_the_result_matches_kubernetes_schemas(version: str, files: str, engine: list[str]) -> None:
    """Of the newest Kubernetes and, without image volumes, of the oldest one with published schemas."""
    annotations = {names.SAME_HOST: "ipc", names.SNAPSHOT: "s3://b/m", names.FAIL_IF_NOT_FORKED: "true"}
    document = pod(container(command=engine), {"name": "b", "image": "b"}, annotations=annotations)
    made = injected_pod(document, injection_mode=files, tls_secret="mtls")
    assert version == kubernetes_validate.validate(made, version, strict=True)
