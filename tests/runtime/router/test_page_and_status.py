"""What clients may know of a service, the files of the page, and the rates that both show."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import served

from isthmus_runtime.errors import InvalidRequest
from isthmus_runtime.protocol.info import EngineInfo, KvInfo, LoadInfo, TransferInfo
from isthmus_runtime.router.page import add_page
from isthmus_runtime.router.rates import Rates
from isthmus_runtime.router.remote_engine import EngineView
from isthmus_runtime.router.status import ServiceStatus, service_status
from isthmus_runtime.serving.app import add_pages, make_app

STATIC = files("isthmus_runtime.router").joinpath("static")
SECRETS = ("10.0.0.7", "/models/secret-path", "fingerprint-1", "epoch-1", "digest-1", "tunnel broke")


def view(role, *, ready=True, running=0, waiting=0, usage=0.0, blocks=100, tokens=0.0, sent=0.0, gbps=1.5, known=True):
    transfer = TransferInfo(
        mode="none" if role == "unified" else "direct",
        transport="tcp",
        probed_gbps=gbps,
        epoch="epoch-1",
        reason="10.0.0.7: tunnel broke",
    )
    info = EngineInfo(
        role=role,
        model="/models/secret-path",
        served_names=("m",),
        fingerprint="fingerprint-1",
        kv=KvInfo(
            block_size=16,
            physical_blocks=blocks + 1,
            usable_blocks=blocks,
            bytes_per_block=1,
            max_model_len=4096,
            layout_digest="digest-1",
        ),
        transfer=transfer,
        version="0",
        running=running,
        waiting=waiting,
        load=LoadInfo(kv_usage=usage),
    )
    return EngineView(role, ready, info if known else None, tokens, sent)


def status(*views, roles=("prefill", "decode"), problem="", show_load=True):
    return service_status(
        views,
        roles,
        models=["m"],
        version="0.1.0",
        problem=problem,
        max_model_len=4096,
        show_load=show_load,
    )


def test_a_role_is_the_sum_of_its_engines_and_kv_counts_by_its_size():
    found = status(
        view("prefill", running=1, sent=2e9, gbps=3.0),
        view("prefill", waiting=2, sent=1e9, gbps=2.0, ready=False),
        view("decode", running=4, usage=0.5, blocks=300, tokens=30.0),
        view("decode", running=1, usage=0.1, blocks=100, tokens=12.5),
        view("decode", known=False, ready=False),
    )
    prefill, decode = found.roles
    assert (prefill.known, prefill.ready, prefill.running, prefill.waiting) == (2, 1, 1, 2)
    assert (decode.known, decode.ready, decode.running, decode.kv_usage) == (3, 2, 5, 0.4)
    assert found.tokens_per_s == 42.5
    assert found.transfer is not None
    assert (found.transfer.mode, found.transfer.transport) == ("direct", "tcp")
    assert (found.transfer.link_gb_per_s, found.transfer.moving_gb_per_s) == (2.0, 3.0)
    assert found.ready and not found.reason


def test_a_service_without_engines_says_why_and_has_no_transfer():
    found = status(problem="no decode engine takes requests now")
    assert not found.ready and found.reason == "no decode engine takes requests now"
    assert [(r.role, r.known, r.ready) for r in found.roles] == [("prefill", 0, 0), ("decode", 0, 0)]
    assert found.transfer is None
    assert status(view("unified"), roles=("unified",)).transfer is None


def test_tenants_learn_nothing_of_the_load_that_others_make():
    views = [view("prefill", running=3, sent=1e9), view("decode", waiting=7, usage=0.9, tokens=99.0)]
    assert status(*views, show_load=False) == status(view("prefill"), view("decode"), show_load=False)


@pytest.mark.parametrize("show_load", [True, False])
def test_no_address_path_or_fingerprint_of_an_engine_is_told(show_load):
    text = status(view("prefill"), view("decode", ready=False), show_load=show_load).model_dump_json()
    assert not [secret for secret in SECRETS if secret in text]


def load(tokens=0, sent=0):
    return LoadInfo(generated_tokens=tokens, sent_bytes=sent)


def test_rates_are_of_the_last_seconds_of_one_process():
    rates = Rates()
    rates.add(0.0, "a", load(1000))
    assert rates.tokens_per_s(0.0) == 0
    rates.add(1.0, "a", load(1020, 500))
    assert rates.tokens_per_s(1.0) == 20 and rates.sent_bytes_per_s(1.0) == 500
    for second in range(2, 12):
        rates.add(float(second), "a", load(1020, 500))
    assert rates.tokens_per_s(11.0) == 0, "what was long ago is no rate"
    rates.add(12.0, "b", load(3))
    assert rates.tokens_per_s(12.0) == 0, "a new process counts from nothing"
    rates.add(13.0, "b", load(10))
    assert rates.tokens_per_s(13.0) == 7
    assert rates.tokens_per_s(60.0) == 0, "nobody knows what a silent engine does"


@given(st.lists(st.tuples(st.floats(0.1, 8), st.integers(0, 1000), st.sampled_from("ab")), max_size=40))
def test_rates_are_never_negative_and_never_above_the_fastest_second(steps):
    rates, now, total, epoch, fastest = Rates(), 0.0, 0, "", 0.0
    for pause, grown, of in steps:
        now += pause
        total = total + grown if of == epoch else grown
        fastest = max(fastest, grown / pause) if of == epoch else fastest
        epoch = of
        rates.add(now, of, load(total))
        assert 0 <= rates.tokens_per_s(now) <= fastest * 1.000001


FILES = [("/", "index.html", "html"), ("/page.css", "page.css", "css"), ("/page.js", "page.js", "javascript")]


def page_app(check=lambda request: None):
    app = make_app("test", bodies=())
    add_page(app, lambda: status(view("prefill"), view("decode")), check)
    add_pages(app)
    return app


def test_the_files_are_whole_and_nothing_else_may_run(run):
    async def main():
        async with served(page_app()) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for path, name, kind in FILES:
                async with session.get(path) as answer:
                    assert answer.status == 200 and kind in answer.content_type
                    assert await answer.read() == STATIC.joinpath(name).read_bytes()
                    policy = answer.headers["Content-Security-Policy"]
                    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
                    assert "unsafe" not in policy and "*" not in policy and "://" not in policy
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    tag = answer.headers["ETag"]
                async with session.get(path, headers={"If-None-Match": tag}) as again:
                    assert again.status == 304 and await again.read() == b""
                async with session.head(path) as head:
                    assert head.status == 200
            async with session.get("/status") as answer:
                ServiceStatus.model_validate_json(await answer.read())

    run(main())


def test_the_status_asks_for_a_key_and_the_page_does_not(run):
    class Refused(InvalidRequest):
        status = 401

    def check(request):
        if request.headers.get("authorization") != "Bearer right":
            raise Refused("Authorization: send a valid API key")

    async def main():
        async with served(page_app(check)) as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for key, expected in (("", 401), ("Bearer wrong", 401), ("Bearer right", 200)):
                async with session.get("/status", headers={"Authorization": key}) as answer:
                    assert answer.status == expected
            async with session.get("/") as answer:
                assert answer.status == 200

    run(main())


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []
        self.feed(STATIC.joinpath("index.html").read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_page_names_no_other_host_and_has_nothing_inline():
    for tag, attrs in _Tags().tags:
        for name in ("src", "href"):
            assert "//" not in attrs.get(name, "").replace("http://www.w3.org/2000/svg", "").replace("http:", ""), attrs
            assert not attrs.get(name, "").startswith("/"), "it must work below a gateway's path"
        assert "style" not in attrs and not [name for name in attrs if name.startswith("on")], (tag, attrs)
    for name in ("page.css", "page.js"):
        assert not re.search(r"https?://|innerHTML|outerHTML|document\.write|eval\(", STATIC.joinpath(name).read_text())


def test_every_field_has_a_label():
    tags = _Tags().tags
    labelled = {attrs["for"] for tag, attrs in tags if tag == "label" and "for" in attrs}
    inside = 0
    text = STATIC.joinpath("index.html").read_text()
    for tag, attrs in tags:
        if tag in ("input", "select", "textarea"):
            wrapped = re.search(rf"<label[^>]*>[^<]+(<span[^>]*>[^<]*</span>)?[^<]*<{tag} id=\"{attrs['id']}\"", text)
            wrapped = wrapped or re.search(rf"<label[^>]*><span[^>]*>[^<]+</span> <{tag} id=\"{attrs['id']}\"", text)
            assert attrs["id"] in labelled or wrapped, attrs
            inside += 1
    assert inside == 6


def _luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(a, b):
    """WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_edges_have_contrast(scheme):
    blocks = re.findall(r":root \{(.*?)\}", STATIC.joinpath("page.css").read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", blocks[scheme]))
    for ground in ("paper", "sheet"):
        for text in ("ink", "quiet", "accent", "bad"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert _contrast(colours["edge"], colours[ground]) >= 3, ground
    assert _contrast(colours["on-accent"], colours["accent"]) >= 4.5
