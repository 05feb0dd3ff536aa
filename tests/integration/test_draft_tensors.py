"""A toy engine's drafts, which share tensors with their main model, forked through a real planner."""

from __future__ import annotations

import json
from typing import cast

import pytest
import torch
from torch import nn

from rfork.engines.load_or_fork import ModelIdentity, load_or_fork
from rfork.engines.served_model import served_model
from rfork.engines.vllm.draft_tensors import EMBEDDING, HEAD, VllmTensorSharing, shared_patterns
from rfork.errors import CheckpointError
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from tests.conftest import StartRfork
from tests.draft_models import EagleDraft, Main
from tests.processes import START_S

WIDTH, VOCABULARY = 64, 256
READY = r'"event": ?"ready"'


class Toy:
    """An engine of one draft; `files` are the values of its own embedding and head, None if it has no files."""

    def __init__(self, files: tuple[float | None, float | None] | None) -> None:
        self._files = files
        self.loads = 0

    def empty(self) -> nn.Module:
        """Return a draft of zeros."""
        return filled(EagleDraft(WIDTH, VOCABULARY), 0.0)

    def load(self) -> nn.Module:
        """Return the draft with the values of its files, and its flags as vLLM sets them."""
        self.check()
        self.loads += 1
        draft = filled(EagleDraft(WIDTH, VOCABULARY), 3.0)
        embedding, head = self._files or (None, None)
        if embedding is not None:
            draft.has_own_embed_tokens = True
            nn.init.constant_(draft.model.embed_tokens.weight, embedding)
        if head is not None:
            draft.has_own_lm_head = True
            nn.init.constant_(draft.lm_head.weight, head)
        return draft

    def check(self) -> None:
        """Raise CheckpointError if there are no files."""
        if self._files is None:
            raise CheckpointError("there are no weights in the folder")


def filled(module: EagleDraft, value: float) -> EagleDraft:
    """Return the module with all its values changed."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """The URL of an empty planner."""
    process = rfork_process("planner", "--port", "0", "--json", until=READY)
    return cast(str, json.loads(process.wait_for(rf"^.*{READY}.*$").group())["url"])


@pytest.fixture
def main() -> Main:
    """The main model of all drafts: its values are 1."""
    module = Main(WIDTH, VOCABULARY)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 1.0)
    return module


@pytest.mark.parametrize(
    ("files", "shared"),
    [
        ((None, 2.0), EMBEDDING),
        ((None, None), EMBEDDING + HEAD),
        ((1.0, 1.0), EMBEDDING + HEAD),
        ((2.0, None), HEAD),
        ((2.0, 2.0), ()),
    ],
    ids=["own head", "nothing of its own", "copies", "own embedding", "both its own"],
)
def test_a_draft_without_files_is_forked_with_what_it_has_of_its_own(
    planner: str, main: Main, files: tuple[float | None, float | None], shared: tuple[str, ...]
) -> None:
    """Whatever the source's files contain, the target shares the same tensors and gets the others; shared ones are
    not sent.
    """
    identity = ModelIdentity("draft", Rank(role="speculative"), sharing=VllmTensorSharing(main))
    settings = InstanceSettings(planner=planner, transports=("http",), drain_timeout_s=0.0, version="one")
    source_engine, target_engine = Toy(files), Toy(None)
    source = load_or_fork(source_engine, lambda: identity, settings)
    first = served_model(source)
    assert first is not None
    assert first.seed.wait_registered(START_S)  # the target learns from the planner which layouts are served
    target = load_or_fork(target_engine, lambda: identity, settings)
    served = [first, served_model(target)]
    for each in served:
        if each is not None:
            each.close(0.0)
    assert (1, 0) == (source_engine.loads, target_engine.loads)
    assert [shared, shared] == [shared_patterns(source), shared_patterns(target)]
    assert ["fallback", "forked"] == [each.report.outcome for each in served if each is not None]
    expected, found = source.state_dict(), target.state_dict()
    own = [name for name in expected if not name.startswith(tuple(pattern.rstrip("*") for pattern in shared))]
    assert own == [name for name in own if torch.equal(expected[name], found[name])]
    sent = [{spec.name for spec in each.seed.image.layout.tensors} for each in served if each is not None]
    assert [set(own), set(own)] == [names & expected.keys() for names in sent]
