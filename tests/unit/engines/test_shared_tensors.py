"""Drafts that share tensors with their main model: what is shared, and what their updates change."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from rfork.engines.served_model import ServedModel
from rfork.engines.sglang import identity as sglang_identity
from rfork.engines.sglang.draft_tensors import SglangTensorSharing
from rfork.engines.shared_tensors import Patterns, main_model, not_shared, remember_main, shared_names
from rfork.engines.vllm.draft_tensors import EMBEDDING, HEAD, VllmTensorSharing, check_shared, shared_patterns
from rfork.engines.weight_lifecycle import WeightLifecycle
from rfork.errors import EngineMismatch
from tests.draft_models import Draft, EagleDraft, Main


class FlaglessDraft(Draft):
    """A multi-token-prediction draft: vLLM always shares its tensors."""


def eagle(
    *,
    width: int = 4,
    vocabulary: int = 8,
    own_embedding: bool = False,
    own_head: bool = False,
    values: float = 1.0,
    head: bool = True,
) -> EagleDraft:
    """Return an EAGLE draft whose tensors all have this value."""
    draft = EagleDraft(width, vocabulary, has_head=head)
    draft.has_own_embed_tokens, draft.has_own_lm_head = own_embedding, own_head
    for parameter in draft.parameters():
        nn.init.constant_(parameter, values)
    return draft


@pytest.mark.parametrize(
    ("draft", "choices"),
    [
        (eagle(), [EMBEDDING, EMBEDDING + HEAD, (), HEAD]),
        (eagle(head=False), [EMBEDDING + HEAD, HEAD]),
        (eagle(vocabulary=6), [EMBEDDING, ()]),
        (eagle(width=2, vocabulary=6), [()]),
        (FlaglessDraft(4, 8), [EMBEDDING + HEAD]),
    ],
    ids=["complete", "no head", "reduced vocabulary", "narrow", "mtp"],
)
def test_choices_of_a_draft_without_weights(draft: nn.Module, choices: list[Patterns]) -> None:
    """The input embedding is mostly shared, a head that exists is mostly the draft's own."""
    assert choices == list(VllmTensorSharing(Main(4, 8)).choices(draft))


@pytest.mark.parametrize(
    ("draft", "shared"),
    [
        (eagle(), EMBEDDING + HEAD),
        (eagle(own_embedding=True, own_head=True), EMBEDDING + HEAD),
        (eagle(own_embedding=True, values=2.0), HEAD),
        (eagle(own_head=True, values=2.0), EMBEDDING),
        (eagle(own_head=True, vocabulary=6), EMBEDDING),
        (eagle(own_embedding=True, own_head=True, values=2.0), ()),
        (eagle(width=2, head=False), HEAD),
        (FlaglessDraft(4, 8), EMBEDDING + HEAD),
    ],
    ids=["none in the files", "equal", "own embedding", "own head", "reduced", "both its own", "narrow", "mtp"],
)
def test_shared_tensors_of_a_loaded_draft(draft: nn.Module, shared: Patterns) -> None:
    """A draft shares what its files lack, and what equals the main model's tensor in shape and values."""
    main = Main(4, 8)
    for parameter in main.parameters():
        nn.init.constant_(parameter, 1.0)
    assert shared == VllmTensorSharing(main).of_loaded(draft)


@pytest.mark.parametrize("shared", [(), EMBEDDING, HEAD, EMBEDDING + HEAD])
def test_the_flags_of_a_draft_state_what_it_shares(shared: Patterns) -> None:
    """vLLM shares what a draft has no tensor of its own for."""
    draft = eagle()
    VllmTensorSharing(Main(4, 8)).apply(draft, shared)
    assert (EMBEDDING[0] not in shared, HEAD[0] not in shared) == (draft.has_own_embed_tokens, draft.has_own_lm_head)
    assert shared == shared_patterns(draft)


def test_tensors_that_vllm_did_not_share_end_a_forked_server() -> None:
    """They have no content. A draft that vLLM has loaded itself only stops being a seed."""
    main, draft = Main(4, 8), eagle()
    sharing = VllmTensorSharing(main)
    sharing.apply(draft, EMBEDDING)
    assert not check_shared(draft, main)
    sharing.on_filled(draft)
    with pytest.raises(EngineMismatch, match=r"did not share model\.embed_tokens\.weight"):
        check_shared(draft, main)
    draft.model.embed_tokens = main.model.embed_tokens
    assert check_shared(draft, main)
    assert ["model.embed_tokens.weight"] == list(shared_names(draft, main))
    assert [] == list(not_shared(draft, main, EMBEDDING))


class SglangDraft(EagleDraft):
    """A draft with the methods that SGLang's speculative workers call."""

    def set_embed(self, embedding: nn.Parameter) -> None:
        self.model.embed_tokens.weight = embedding

    def set_embed_and_head(self, embedding: nn.Parameter, head: nn.Parameter) -> None:
        self.set_embed(embedding)
        self.lm_head.weight = head


class SglangMain(Main):
    """A main model with SGLang's method for its drafts."""

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model.embed_tokens.weight, self.lm_head.weight


@pytest.mark.parametrize(
    ("algorithm", "shares_head", "shared"),
    [
        ("EAGLE", False, ("model.embed_tokens.weight", "lm_head.weight")),
        ("NEXTN", False, ("model.embed_tokens.weight", "lm_head.weight")),
        ("EAGLE3", False, ("model.embed_tokens.weight",)),
        ("EAGLE3", True, ("model.embed_tokens.weight", "lm_head.weight")),
    ],
)
def test_sglangs_calls_share_the_tensors(algorithm: str, shares_head: bool, shared: Patterns) -> None:
    """They are the main model's own tensors before the draft is captured."""
    main, draft = SglangMain(4, 8), SglangDraft(4, 8)
    vars(draft)["load_lm_head_from_target"] = shares_head
    sharing = SglangTensorSharing(main, algorithm)
    assert [shared] == list(sharing.choices(draft))
    assert draft.model.embed_tokens.weight is main.model.embed_tokens.weight
    assert shared == sharing.of_loaded(draft)


@pytest.mark.parametrize(("vocabulary", "tokens"), [(6, 6), (8, None), (None, None)])
def test_the_token_map_of_a_draft_without_weights_gets_memory(vocabulary: int | None, tokens: int | None) -> None:
    """SGLang's loader creates it from the checkpoint if the draft has fewer tokens than its main model."""
    draft = SglangDraft(4, 8)
    vars(draft)["config"] = type("Config", (), {"vocab_size": 8, "draft_vocab_size": vocabulary})
    vars(draft)["hot_token_id"] = None
    SglangTensorSharing(SglangMain(4, 8), "EAGLE3").choices(draft)
    found = vars(draft)["hot_token_id"]
    assert tokens == (None if found is None else len(found))


@pytest.mark.parametrize(
    ("algorithm", "pp_size", "main", "reason"),
    [
        ("STANDALONE", 2, None, None),
        ("eagle", 1, SglangMain(4, 8), None),
        ("EAGLE3", 1, SglangMain(4, 8), None),
        ("EAGLE", 2, SglangMain(4, 8), "pipeline stages"),
        ("EAGLE", 1, None, "was not forked"),
        ("EAGLE", 1, Main(4, 8), "Main shares with its draft is unknown"),
        ("FROZEN_KV_MTP", 1, SglangMain(4, 8), "FROZEN_KV_MTP"),
        (None, 1, SglangMain(4, 8), "UNNAMED"),
    ],
)
def test_sglangs_drafts_that_are_refused(
    algorithm: str | None, pp_size: int, main: nn.Module | None, reason: str | None
) -> None:
    """A draft whose shared tensors are not known is not forked."""
    found = sglang_identity.unsupported_draft(algorithm, pp_size, main)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_the_main_model_is_remembered_while_it_exists() -> None:
    """It is the latest one that an engine has loaded in this process."""
    main = Main(4, 8)
    remember_main(main)
    assert main_model() is main
    del main
    assert main_model() is None


class Recorder:
    """Records the calls made on a served model."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_update(self) -> None:
        self.calls.append("begin")

    def fence(self) -> None:
        self.calls.append("fence")

    def renew(self, *, updated: bool, version: str | None) -> None:
        self.calls.append(f"renew {version}" if updated else "renew")


@pytest.fixture
def pair() -> tuple[WeightLifecycle, WeightLifecycle]:
    """Return the lifecycles of a main model and of its draft."""
    main = WeightLifecycle(cast(ServedModel, Recorder()))
    return main, WeightLifecycle(cast(ServedModel, Recorder()), main)


def calls_of(lifecycle: WeightLifecycle) -> list[str]:
    """Return the calls made on the served model."""
    return cast(Recorder, lifecycle.served).calls


def test_an_update_of_a_draft_changes_its_main_model(pair: tuple[WeightLifecycle, WeightLifecycle]) -> None:
    """Both stop serving; the version of the main model's weights is then unknown."""
    main, draft = pair
    with draft.updating(lambda: "two"):
        assert (["begin"], ["begin"]) == (calls_of(main), calls_of(draft))
    assert (["begin", "renew None"], ["begin", "renew two"]) == (calls_of(main), calls_of(draft))


def test_an_update_of_a_main_model_does_not_change_its_draft(pair: tuple[WeightLifecycle, WeightLifecycle]) -> None:
    """The draft's image has no shared tensors."""
    main, draft = pair
    with main.updating(lambda: "two"):
        pass
    assert (["begin", "renew two"], []) == (calls_of(main), calls_of(draft))


def test_a_failed_update_of_a_draft_ends_both(pair: tuple[WeightLifecycle, WeightLifecycle]) -> None:
    """The shared tensors are undefined until the next update of the main model."""
    main, draft = pair
    with pytest.raises(OSError, match="disk"), draft.updating():
        raise OSError("disk")
    with draft.updating():
        pass
    assert (["begin", "begin"], ["begin", "begin", "renew None"]) == (calls_of(main), calls_of(draft))
    with main.updating():
        pass
    assert "renew None" == calls_of(main)[-1]


def test_a_cancelled_update_of_a_draft_restores_both(pair: tuple[WeightLifecycle, WeightLifecycle]) -> None:
    """Nothing was written."""
    main, draft = pair
    draft.begin_update()
    draft.cancel_update()
    assert (["begin", "renew"], ["begin", "renew"]) == (calls_of(main), calls_of(draft))


def test_an_abandoned_update_of_a_draft_leaves_that_of_its_main_model(
    pair: tuple[WeightLifecycle, WeightLifecycle],
) -> None:
    """SGLang begins the updates of both models, then ends both; an earlier update that never ended does not count."""
    main, draft = pair
    draft.begin_update()
    for lifecycle in pair:
        lifecycle.abandon_updates()
        lifecycle.begin_update()
    for lifecycle in pair:
        lifecycle.end_update()
    assert "renew None" == calls_of(main)[-1]
    assert "renew None" == calls_of(draft)[-1]


def test_a_draft_loaded_without_an_update_ends_both(pair: tuple[WeightLifecycle, WeightLifecycle]) -> None:
    """Nothing marks the end of the load."""
    main, draft = pair
    with draft.loading():
        pass
    assert (["fence"], ["fence"]) == (calls_of(main), calls_of(draft))


def test_emptied_tensors_are_not_shared() -> None:
    """Weights that a kernel has taken over may have the same address."""
    main, draft = Main(4, 8), EagleDraft(4, 8)
    for module in (main, draft):
        module.lm_head.weight = nn.Parameter(torch.empty(0))
    assert () == shared_names(draft, main)
