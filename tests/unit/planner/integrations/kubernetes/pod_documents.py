"""Pods as the API server sends them to the webhook, and malformed Pods."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from planner.integrations.kubernetes import names
from rfork.settings import KubernetesSettings

Document = dict[str, Any]

PLANNER = "http://rfork.rfork-system:8700"
PROBE = {"httpGet": {"path": "/health", "port": 8000}}
VLLM = ["vllm", "serve", "org/llama"]
SGLANG = ["python3", "-m", "sglang.launch_server", "--model-path", "org/llama"]


def webhook_settings(**options: object) -> KubernetesSettings:
    """Return settings of the webhook; with an injection mode they include an image."""
    image = {} if options.get("injection_mode", "none") == "none" else {"injection_image": "registry/rfork:1"}
    known = {"image_volumes": True} if options.get("injection_mode") == "image" else {}
    return KubernetesSettings(**{**image, **known, **options})  # type: ignore[arg-type]  # each test names options


def container(name: str = "engine", **more: object) -> Document:
    """Return a container that serves with vLLM and has a readinessProbe by default."""
    more.setdefault("readinessProbe", PROBE)
    if "command" not in more and "args" not in more:
        more["command"] = list(VLLM)
    return {
        "name": name,
        "image": "registry/engine:1",
        **{key: more[key] for key in more if more[key] is not None},
    }


def pod(*containers: Document, annotations: dict[str, str] | None = None, **spec: object) -> Document:
    """Return a Pod with the label and one container, which serves by default."""
    metadata: Document = {
        "generateName": "llama-7d9-",
        "namespace": "serving",
        "labels": {names.MODEL: "llama"},
    }
    if annotations is not None:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": list(containers) or [container()], **spec},
    }


def defaulted(document: Document) -> Document:
    """Add the API server's defaults, as between two webhooks."""
    spec = document["spec"]
    for each in [*spec.get("initContainers", ()), *spec["containers"]]:
        each.setdefault("imagePullPolicy", "IfNotPresent")
        each.setdefault("terminationMessagePath", "/dev/termination-log")
        for variable in each.get("env", ()):
            if "fieldRef" in variable.get("valueFrom", {}):
                variable["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")
    for volume in spec.get("volumes", ()):
        if "secret" in volume:
            volume["secret"].setdefault("defaultMode", 0o644)
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    return document


TEXTS = st.text(max_size=8) | st.text(alphabet=st.characters(), max_size=4)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
WORDS = st.sampled_from(
    ["vllm", "sglang", "serve", "python3", "-m", "-c", "sglang.launch_server", "sh", "bash", "--load-format",
     "--load-format=rfork", "auto", "rfork", "$(MODEL)", "", "/usr/bin/vllm", "--model", "env", "\x00"]
) | TEXTS  # fmt: skip
LISTS = st.none() | st.lists(WORDS, max_size=5)
ANNOTATIONS = st.dictionaries(
    st.sampled_from(
        [names.MODEL_NAME, names.CONTAINER, names.ENGINE, names.INJECT, names.SNAPSHOT, names.INJECTION_MODE,
         names.SAME_HOST, names.DRAIN_TIMEOUT_S, names.FAIL_IF_NOT_FORKED, names.INJECTED, names.NOTES, names.REJECTED]
    ),
    st.sampled_from(["vllm", "sglang", "pytorch", "true", "false", "ipc", "none", "init", "image", "a", "b",
                     "5", "-1", "nan", "1e9", "org/model", "s3://x/$(Y)", ""]) | TEXTS,
    max_size=4,
)  # fmt: skip
VARIABLES = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(
            ["RFORK_PLANNER", "RFORK_REPLICA", "RFORK_POD", "RFORK_DRAIN_TIMEOUT_S", "PYTHONPATH", "VLLM_PLUGINS",
             "SGLANG_PLUGINS", "HOME"])},
        optional={
            "value": st.none() | st.sampled_from(["", "a", "/opt/rfork/path", "x:y", "rfork", "a, b"]),
            "valueFrom": st.none() | st.just({"configMapKeyRef": {"name": "m", "key": "k"}}),
        },
    ),
    max_size=4,
)  # fmt: skip
MOUNTS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["data", "rfork-files", "rfork-sockets", "rfork-tls"]),
            "mountPath": st.sampled_from(["/data", "/opt/rfork", "/opt/rfork/", "/run/rfork", "/etc/rfork/tls"]),
        }
    ),
    max_size=3,
)
CONTAINERS = st.fixed_dictionaries(
    {"name": st.sampled_from("ab")},
    optional={
        "image": st.none() | st.sampled_from(["vllm/vllm-openai:v1", "lmsysorg/sglang@sha256:0", "x:1/y", ""]),
        "command": st.sampled_from([VLLM, SGLANG]) | LISTS,
        "args": LISTS,
        "env": st.none() | VARIABLES,
        "volumeMounts": st.none() | MOUNTS,
        "lifecycle": st.none()
        | st.just({"preStop": {"exec": {"command": ["sleep", "5"]}}})
        | st.just({"postStart": {"exec": {"command": ["true"]}}}),
    },
)
SPECS = st.fixed_dictionaries(
    {"containers": st.lists(CONTAINERS, min_size=1, max_size=2)},
    optional={
        "initContainers": st.none() | st.lists(CONTAINERS, max_size=1),
        "volumes": st.none()
        | st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["data", "rfork-files", "rfork-sockets"])}),
            max_size=2,
        ),
        "readinessGates": st.none() | st.just([{"conditionType": "other"}]),
        "terminationGracePeriodSeconds": st.none() | st.integers(0, 900),
        "securityContext": st.none() | st.just({"runAsUser": 0}),
        "hostUsers": st.booleans(),
        "shareProcessNamespace": st.booleans(),
    },
)


@st.composite
def labelled_pods(draw: st.DrawFn) -> Document:
    """Well-formed Pods that request rfork in valid and invalid ways."""
    metadata: Document = {"labels": {names.MODEL: draw(st.sampled_from(["llama", "a$(B)", ""]))}}
    metadata["annotations"] = draw(st.none() | ANNOTATIONS)
    return {"metadata": metadata, "spec": draw(SPECS)}


@st.composite
def damaged_pods(draw: st.DrawFn) -> object:
    """A Pod with one part, at any place, replaced by any JSON."""
    # Copy it: `st.just` returns the same object for all examples, and it is modified below.
    document: Any = copy.deepcopy(draw(labelled_pods()))
    at: Any = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return document
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and draw(st.booleans()):
            at = at[key]
            continue
        at[key] = draw(ANY_JSON)
        return document


SETTINGS = st.builds(
    webhook_settings,
    injection_image=st.just("registry/rfork:1"),
    injection_mode=st.sampled_from(["none", "init", "image"]),
    tls_secret=st.sampled_from(["", "rfork-tls"]),
    image_volumes=st.just(True),
    readiness_gate=st.booleans(),
    same_host=st.booleans(),
    drain_timeout_s=st.sampled_from([0.0, 0.5, 60.0]),
)
