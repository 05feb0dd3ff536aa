"""Parsing of a Pod's request, and reasons for rejection."""

from __future__ import annotations

import pytest
from hypothesis import given
from pydantic import TypeAdapter

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.pod_request import (
    InjectionRequest,
    is_enabled,
    parse_request,
    rejection_reason,
)
from rfork.errors import SettingsError
from rfork.schema import SanitizedText
from tests.unit.planner.integrations.kubernetes.pod_documents import (
    ANY_JSON,
    SGLANG,
    VLLM,
    Document,
    container,
    damaged_pods,
    labelled_pods,
    pod,
)

PROXY = {"name": "istio-proxy", "image": "istio/proxyv2:1", "args": ["proxy", "sidecar"]}
IMAGE = "vllm/vllm-openai:v0.11"

ENGINES = [
    ("vllm serve", pod(), "engine", "vllm"),
    ("command and args", pod(container(command=["vllm"], args=["serve", "m"])), "engine", "vllm"),
    ("args only, with an entrypoint that runs them", pod(container(args=SGLANG)), "engine", "sglang"),
    (
        "a path, references in arguments",
        pod(container(command=["/opt/bin/vllm", "serve", "$(MODEL)"])),
        "engine",
        "vllm",
    ),
    ("with env", pod(container(command=["env", "A=B", *VLLM])), "engine", "vllm"),
    ("with the load format", pod(container(command=[*VLLM, "--load-format=rfork"])), "engine", "vllm"),
    ("with a sidecar", pod(dict(PROXY), container("app", command=SGLANG)), "app", "sglang"),
    (
        "two engines, one named",
        pod(container("a"), container("b", command=SGLANG), annotations={names.CONTAINER: "b"}),
        "b",
        "sglang",
    ),
    ("vLLM's own image", pod(container(image=IMAGE, args=["--model", "m"])), "engine", "vllm"),
    (
        "model as first argument, with a sidecar",
        pod(container(image=f"mirror:5000/{IMAGE}@sha256:0", args=["m"]), dict(PROXY)),
        "engine",
        "vllm",
    ),
    (
        "an image named sglang",
        pod(container(image="lmsysorg/sglang:v1", args=["--model-path", "m"])),
        "engine",
        "sglang",
    ),
    (
        "the image's command, with annotation",
        pod(container(args=["--model", "m"]), annotations={names.ENGINE: "vllm"}),
        "engine",
        "vllm",
    ),
    (
        "the image's command, with a later sidecar",
        pod(
            container(args=["m"]),
            dict(PROXY),
            annotations={names.ENGINE: "vllm", "kubectl.kubernetes.io/default-container": "engine"},
        ),
        "engine",
        "vllm",
    ),
    (
        "a custom program",
        pod(container(command=["python3", "train.py"]), annotations={names.ENGINE: "pytorch"}),
        "engine",
        "pytorch",
    ),
    (
        "a shell, environment only",
        pod(container(command=["sh", "-c", "vllm serve"]), annotations={names.ENGINE: "pytorch"}),
        "engine",
        "pytorch",
    ),
]


@pytest.mark.parametrize(("document", "name", "engine"), [row[1:] for row in ENGINES], ids=[row[0] for row in ENGINES])
def test_the_engine_and_its_container_are_found(document: Document, name: str, engine: str) -> None:
    """By the annotation, by the command, by the image, or because it is the only container."""
    found = parse_request(document)
    assert isinstance(found, InjectionRequest), found
    assert "llama" == found.model
    assert name == found.container
    assert engine == found.engine


REFUSALS = [
    (
        "an unknown command",
        pod(container(command=["./serve"])),
        "container engine: the command starts neither vLLM nor SGLang: ./serve: write the engine's command",
    ),
    (
        "a shell",
        pod(container(command=["/bin/sh", "-c"], args=["vllm serve m"])),
        "container engine: the command starts a shell (/bin/sh): commands inside it cannot be changed: write",
    ),
    (
        "a shell in vLLM's image",
        pod(container(image=IMAGE, args=["bash", "-c", "vllm serve m"])),
        "container engine: the command starts a shell (bash)",
    ),
    (
        "a shell, with annotation",
        pod(container(args=["sh", "x"]), annotations={names.ENGINE: "vllm"}),
        "container engine: the command starts a shell (sh)",
    ),
    (
        "a program in SGLang's image",
        pod(container(image="lmsysorg/sglang", args=["python3", "x.py"])),
        "container engine: the command starts neither",
    ),
    (
        "a script, with annotation",
        pod(container(command=["/start.sh"], args=["m"]), annotations={names.ENGINE: "vllm"}),
        "container engine: the command starts neither vLLM nor SGLang: /start.sh m",
    ),
    (
        "no command and no annotation",
        pod({"name": "engine", "image": "x"}),
        "container engine: it uses the image's own command",
    ),
    (
        "the image's command and arguments",
        pod({"name": "engine"}, annotations={names.ENGINE: "vllm"}),
        "container engine has neither command nor args",
    ),
    (
        "two engines",
        pod(container("a"), container("b")),
        f"several containers start an engine (a and b): name one of them in the annotation {names.CONTAINER}",
    ),
    (
        "two containers with vLLM's image",
        pod(container("a", image=IMAGE, args=["m"]), container("b", image=IMAGE, args=["m"])),
        "several containers start an engine (a and b)",
    ),
    (
        "no engine in two containers",
        pod(container("a", command=["x"]), container("b", command=["y"])),
        "no command of the containers a, b starts vLLM or SGLang: name the engine's",
    ),
    ("two equal names", pod(container("a"), container("a", command=["x"])), "two containers have the same name (a)"),
    (
        "a shell and a sidecar",
        pod(container("app", command=["sh", "-c", "vllm serve m"]), dict(PROXY)),
        "no command of the containers app, istio-proxy starts vLLM or SGLang (app: the command starts",
    ),
    (
        "two candidates",
        pod(container("a"), container("b"), annotations={names.ENGINE: "pytorch"}),
        "the engine's container is ambiguous: a, b",
    ),
    (
        "unknown container",
        pod(annotations={names.CONTAINER: "x"}),
        f"there is no container x: {names.CONTAINER} must name one of engine",
    ),
    (
        "another engine than annotated",
        pod(annotations={names.ENGINE: "sglang"}),
        f"container engine starts vllm, not sglang: correct {names.ENGINE}",
    ),
    (
        "an unknown engine",
        pod(annotations={names.ENGINE: "tgi"}),
        f"{names.ENGINE} is tgi: it must be one of vllm, sglang, pytorch",
    ),
    (
        "another load format",
        pod(container(command=[*VLLM, "--load-format", "dummy"])),
        "container engine sets --load-format dummy: remove --load-format",
    ),
    (
        "an invalid switch",
        pod(annotations={names.FAIL_IF_NOT_FORKED: "yes"}),
        f"{names.FAIL_IF_NOT_FORKED} is yes: it must be one of true, false",
    ),
    ("an invalid value of inject", pod(annotations={names.INJECT: "no"}), f"{names.INJECT} is no"),
    ("an unknown injection mode", pod(annotations={names.INJECTION_MODE: "pvc"}), f"{names.INJECTION_MODE} is pvc"),
    ("an unknown same-host mode", pod(annotations={names.SAME_HOST: "maybe"}), f"{names.SAME_HOST} is maybe"),
    (
        "invalid seconds",
        pod(annotations={names.DRAIN_TIMEOUT_S: "1m"}),
        f"{names.DRAIN_TIMEOUT_S} is 1m: it must be seconds",
    ),
    ("infinite seconds", pod(annotations={names.DRAIN_TIMEOUT_S: "inf"}), f"{names.DRAIN_TIMEOUT_S} is inf"),
    ("not a number", pod(annotations={names.DRAIN_TIMEOUT_S: "nan"}), f"{names.DRAIN_TIMEOUT_S} is nan"),
    ("an empty model name", pod(annotations={names.MODEL_NAME: ""}), f"{names.MODEL_NAME} is not a valid model name"),
    (
        "a model name with a line break",
        pod(annotations={names.MODEL_NAME: "a\nb"}),
        f"{names.MODEL_NAME} is not a valid model name",
    ),
    (
        "a snapshot with a line break",
        pod(annotations={names.SNAPSHOT: "s3://a\nb"}),
        f"{names.SNAPSHOT} is not a URI",
    ),
    ("Windows", pod(os={"name": "windows"}), "rfork runs on Linux only"),
    (
        "python -I",
        pod(container(command=["python3", "-I", "-m", "sglang.launch_server"])),
        "container engine: python -I ignores PYTHONPATH",
    ),
    ("no containers", {**pod(), "spec": {"containers": []}}, "malformed Pod: spec.containers:"),
    ("no spec", {"metadata": {"labels": {names.MODEL: "m"}}}, "malformed Pod: spec:"),
    (
        "a command that is not a list",
        pod(container(command="vllm serve m")),
        "malformed Pod: spec.containers.0.command:",
    ),
    (
        "an empty version",
        pod(annotations={names.VERSION: ""}),
        "rfork.dev/version is not a valid weights version: use 1 to 256 printable characters",
    ),
    (
        "a version with a line break",
        pod(annotations={names.VERSION: "v1\nv2"}),
        "rfork.dev/version is not a valid weights version: use 1 to 256 printable characters",
    ),
    (
        "a version that is too long",
        pod(annotations={names.VERSION: "v" * 257}),
        "rfork.dev/version is not a valid weights version: use 1 to 256 printable characters",
    ),
    (
        "a name that is a number",
        pod({**container(), "name": 5}),
        "malformed Pod: spec.containers.0.name:",
    ),
]


@pytest.mark.parametrize(("document", "reason"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_a_rejection_has_a_reason_and_a_remedy(document: Document, reason: str) -> None:
    """In one line."""
    with pytest.raises(SettingsError) as caught:
        parse_request(document)
    found = rejection_reason(caught.value)
    assert reason == found[: len(reason)]
    assert 1 == len(found.splitlines())


def test_annotations_are_parsed() -> None:
    """All of them; the annotation with the model's name overrides the label."""
    annotations = {
        names.MODEL_NAME: "org/llama", names.SNAPSHOT: "s3://b/$(M)", names.INJECTION_MODE: "init",
        names.SAME_HOST: "ipc", names.DRAIN_TIMEOUT_S: "2.5", names.FAIL_IF_NOT_FORKED: "true", names.INJECT: "true",
        names.VERSION: "2026-11-23",
    }  # fmt: skip
    expected = InjectionRequest(
        "org/llama",
        "engine",
        "vllm",
        snapshot="s3://b/$(M)",
        injection_mode="init",
        same_host="ipc",
        drain_timeout_s=2.5,
        fail_if_not_forked=True,
        version="2026-11-23",
    )
    assert expected == parse_request(pod(annotations=annotations))


@pytest.mark.parametrize(
    ("labels", "annotations", "expected"),
    [
        ({}, {}, None),
        ({}, {names.VERSION: "v" * 256}, "v" * 256),
        ({names.VERSION: "v1"}, {}, "v1"),
        ({names.VERSION: "v1"}, {names.VERSION: "v2"}, "v2"),
    ],
)
def test_the_version_annotation_overrides_the_label(
    labels: dict[str, str], annotations: dict[str, str], expected: str | None
) -> None:
    """A Pod without either states no version."""
    document = pod(annotations=annotations)
    document["metadata"]["labels"] |= labels
    found = parse_request(document)
    assert isinstance(found, InjectionRequest)
    assert expected == found.version


@pytest.mark.parametrize(
    "document",
    [
        {},
        None,
        [],
        {"metadata": None},
        {"metadata": {"labels": None}},
        {"metadata": {"labels": {"app": "x"}}},
        {"metadata": {"labels": "rfork.dev/model"}},
        pod(annotations={names.INJECT: "false"}),
        pod(annotations={"kubernetes.io/config.mirror": "0"}),
    ],
)
def test_pods_without_a_request_are_ignored(document: object) -> None:
    """Without the label, with ``inject: false``, and mirrors of static Pods: no reason is reported."""
    assert not is_enabled(document)
    assert parse_request(document) is None


@given(damaged_pods() | labelled_pods() | ANY_JSON)
def test_no_pod_raises_an_unexpected_error(document: object) -> None:
    """A rejection is one printable line."""
    try:
        parse_request(document)
    except SettingsError as error:
        reason = rejection_reason(error)
        assert TypeAdapter(SanitizedText).validate_python(reason) == reason != ""
