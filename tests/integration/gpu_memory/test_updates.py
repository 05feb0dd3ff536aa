"""In-place updates of a served image in device memory: what old readers get, and what the new digests are of."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

from rfork.cuda.device import TorchDevices, cuda_driver
from rfork.image.chunks import MIB
from rfork.image.memory import Image, compute_manifest
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.transport.http import HttpTransport
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import device_image

SIZES = [3 * MIB, MIB]
ENGINE_COPIES = 200
"""Enough work of the engine that a digest which does not wait for it is computed first."""


def seed_of(image: Image) -> Seed:
    """Return a seed of the image over http that has not been started."""
    settings = InstanceSettings(drain_timeout_s=0)
    connections = Connections([HttpTransport(settings)])
    return Seed(
        image, InstanceIdentity("m", instance_id="seed"), settings, connections, manifest=compute_manifest(image)
    )


def token_for(seed: Seed) -> str:
    """Return a lease for the seed's current weights."""
    key = derive_key(b"s" * 32, "seed")
    seed.set_lease_keys([key])
    claims = LeaseClaims("fork-1", "seed", seed.image.layout.layout_id, None, seed.generation, time.time() + 60)
    return sign(claims, decode_key(key))


def test_an_update_waits_for_the_engine_before_it_digests(fake_gpu: FakeGpu) -> None:
    """Kernels that write the new weights still run on the engine's stream when the block ends."""
    image, new = (device_image(fake_gpu, sizes, filled=True) for sizes in (SIZES, SIZES[::-1]))
    old, new_digests, scratch = compute_manifest(image), compute_manifest(new).digests, fake_gpu.allocate(2 * MIB)
    ((_, target, nbytes), (_, source, _)) = (each.segments(0, sum(SIZES))[0] for each in (image, new))
    driver, stream = cuda_driver(), TorchDevices.current_stream(0)
    copy = driver.library.function("cuMemcpyAsync")
    with seed_of(image) as seed:
        with seed.updating(), driver.on_device(0):
            for _ in range(ENGINE_COPIES):
                assert 0 == copy(scratch.data_ptr() + MIB, scratch.data_ptr(), MIB, stream)
            assert 0 == copy(target, source, nbytes, stream)
        published = seed.manifest
    assert published is not None
    assert new_digests == published.digests
    assert new_digests != old.digests


def test_a_fence_leaves_no_copy_of_the_old_weights(fake_gpu: FakeGpu) -> None:
    """A reader that does not consume its bytes is cut in mid-slice; whatever it still receives is old data."""
    image = device_image(fake_gpu, [64 * MIB])
    (tensor,) = image.tensor_slices(0, 64 * MIB)
    seed = seed_of(image)
    token = token_for(seed)
    with seed:
        _, endpoint = seed.open_channel(seed.check(token), image.layout.layout_id, ["http"], "127.0.0.1")
        location = urlsplit(endpoint.parameters["url"])
        with socket.create_connection((str(location.hostname), int(location.port or 0)), 60) as reader:
            request = f"GET {location.path} HTTP/1.1\r\nHost: seed\r\n"
            reader.sendall(f"{request}Authorization: Bearer {token}\r\n\r\n".encode())
            with reader.makefile("rb") as response:
                while response.readline() != b"\r\n":
                    pass
                with seed.updating():
                    queued = fake_gpu.queued_copies
                    fake_gpu.write(tensor, b"\x01" * 64 * MIB)
                body = response.read()
    assert 0 == queued
    assert 0 == body.count(1)
    assert len(body) < 64 * MIB
