"""The Helm chart under test: rendered by helm, with access to its values and their schema.

`python -m tests.kube.chart` prints the table of values for the chart's README.
"""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parents[2] / "deploy" / "helm" / "rfork"
TABLE_HEAD: Final = "| value | default | description |\n|---|---|---|"
CLUSTER_WIDE: Final = frozenset({"ClusterRole", "ClusterRoleBinding", "MutatingWebhookConfiguration"})
YAML_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's C loader, if available."""

Document = dict[str, Any]


class HelmFailed(Exception):
    """helm failed. The text is its output."""


@dataclass(frozen=True)
class Value:
    """A value of values.yaml with its own comment."""

    path: str
    """``planner.store.redis.url``"""
    default: object
    comment: str


def helm_run(
    program: Path, *words: str, values: Mapping[str, object] | None = None, kubeconfig: Path | None = None
) -> str:
    """Return the output of ``helm WORDS``. Raises HelmFailed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.yaml")
        file.write_text(yaml.safe_dump(dict(values or {})))
        # Isolated from the user's plug-ins and clusters.
        environment = {
            "HOME": folder,
            "PATH": "",
            "KUBECONFIG": str(kubeconfig or Path(folder, "none")),
        }
        values_flags = ["--values", str(file)] if values is not None else []
        done = subprocess.run(
            [program, *words, *values_flags], capture_output=True, text=True, env=environment, check=False
        )
    if done.returncode:
        raise HelmFailed(done.stderr + done.stdout)
    return done.stdout


def render(
    program: Path,
    values: Mapping[str, object] | None = None,
    *,
    kubernetes: str = "1.37.0",
    release: str = "rfork",
    namespace: str = "rfork-system",
) -> list[Document]:
    """Return all objects of the chart as rendered by helm, without a cluster. Raises HelmFailed."""
    text = _template(program, json.dumps(dict(values or {})), kubernetes, release, namespace)
    return [document for document in yaml.load_all(text, YAML_LOADER) if document]


@functools.lru_cache(maxsize=256)
def _template(program: Path, values: str, kubernetes: str, release: str, namespace: str) -> str:
    return helm_run(
        program,
        "template", release, str(CHART), "--namespace", namespace, "--kube-version", kubernetes,
        values=json.loads(values),
    )  # fmt: skip


def find_object(objects: list[Document], kind: str, name: str) -> Document:
    """Return the only object of this kind and name. Raises LookupError."""
    for each in objects:
        if (each["kind"], each["metadata"]["name"]) == (kind, name):
            return each
    there = sorted(f"{each['kind']}/{each['metadata']['name']}" for each in objects)
    raise LookupError(f"no {kind}/{name}; there are {', '.join(there)}")


def pod_specs(objects: list[Document]) -> dict[str, Document]:
    """Return the Pod specs of all Deployments and DaemonSets by name."""
    kinds = ("Deployment", "DaemonSet")
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in objects if each["kind"] in kinds}


def environment(spec: Document) -> dict[str, str]:
    """Return the variables of a Pod's only container; references as ``<Secret/KEY>`` or ``<field>``."""
    (container,) = spec["containers"]
    found: dict[str, str] = {}
    for each in container["env"]:
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source:
            found[each["name"]] = f"<{source['secretKeyRef']['name']}/{source['secretKeyRef']['key']}>"
        elif "fieldRef" in source:
            found[each["name"]] = f"<{source['fieldRef']['fieldPath']}>"
        else:
            found[each["name"]] = each["value"]
    return found


def schema() -> Document:
    """Return values.schema.json."""
    return dict(json.loads((CHART / "values.schema.json").read_text()))


def values_of_schema(node: Document, path: str = "") -> Iterator[Value]:
    """Yield each value that a schema describes, depth first: path, default, description."""
    for name, below in node.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        if "default" in below:
            yield Value(here, below["default"], below.get("description", ""))
        else:
            yield from values_of_schema(below, here)


def values_of_chart() -> Iterator[Value]:
    """Yield each value of values.yaml with a comment right above it, and its default, in order."""
    text = (CHART / "values.yaml").read_text()
    yield from _commented_values(yaml.compose(text), yaml.safe_load(text), text.splitlines(), schema(), "")


def _commented_values(
    node: yaml.Node | None, values: Document, lines: list[str], described: Document, path: str
) -> Iterator[Value]:
    assert isinstance(node, yaml.MappingNode)
    for key, below in node.value:
        here = f"{path}.{key.value}" if path else key.value
        inner = described.get("properties", {}).get(key.value, {})
        if "properties" in inner and "default" not in inner:
            yield from _commented_values(below, values[key.value], lines, inner, here)
            continue
        first = key.start_mark.line
        while first and lines[first - 1].strip().startswith("#"):
            first -= 1
        comment = " ".join(line.strip().removeprefix("#").strip() for line in lines[first : key.start_mark.line])
        yield Value(here, values[key.value], comment)


def table() -> str:
    """Return the README's table of values."""
    rows = [f"| `{value.path}` | `{json.dumps(value.default)}` | {value.comment} |" for value in values_of_chart()]
    return "\n".join((TABLE_HEAD, *rows))


if __name__ == "__main__":
    print(table())
