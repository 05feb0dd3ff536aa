"""S3 server of `benchmarks.storage`: SeaweedFS over loopback, with both images."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.seaweed import REGION, WRITER, SeaweedServer
from benchmarks.storage.cases import Bucket
from benchmarks.storage.images import FileFormat, StoredImage

BUCKET = "bench"
SIGNATURE_REUSE_S = 24 * 3600
UPLOADS = 4


@contextlib.contextmanager
def serving(
    images: Mapping[str, StoredImage], formats_by_image: Mapping[str, frozenset[FileFormat]], folder: Path
) -> Iterator[dict[str, Bucket]]:
    """Run a server with these images in the requested formats for the block; yields the buckets by name."""
    # Imported here, because the loader processes fork from one that has imported this module and no client.
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
        for name, file_formats in formats_by_image.items():
            stored = images[name]
            bucket = Bucket(BUCKET, name, server.environment(), {})
            # Includes the index of the tensors' files, and a snapshot's manifest.
            folders = [stored.folder / file_format for file_format in sorted(file_formats)]
            for path in sorted(path for folder in folders for path in folder.iterdir()):
                key = f"{name}/{path.relative_to(stored.folder)}"
                client.upload_file(str(path), BUCKET, key, Config=TransferConfig(max_concurrency=UPLOADS))
            presigned = {
                path.name: client.generate_presigned_url(
                    "get_object",
                    Params={"Bucket": BUCKET, "Key": bucket.key("safetensors", path.name)},
                    ExpiresIn=SIGNATURE_REUSE_S,
                )
                for path in stored.safetensors
            }
            buckets[name] = Bucket(BUCKET, name, server.environment(), presigned)
        os.sync()  # otherwise written data is still being flushed to disk during the first runs
        yield buckets
