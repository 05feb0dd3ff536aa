"""Fixtures: a program that uses the fake driver directly, and a process whose memory it opens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.unit.cuda.driver_program import Program, SourceProcess


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    """The fake driver, not used by rfork. Tests read its reports themselves."""
    fake = FakeGpu()
    fake.reset()
    yield fake
    fake.free_all()
    fake.reset()


@pytest.fixture
def program(gpu: FakeGpu) -> Iterator[Program]:
    """A program with the context of device 0."""
    program = Program(gpu)
    yield program
    program.end()


@pytest.fixture
def source(gpu: FakeGpu) -> Iterator[SourceProcess]:
    """A process whose memory the program opens."""
    process = SourceProcess()
    yield process
    process.kill()
