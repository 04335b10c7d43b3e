"""Runs in a pod: object storage with a model in it, behind a link of a given speed.

    bucket.py FOLDER BYTES_PER_SECOND

The folder's files are in s3://models/model, any key is let in, at port 9000 once they are there. The speed is that of
all downloads together.
"""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

# The pod's Service gives it a name with dots, which is no bucket's name before an endpoint's.
os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"

import boto3
from moto.server import ThreadedMotoServer

PORT = 9000
PIECE = 65536


def fill(endpoint: str, folder: Path) -> None:
    client = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    client.create_bucket(Bucket="models")
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            client.upload_file(str(path), "models", f"model/{path.name}")


class Link:
    """Each piece waits for its turn."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = time.monotonic()

    async def carry(self, size: int) -> None:
        self._free_at = max(self._free_at, time.monotonic()) + size / self._rate
        await asyncio.sleep(self._free_at - time.monotonic())


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link | None) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(PIECE):
            if link is not None:
                await link.carry(len(piece))
            writer.write(piece)
            await writer.drain()
    writer.close()


async def serve(host: str, port: int, link: Link) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(copy(reader, inner_writer, None), copy(inner_reader, writer, link))

    server = await asyncio.start_server(accept, "0.0.0.0", PORT)
    await server.serve_forever()


def main(folder: str, bytes_per_second: str) -> None:
    storage = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    storage.start()
    host, port = storage.get_host_and_port()
    fill(f"http://{host}:{port}", Path(folder))
    asyncio.run(serve(host, port, Link(float(bytes_per_second))))


if __name__ == "__main__":
    main(*sys.argv[1:])
