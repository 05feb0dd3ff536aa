"""The S3 server of `benchmarks.storage`: SeaweedFS over loopback, with both images in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.seaweed import REGION, WRITER, SeaweedServer
from benchmarks.storage_case import Bucket
from benchmarks.storage_image import Stored

BUCKET = "bench"
SIGNED_S = 24 * 3600
UPLOADS = 4


@contextlib.contextmanager
def serving(images: Mapping[str, Stored], folder: Path) -> Iterator[dict[str, Bucket]]:
    """A server with both images, but for what torch pickles, for the time of the block; by image name."""
    # Here, as the processes that run loaders fork from one that has imported this module and no client.
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    with SeaweedServer(folder, buckets=(BUCKET,)) as server:
        client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=REGION,
            aws_access_key_id=WRITER.access_key,
            aws_secret_access_key=WRITER.secret_key,
            config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
        )
        buckets: dict[str, Bucket] = {}
        for name, stored in images.items():
            bucket = Bucket(BUCKET, name, server.environment(), {})
            for path in (*stored.checkpoint.iterdir(), *stored.tensorizer, *stored.snapshot.parent.iterdir()):
                key = f"{name}/{path.relative_to(stored.folder)}"
                client.upload_file(str(path), BUCKET, key, Config=TransferConfig(max_concurrency=UPLOADS))
            presigned = {
                path.name: client.generate_presigned_url(
                    "get_object",
                    Params={"Bucket": BUCKET, "Key": bucket.key("safetensors", path.name)},
                    ExpiresIn=SIGNED_S,
                )
                for path in stored.safetensors
            }
            buckets[name] = Bucket(BUCKET, name, server.environment(), presigned)
        yield buckets
