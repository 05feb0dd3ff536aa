"""Fixtures for tests with a real API server. See `tests.kube.control_plane`.

Every test in this directory has the marker ``kube`` and, by default, a timeout of five minutes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from lightkube import ApiError, Client, KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace

from planner.integrations.kubernetes.api_server import Document
from planner.integrations.kubernetes.cluster import Cluster, connect
from rfork.settings import KubernetesSettings
from tests.kube.control_plane import ControlPlane, control_plane
from tests.kube.watch_recorder import Post

TIMEOUT_S = 300
# Read before any fixture hides RFORK_* from the tests.
TOOLS = {name: os.environ.get(f"RFORK_TEST_{name.upper()}", "") for name in ("helm", "kubectl")}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in this directory before ``-m`` selects, with a longer timeout."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.kube)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane shared by all tests. Keep it running, and change only objects of your namespace."""
    with control_plane(tmp_path_factory.mktemp("kube")) as ready:
        yield ready


@pytest.fixture(scope="session")
def admin(plane: ControlPlane) -> Iterator[Client]:
    """A client with administrator rights."""
    with Client(KubeConfig.from_file(plane.kubeconfig), trust_env=False) as client:
        yield client


@pytest.fixture
def namespace(admin: Client) -> Iterator[str]:
    """A namespace for the test. Its deletion starts after the test and is not awaited."""
    name = f"t-{secrets.token_hex(4)}"
    admin.create(Namespace(metadata=ObjectMeta(name=name)))
    yield name
    try:
        admin.delete(Namespace, name, grace_period=0)
    except ApiError as error:
        if error.status.code != 404:
            raise


@pytest.fixture
async def cluster(plane: ControlPlane, namespace: str) -> AsyncIterator[Cluster]:
    """The cluster, with administrator rights."""
    made = connect(KubernetesSettings(kubeconfig=plane.kubeconfig, namespace=namespace))
    yield made
    await made.close()


@pytest.fixture
def post(plane: ControlPlane) -> Iterator[Post]:
    """Create an object with ``post(path, document)`` and return it."""
    with plane.client() as api:

        def create(path: str, document: Document) -> Document:
            response = api.post(path, json=document)
            assert response.is_success, response.text
            made: Document = response.json()
            return made

        yield create


@pytest.fixture(scope="session")
def helm() -> Path:
    """The helm binary (RFORK_TEST_HELM; `make test-kube` installs one). Skips the test without it."""
    return _require_tool("helm")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """The kubectl binary (RFORK_TEST_KUBECTL; `make test-kube` installs one). Skips the test without it."""
    return _require_tool("kubectl")


def _require_tool(name: str) -> Path:
    path = Path(TOOLS[name] or f"no-{name}")
    if not path.is_file():
        pytest.skip(f"no {name}: RFORK_TEST_{name.upper()} is not set; `make test-kube` installs one")
    return path
