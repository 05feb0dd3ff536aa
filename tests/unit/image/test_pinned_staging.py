"""Staging: two steps at once, never more, and no copy under way once a walk has ended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.image.pinned_staging import STEP_BYTES, wait_all
from tests.fake_device import FakeDeviceCopier, FakePendingCopy, image_on_fake_device

SIZE = 1000


def noise(size: int = SIZE) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def image_on(copies: FakeDeviceCopier, tensors: dict[str, torch.Tensor]) -> Image:
    return image_on_fake_device(image_from_tensors(tensors), copies)


def three() -> tuple[dict[str, torch.Tensor], bytes]:
    """Three tensors, the middle one to be on the host, and the bytes of their image."""
    tensors = {"a": noise(400), "b": noise(100) ^ 255, "c": noise(500) ^ 15}
    return tensors, b"".join(bytes(tensor.tolist()) for tensor in tensors.values())


@pytest.mark.parametrize("step", [1, 77, 450, SIZE, 2 * SIZE])
def test_steps_are_the_range(step: int) -> None:
    """The steps' bytes are those of the range in order, whatever lies on the device and whatever does not."""
    tensors, image_bytes = three()
    copies = FakeDeviceCopier(host=[tensors["b"]])
    with image_on(copies, tensors).reading(3, 990, step) as steps:
        found = [b"".join(views) for views in steps]
    assert ([image_bytes[low : min(low + step, 990)] for low in range(3, 990, step)], []) == (
        found,
        copies.pending,
    )


@pytest.mark.parametrize("step", [1, 77, 450, SIZE, 2 * SIZE])
def test_what_is_written_is_in_the_tensors(step: int) -> None:
    """Once no step is left, the tensors have what was filled in, and what lies around it is as it was."""
    tensors, before = three()
    expected, copies = bytes(noise().tolist()), FakeDeviceCopier(host=[tensors["b"]])
    with image_on(copies, tensors).writing(3, 990, step) as steps:
        at = 3
        for views in steps:
            for view in views:
                view[:] = expected[at : at + view.nbytes]
                at += view.nbytes
    actual = b"".join(bytes(tensor.tolist()) for tensor in tensors.values())
    assert (before[:3] + expected[3:990] + before[990:], []) == (actual, copies.pending)


def test_the_next_step_comes_while_one_is_read() -> None:
    """With the first step given out, the second is on its way; with the last, none is."""
    copies = FakeDeviceCopier()
    with image_on(copies, {"a": noise()}).reading(0, SIZE, 400) as steps:
        seen = [(copies.started_count, len(copies.pending)) for _ in steps]
    assert [(2, 1), (3, 1), (3, 0)] == seen


def test_a_filled_step_goes_while_the_next_is_filled() -> None:
    """With the second step given out, the first is on its way, and has come when the third is."""
    copies = FakeDeviceCopier()
    with image_on(copies, {"a": noise()}).writing(0, SIZE, 400) as steps:
        seen = [(copies.started_count, len(copies.pending)) for _ in steps]
    assert [(0, 0), (1, 1), (2, 1)] == seen


def test_nothing_is_read_out_of_the_range() -> None:
    """What is fetched ahead ends where the range does: no byte that was not asked for is copied."""
    copies, tensor = FakeDeviceCopier(), noise()
    with image_on(copies, {"a": tensor}).reading(0, 500, 400) as steps:
        next(steps)
        tensor[500:] = 0
        assert 2 == copies.started_count
        assert (100, []) == (sum(view.nbytes for view in next(steps)), copies.pending)


def test_a_walk_takes_two_buffers_and_the_next_takes_them_again() -> None:
    """However many steps and walks, one after the other: there are never more than two buffers."""
    copies = FakeDeviceCopier()
    image = image_on(copies, {"a": noise()})
    for _ in range(3):
        with image.reading(0, SIZE, 100) as steps:
            assert 10 == sum(1 for _ in steps)
        with image.writing(0, SIZE, 100) as steps:
            assert 10 == sum(1 for _ in steps)
    assert [STEP_BYTES, STEP_BYTES] == copies.pinned_bytes


@pytest.mark.parametrize("steps_read", [0, 1, 2])
def test_a_reader_that_leaves_early_leaves_no_copy(steps_read: int) -> None:
    """An exception in mid-walk reaches the caller once nothing is fetched any more."""
    copies = FakeDeviceCopier()
    image = image_on(copies, {"a": noise()})

    def read_and_fail() -> None:
        with image.reading(0, SIZE, 100) as steps:
            for _ in range(steps_read):
                next(steps)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        read_and_fail()
    assert [] == copies.pending


def test_a_step_that_was_not_filled_is_not_written() -> None:
    """After an exception the tensors have the steps before it, and nothing of the one it came in."""
    copies, tensor = FakeDeviceCopier(), torch.zeros(300, dtype=torch.uint8)

    def write_and_fail() -> None:
        with image_on(copies, {"a": tensor}).writing(0, 300, 100) as steps:
            for filled in range(3):
                (view,) = next(steps)
                view[:] = bytes([7]) * 100
                if filled == 1:
                    raise ConnectionError

    with pytest.raises(ConnectionError):
        write_and_fail()
    assert ([7] * 100 + [0] * 200, []) == (tensor.tolist(), copies.pending)


@pytest.mark.parametrize("direction", ["reading", "writing"])
def test_a_device_that_fails_is_heard_of(direction: str) -> None:
    """When a copy cannot begin, the walk raises what the device says, with no copy under way."""
    copies = FakeDeviceCopier(max_copies=1)
    image = image_on(copies, {"a": noise()})

    def walk() -> None:
        with image.reading(0, SIZE, 300) if direction == "reading" else image.writing(0, SIZE, 300) as steps:
            list(steps)

    with pytest.raises(RuntimeError, match="the device failed"):
        walk()
    assert [] == copies.pending


class FailingCopies(FakeDeviceCopier):
    """All copies fail when they are waited for, and each says its number."""

    def _begin(self, destination: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> FakePendingCopy:
        number = self.started_count
        self.started_count += 1

        def fail() -> None:
            raise RuntimeError(f"copy {number} failed")

        return FakePendingCopy(self, fail)


@pytest.mark.parametrize("direction", ["reading", "writing"])
def test_all_copies_are_waited_for_though_one_fails(direction: str) -> None:
    """The first failure is heard of once no copy is under way; what failed leaves its buffer to nobody."""
    copies = FailingCopies()
    image = image_on(copies, {"a": noise()})

    def walk() -> None:
        with image.reading(0, SIZE, 300) if direction == "reading" else image.writing(0, SIZE, 300) as steps:
            list(steps)

    for first in (0, 2):
        with pytest.raises(RuntimeError, match=f"copy {first} failed"):
            walk()
    assert ([], 4) == (copies.pending, len(copies.pinned_bytes))


def test_copies_on_two_devices_are_both_waited_for() -> None:
    """The first failure is heard of, once the other device's copy is done."""
    waited: list[str] = []

    def wait(name: str) -> None:
        waited.append(name)
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="one"):
        wait_all([partial(wait, "one"), partial(wait, "other")])
    assert ["one", "other"] == waited


@pytest.mark.parametrize("staged", [True, False])
def test_an_empty_range_is_one_empty_step(staged: bool) -> None:
    """Both ways, on a device and on the host; and it takes no buffer."""
    copies = FakeDeviceCopier(host=() if staged else [tensor := noise()])
    image = image_on(copies, {"a": noise() if staged else tensor})
    with image.reading(5, 5) as steps, image.writing(5, 5) as write_steps:
        assert ([[]], [[]]) == (list(map(list, steps)), list(map(list, write_steps)))
    assert [] == copies.pinned_bytes


def test_a_range_outside_the_image_is_refused() -> None:
    """A range that the image does not have is an error before there is a step to fill."""
    image = image_on(FakeDeviceCopier(), {"a": noise()})
    for walk in (image.reading, image.writing):
        with pytest.raises(ValueError, match="not within"), walk(0, SIZE + 1):
            pass
