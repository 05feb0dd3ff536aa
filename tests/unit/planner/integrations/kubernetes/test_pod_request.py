"""What a Pod asks of rfork, and why it cannot have it."""

from __future__ import annotations

import pytest
from hypothesis import given
from pydantic import TypeAdapter

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.pod_request import (
    InjectionRejected,
    InjectionRequest,
    is_enabled,
    parse_request,
)
from rfork.schema.types import SanitizedText
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
    ("command and args together", pod(container(command=["vllm"], args=["serve", "m"])), "engine", "vllm"),
    ("args alone, behind an entrypoint that runs them", pod(container(args=SGLANG)), "engine", "sglang"),
    (
        "a path, references in arguments",
        pod(container(command=["/opt/bin/vllm", "serve", "$(MODEL)"])),
        "engine",
        "vllm",
    ),
    ("behind env", pod(container(command=["env", "A=B", *VLLM])), "engine", "vllm"),
    ("the load format is there", pod(container(command=[*VLLM, "--load-format=rfork"])), "engine", "vllm"),
    ("a sidecar beside it", pod(dict(PROXY), container("app", command=SGLANG)), "app", "sglang"),
    (
        "two engines, one named",
        pod(container("a"), container("b", command=SGLANG), annotations={names.CONTAINER: "b"}),
        "b",
        "sglang",
    ),
    ("vLLM's own image", pod(container(image=IMAGE, args=["--model", "m"])), "engine", "vllm"),
    (
        "its model first, a sidecar",
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
        "the image's own, as annotated",
        pod(container(args=["--model", "m"]), annotations={names.ENGINE: "vllm"}),
        "engine",
        "vllm",
    ),
    (
        "the same, with a sidecar that came later",
        pod(
            container(args=["m"]),
            dict(PROXY),
            annotations={names.ENGINE: "vllm", "kubectl.kubernetes.io/default-container": "engine"},
        ),
        "engine",
        "vllm",
    ),
    (
        "a program of one's own",
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
    """By the annotation, by the command, by the image, or because there is no other."""
    found = parse_request(document)
    assert isinstance(found, InjectionRequest), found
    assert ("llama", name, engine) == (found.model, found.container, found.engine)


REFUSALS = [
    (
        "an unknown command",
        pod(container(command=["./serve"])),
        "container engine: the command starts neither vLLM nor SGLang: ./serve: write the engine's own",
    ),
    (
        "a shell",
        pod(container(command=["/bin/sh", "-c"], args=["vllm serve m"])),
        "container engine: the command is a shell's (/bin/sh): what it starts cannot be changed: write",
    ),
    (
        "a shell in vLLM's image",
        pod(container(image=IMAGE, args=["bash", "-c", "vllm serve m"])),
        "container engine: the command is a shell's (bash)",
    ),
    (
        "a shell, whatever is annotated",
        pod(container(args=["sh", "x"]), annotations={names.ENGINE: "vllm"}),
        "container engine: the command is a shell's (sh)",
    ),
    (
        "a program in SGLang's image",
        pod(container(image="lmsysorg/sglang", args=["python3", "x.py"])),
        "container engine: the command starts neither",
    ),
    (
        "a script, though an engine is annotated",
        pod(container(command=["/start.sh"], args=["m"]), annotations={names.ENGINE: "vllm"}),
        "container engine: the command starts neither vLLM nor SGLang: /start.sh m",
    ),
    (
        "nothing is said",
        pod({"name": "engine", "image": "x"}),
        "container engine: its command is the image's own",
    ),
    (
        "the image's own command and arguments",
        pod({"name": "engine"}, annotations={names.ENGINE: "vllm"}),
        "container engine has neither command nor args",
    ),
    (
        "two engines",
        pod(container("a"), container("b")),
        f"several containers start an engine (a and b): name one of them in the annotation {names.CONTAINER}",
    ),
    (
        "two of vLLM's images",
        pod(container("a", image=IMAGE, args=["m"]), container("b", image=IMAGE, args=["m"])),
        "several containers start an engine (a and b)",
    ),
    (
        "none of two",
        pod(container("a", command=["x"]), container("b", command=["y"])),
        "none of the containers a, b starts vLLM or SGLang by its command: name the engine's",
    ),
    ("two of one name", pod(container("a"), container("a", command=["x"])), "two of the containers a have"),
    (
        "a shell beside a sidecar",
        pod(container("app", command=["sh", "-c", "vllm serve m"]), dict(PROXY)),
        "none of the containers app, istio-proxy starts vLLM or SGLang by its command (app: the command is a",
    ),
    (
        "any of two",
        pod(container("a"), container("b"), annotations={names.ENGINE: "pytorch"}),
        "any of the containers a, b could be meant",
    ),
    (
        "no such container",
        pod(annotations={names.CONTAINER: "x"}),
        f"there is no container x: {names.CONTAINER} has to name one of engine",
    ),
    (
        "another engine than annotated",
        pod(annotations={names.ENGINE: "sglang"}),
        f"container engine starts vllm, and not sglang: mend {names.ENGINE}",
    ),
    (
        "an unknown engine",
        pod(annotations={names.ENGINE: "tgi"}),
        f"{names.ENGINE} is tgi: it has to be one of vllm, sglang, pytorch",
    ),
    (
        "another load format",
        pod(container(command=[*VLLM, "--load-format", "dummy"])),
        "container engine asks for --load-format dummy: leave --load-format out",
    ),
    (
        "a switch that is none",
        pod(annotations={names.REQUIRED: "yes"}),
        f"{names.REQUIRED} is yes: it has to be one of true, false",
    ),
    ("inject that is no switch", pod(annotations={names.INJECT: "no"}), f"{names.INJECT} is no"),
    ("files of a third kind", pod(annotations={names.FILES: "pvc"}), f"{names.FILES} is pvc"),
    ("same-host of a fourth", pod(annotations={names.SAME_HOST: "maybe"}), f"{names.SAME_HOST} is maybe"),
    (
        "seconds that are none",
        pod(annotations={names.DRAIN_S: "1m"}),
        f"{names.DRAIN_S} is 1m: it has to be seconds",
    ),
    ("seconds that never end", pod(annotations={names.DRAIN_S: "inf"}), f"{names.DRAIN_S} is inf"),
    ("no number", pod(annotations={names.DRAIN_S: "nan"}), f"{names.DRAIN_S} is nan"),
    ("a model without a name", pod(annotations={names.MODEL_NAME: ""}), f"{names.MODEL_NAME} holds no name"),
    (
        "a model's name in two lines",
        pod(annotations={names.MODEL_NAME: "a\nb"}),
        f"{names.MODEL_NAME} holds no name",
    ),
    (
        "a snapshot in two lines",
        pod(annotations={names.SNAPSHOT: "s3://a\nb"}),
        f"{names.SNAPSHOT} holds no URI",
    ),
    ("Windows", pod(os={"name": "windows"}), "rfork runs on Linux only"),
    (
        "python -I",
        pod(container(command=["python3", "-I", "-m", "sglang.launch_server"])),
        "container engine: python -I ignores PYTHONPATH",
    ),
    ("no containers", {**pod(), "spec": {"containers": []}}, "the Pod is not well-formed: spec.containers:"),
    ("no spec", {"metadata": {"labels": {names.MODEL: "m"}}}, "the Pod is not well-formed: spec:"),
    (
        "a command that is no list",
        pod(container(command="vllm serve m")),
        "the Pod is not well-formed: spec.containers.0.command:",
    ),
    (
        "an empty version",
        pod(annotations={names.VERSION: ""}),
        "rfork.dev/version holds no version of weights: it has to be 1 to 256 printable characters",
    ),
    (
        "a version of two lines",
        pod(annotations={names.VERSION: "v1\nv2"}),
        "rfork.dev/version holds no version of weights: it has to be 1 to 256 printable characters",
    ),
    (
        "a version that is too long",
        pod(annotations={names.VERSION: "v" * 257}),
        "rfork.dev/version holds no version of weights: it has to be 1 to 256 printable characters",
    ),
    (
        "a name that is a number",
        pod({**container(), "name": 5}),
        "the Pod is not well-formed: spec.containers.0.name:",
    ),
]


@pytest.mark.parametrize(("document", "reason"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_what_cannot_be_forked_is_told_why(document: Document, reason: str) -> None:
    """In one line, with what to do."""
    found = parse_request(document)
    assert isinstance(found, InjectionRejected), found
    assert (reason, 1) == (found.reason[: len(reason)], len(found.reason.splitlines()))


def test_annotations_are_read() -> None:
    """Each of them; the model's name in the annotation goes before the label's."""
    annotations = {
        names.MODEL_NAME: "org/llama", names.SNAPSHOT: "s3://b/$(M)", names.FILES: "init",
        names.SAME_HOST: "ipc", names.DRAIN_S: "2.5", names.REQUIRED: "true", names.INJECT: "true",
        names.VERSION: "2026-11-23",
    }  # fmt: skip
    expected = InjectionRequest(
        "org/llama",
        "engine",
        "vllm",
        snapshot="s3://b/$(M)",
        files="init",
        same_host="ipc",
        drain_s=2.5,
        required=True,
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
def test_the_version_is_the_annotations_else_the_labels(
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
def test_who_does_not_ask_gets_nothing(document: object) -> None:
    """Without the label, with ``inject: false``, and as a static Pod's mirror: no reason is given."""
    assert (False, None) == (is_enabled(document), parse_request(document))


@given(damaged_pods() | labelled_pods() | ANY_JSON)
def test_whatever_the_pod_is_nothing_is_raised(document: object) -> None:
    """There is an answer, and a reason is one line that can be shown."""
    found = parse_request(document)
    if isinstance(found, InjectionRejected):
        assert TypeAdapter(SanitizedText).validate_python(found.reason) == found.reason != ""
