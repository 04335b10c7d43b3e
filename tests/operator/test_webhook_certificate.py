"""Renewal of the webhook's certificate on a real TLS server: the one that the operator runs."""

import asyncio
import json
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tls_pair import make_pair

from isthmus_operator.errors import UserError
from isthmus_operator.shell.handlers import webhook_server
from isthmus_operator.shell.operator import OperatorOptions

WITHIN_S = 20.0


class Mounted:
    """A folder as the kubelet mounts a Secret: files that point into a folder which is exchanged at one stroke."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(Path("..data") / name)

    def show(self, pair: Path) -> None:
        (self.folder / "..next").symlink_to(pair)
        os.replace(self.folder / "..next", self.folder / "..data")


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """The operator's own server, with a webhook that allows everything; its URL."""
    server = webhook_server(OperatorOptions(webhook_port=0, webhook_cert_dir=str(folder)), lambda: None)

    async def allow(review: Any, **_: Any) -> Any:
        return {"response": {"allowed": True, "uid": review["request"]["uid"]}}

    configs = server(allow)
    config = await anext(configs)
    url = str(config["url"]).replace("0.0.0.0", "127.0.0.1")
    waiting = asyncio.ensure_future(anext(configs))
    try:
        yield url
        assert not waiting.done(), "the server was started again"
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await configs.aclose()  # type: ignore[attr-defined]


async def ask(client: aiohttp.ClientSession, url: str, trust: Path, *, name: str | None = None) -> str:
    """What the webhook answers to somebody who trusts one certificate alone, or why there is no answer."""
    context = ssl.create_default_context(cafile=trust / "tls.crt")
    kind = {"group": "serving.isthmus.dev", "version": "v1alpha1", "resource": "inferenceservices"}
    review = {"request": {"uid": "u", "resource": kind, "object": {"metadata": {"name": "n"}}}}
    try:
        async with client.post(url, json=review, ssl=context, server_hostname=name) as answer:
            return str(json.loads(await answer.text())["response"]["uid"])
    except aiohttp.ClientConnectorCertificateError:
        return "not trusted"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S):
            await test()

    asyncio.run(main())


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    for name in ("one", "two"):
        make_pair(tmp_path / name)
    (tmp_path / "mount").mkdir()
    found = Mounted(tmp_path / "mount")
    found.show(tmp_path / "one")
    return found


@pytest.mark.parametrize("name", ["webhook.ns.svc", None], ids=["named", "by address"])
def test_the_first_connection_after_a_renewal_gets_the_new_certificate(
    mounted: Mounted, tmp_path: Path, name: str | None
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"

    async def main() -> None:
        async with serving(mounted.folder) as url, aiohttp.ClientSession() as kept:

            async def fresh(trust: Path) -> str:
                async with aiohttp.ClientSession() as client:
                    return await ask(client, url, trust, name=name)

            assert (await ask(kept, url, one, name=name), await fresh(two)) == ("u", "not trusted")
            mounted.show(two)
            assert (await fresh(two), await fresh(one)) == ("u", "not trusted")
            mounted.show(one)
            assert (await fresh(two), await fresh(one)) == ("not trusted", "u")

    run(main)


def test_a_pair_that_does_not_fit_is_told_of_once_and_the_former_one_goes_on(
    mounted: Mounted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, mixed = tmp_path / "one", tmp_path / "two", tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "tls.crt").write_bytes((two / "tls.crt").read_bytes())
    (mixed / "tls.key").write_bytes((one / "tls.key").read_bytes())

    async def main() -> None:
        async with serving(mounted.folder) as url:

            async def fresh(trust: Path) -> str:
                async with aiohttp.ClientSession() as client:
                    return await ask(client, url, trust)

            for present in (mixed, tmp_path / "nowhere"):
                mounted.show(present)
                assert (await fresh(one), await fresh(one)) == ("u", "u")
            mounted.show(two)
            assert (await fresh(two), await fresh(one)) == ("u", "not trusted")

    with caplog.at_level(logging.INFO, "isthmus_operator.shell.certificates"):
        run(main)
    ours = [record for record in caplog.records if record.name == "isthmus_operator.shell.certificates"]
    told = [(record.levelname, record.getMessage().partition(": ")[2]) for record in ours]
    assert [level for level, _ in told] == ["WARNING", "WARNING", "INFO"]
    assert all("not usable, still serving with the previous certificate" in text for _, text in told[:2])


@pytest.mark.parametrize("broken", ["tls.crt", "tls.key"])
def test_an_unusable_folder_is_named_with_its_flag(tmp_path: Path, broken: str) -> None:
    make_pair(tmp_path / "one")
    for spoil in (lambda file: file.write_text("no PEM"), lambda file: file.unlink()):
        spoil(tmp_path / "one" / broken)
        with pytest.raises(UserError, match=r"--webhook-cert-dir .*one: no usable tls.crt and tls.key"):
            webhook_server(OperatorOptions(webhook_port=1, webhook_cert_dir=str(tmp_path / "one")), lambda: None)
