"""Staging: at most two steps at once, and no copy in progress after a pass has ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.image.staging import STEP_BYTES, wait_all
from tests.unit.image.deferred_copier import DeferredCopier, DeferredCopy

SIZE = 1000


def noise(size: int = SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def image_on(copier: DeferredCopier, tensors: dict[str, torch.Tensor]) -> Image:
    image = image_from_tensors(tensors)
    return Image(image.layout, image.regions, copier)


def three() -> tuple[dict[str, torch.Tensor], bytes]:
    """Return three tensors, the middle one on the host, and the bytes of their image."""
    tensors = {"a": noise(400), "b": noise(100) ^ 255, "c": noise(500) ^ 15}
    return tensors, b"".join(bytes(tensor.tolist()) for tensor in tensors.values())


@pytest.mark.parametrize("step", [1, 77, 450, SIZE, 2 * SIZE])
def test_steps_cover_the_range(step: int) -> None:
    """The steps' bytes are those of the range in order, for tensors on the device and on the host."""
    tensors, image_bytes = three()
    copier = DeferredCopier(host=[tensors["b"]])
    with image_on(copier, tensors).reading(3, 990, step) as steps:
        found = [b"".join(views) for views in steps]
    assert [image_bytes[low : min(low + step, 990)] for low in range(3, 990, step)] == found
    assert [] == copier.pending


@pytest.mark.parametrize("step", [1, 77, 450, SIZE, 2 * SIZE])
def test_written_bytes_are_in_the_tensors(step: int) -> None:
    """After the last step the tensors contain the written bytes, and surrounding memory is unchanged."""
    tensors, before = three()
    expected, copier = bytes(noise().tolist()), DeferredCopier(host=[tensors["b"]])
    with image_on(copier, tensors).writing(3, 990, step) as steps:
        at = 3
        for views in steps:
            for view in views:
                view[:] = expected[at : at + view.nbytes]
                at += view.nbytes
    actual = b"".join(bytes(tensor.tolist()) for tensor in tensors.values())
    assert before[:3] + expected[3:990] + before[990:] == actual
    assert [] == copier.pending


def test_the_next_step_is_copied_while_one_is_read() -> None:
    """When the first step is returned, the second is being copied; with the last, no copy is in progress."""
    copier = DeferredCopier()
    with image_on(copier, {"a": noise()}).reading(0, SIZE, 400) as steps:
        seen = [(copier.started_count, len(copier.pending)) for _ in steps]
    assert [(2, 1), (3, 1), (3, 0)] == seen


def test_a_filled_step_is_copied_while_the_next_is_filled() -> None:
    """When the second step is returned, the first is being copied; it is complete when the third is."""
    copier = DeferredCopier()
    with image_on(copier, {"a": noise()}).writing(0, SIZE, 400) as steps:
        seen = [(copier.started_count, len(copier.pending)) for _ in steps]
    assert [(0, 0), (1, 1), (2, 1)] == seen


def test_nothing_is_read_outside_the_range() -> None:
    """Prefetching ends at the end of the range."""
    copier, tensor = DeferredCopier(), noise()
    with image_on(copier, {"a": tensor}).reading(0, 500, 400) as steps:
        next(steps)
        tensor[500:] = 0
        assert 2 == copier.started_count
        assert 100 == sum(view.nbytes for view in next(steps))
        assert [] == copier.pending


def test_a_pass_uses_two_buffers_and_the_next_reuses_them() -> None:
    """For any number of consecutive steps and passes there are at most two buffers."""
    copier = DeferredCopier()
    image = image_on(copier, {"a": noise()})
    for _ in range(3):
        with image.reading(0, SIZE, 100) as steps:
            assert 10 == sum(1 for _ in steps)
        with image.writing(0, SIZE, 100) as steps:
            assert 10 == sum(1 for _ in steps)
    assert [STEP_BYTES, STEP_BYTES] == copier.pinned_bytes


@pytest.mark.parametrize("steps_read", [0, 1, 2])
def test_a_reader_that_stops_early_leaves_no_copy(steps_read: int) -> None:
    """An exception in the middle of a pass reaches the caller after all copies have ended."""
    copier = DeferredCopier()
    image = image_on(copier, {"a": noise()})

    def read_and_fail() -> None:
        with image.reading(0, SIZE, 100) as steps:
            for _ in range(steps_read):
                next(steps)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        read_and_fail()
    assert [] == copier.pending


def test_a_step_that_was_not_filled_is_not_written() -> None:
    """After an exception the tensors contain the previous steps, and nothing of the current one."""
    copier, tensor = DeferredCopier(), torch.zeros(300, dtype=torch.uint8)

    def write_and_fail() -> None:
        with image_on(copier, {"a": tensor}).writing(0, 300, 100) as steps:
            for filled in range(3):
                (view,) = next(steps)
                view[:] = bytes([7]) * 100
                if filled == 1:
                    raise ConnectionError

    with pytest.raises(ConnectionError):
        write_and_fail()
    assert [7] * 100 + [0] * 200 == tensor.tolist()
    assert [] == copier.pending


@pytest.mark.parametrize("direction", ["reading", "writing"])
def test_a_device_failure_is_raised(direction: str) -> None:
    """If a copy cannot start, the pass raises the device's error with no copy in progress."""
    copier = DeferredCopier(max_copies=1)
    image = image_on(copier, {"a": noise()})

    def walk() -> None:
        with image.reading(0, SIZE, 300) if direction == "reading" else image.writing(0, SIZE, 300) as steps:
            list(steps)

    with pytest.raises(RuntimeError, match="the device failed"):
        walk()
    assert [] == copier.pending


class FailingCopies(DeferredCopier):
    """Every copy fails when it is waited for, with its number."""

    def _begin(self, destination: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> DeferredCopy:
        number = self.started_count
        self.started_count += 1

        def fail() -> None:
            raise RuntimeError(f"copy {number} failed")

        return DeferredCopy(self, fail)


@pytest.mark.parametrize("direction", ["reading", "writing"])
def test_all_copies_are_waited_for_if_one_fails(direction: str) -> None:
    """The first failure is raised when no copy is in progress; a failed buffer is not reused."""
    copier = FailingCopies()
    image = image_on(copier, {"a": noise()})

    def walk() -> None:
        with image.reading(0, SIZE, 300) if direction == "reading" else image.writing(0, SIZE, 300) as steps:
            list(steps)

    for first in (0, 2):
        with pytest.raises(RuntimeError, match=f"copy {first} failed"):
            walk()
    assert [] == copier.pending
    assert 4 == len(copier.pinned_bytes)


def test_copies_on_two_devices_are_both_waited_for() -> None:
    """The first failure is raised after the other device's copy has ended."""
    waited: list[str] = []

    def wait(name: str) -> None:
        waited.append(name)
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="one"):
        wait_all([partial(wait, "one"), partial(wait, "other")])
    assert ["one", "other"] == waited


@pytest.mark.parametrize("staged", [True, False])
def test_an_empty_range_is_one_empty_step(staged: bool) -> None:
    """This holds in both directions, on a device and on the host, and needs no buffer."""
    copier = DeferredCopier(host=() if staged else [tensor := noise()])
    image = image_on(copier, {"a": noise() if staged else tensor})
    with image.reading(5, 5) as steps, image.writing(5, 5) as write_steps:
        assert [[]] == list(map(list, steps))
        assert [[]] == list(map(list, write_steps))
    assert [] == copier.pinned_bytes


def test_a_range_outside_the_image_is_rejected() -> None:
    """It is an error before there is a step to fill."""
    image = image_on(DeferredCopier(), {"a": noise()})
    for walk in (image.reading, image.writing):
        with pytest.raises(ValueError, match="not within"), walk(0, SIZE + 1):
            pass
