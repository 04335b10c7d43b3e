"""`model fetch` as a pod runs it, from object storage and from a hub, both real HTTP servers on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tiny_config import CONFIG

from isthmus_runtime.checkpoints.provenance import pinned_revision

# The hub's client writes pieces of 10 MiB.
WEIGHTS = os.urandom(24_000_000)
WANTED = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "model-00001.safetensors": WEIGHTS,
    "model-00002.safetensors": WEIGHTS[::-1],
}
POOLING = b'{"pooling_mode_lasttoken": true}'
"""The one file of a folder below that is wanted."""
WHOLE = WANTED | {"1_Pooling.json": POOLING}
UNWANTED = {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"import os"}


def fetch(
    *arguments: str, env: dict[str, str] | None = None, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as an init container does. `before`: the beginning of its line."""
    return subprocess.run(
        [*before, sys.executable, "-P", "-m", "isthmus_runtime", "model", "fetch", *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", **(env or {})},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def holds(folder: Path, wanted: dict[str, bytes]) -> bool:
    """Exactly these, and the record of them."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    made = json.loads(found.pop("isthmus-source.json"))
    assert made["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in wanted.items()
    }
    return found == wanted


# ---- Object storage --------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    endpoint: str
    credentials: Path

    def arguments(self, out: Path, *more: str) -> list[str]:
        where = ["--s3-endpoint", self.endpoint, "--s3-region", "us-east-1"]
        return ["s3://models/tiny", str(out), *where, "--credentials-dir", str(self.credentials), *more]

    def fetch(self, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
        return fetch(*self.arguments(out, *more))


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "accessKeyId").write_text("id")
    (credentials / "secretAccessKey").write_text("secret")
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="id",
        aws_secret_access_key="secret",
    )
    client.create_bucket(Bucket="models")
    for name, content in (WANTED | UNWANTED | {"sub/config.json": b"{}", "1_Pooling/config.json": POOLING}).items():
        client.put_object(Bucket="models", Key=f"tiny/{name}", Body=content)
    yield Bucket(f"http://{host}:{port}", credentials)
    client.close()
    server.stop()


@pytest.mark.slow
def test_a_folder_of_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    done = bucket.fetch(tmp_path / "o" / "m")
    assert done.returncode == 0, done.stderr
    assert holds(tmp_path / "o" / "m", WHOLE)
    assert "model-00002.safetensors (3 of 4, 24.0 MB)" in done.stderr
    tokenizer = bucket.fetch(tmp_path / "t", "--tokenizer-only")
    assert tokenizer.returncode == 0, tokenizer.stderr
    assert holds(tmp_path / "t", {name: WANTED[name] for name in ("config.json", "tokenizer.json")})


@pytest.mark.slow
def test_a_try_takes_the_whole_files_of_the_one_before(bucket: Bucket, tmp_path: Path) -> None:
    digest = hashlib.sha256(f"s3://models/tiny of {bucket.endpoint} us-east-1".encode()).hexdigest()[:8]
    left = tmp_path / f".m.pod.{digest}.partial"
    left.mkdir()
    (left / "model-00001.safetensors").write_bytes(WEIGHTS)
    # Another of the same length, as the storage had it then.
    (left / "config.json").write_bytes(WANTED["config.json"][::-1])
    (left / "tokenizer.json").write_bytes(WANTED["tokenizer.json"])
    then = {"model-00001.safetensors": WEIGHTS, "config.json": WANTED["config.json"][::-1]}
    tags = {name: f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"' for name, data in then.items()}
    (left / ".tags.json").write_text(json.dumps(tags))
    (left / "model-00002.safetensors").write_bytes(b"not whole")
    (left / "model-00002.safetensors.6eF1").write_bytes(b"a piece")
    done = bucket.fetch(tmp_path / "m", "--resume-as", "pod")
    assert done.returncode == 0, done.stderr
    assert holds(tmp_path / "m", WHOLE)
    assert "downloading model-00001" not in done.stderr
    for name in ("model-00002", "config.json", "tokenizer.json"):
        assert f"downloading {name}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "said"), [("s3://models/nothing", "holds no model files"), ("s3://none/tiny", "NoSuchBucket")]
)
def test_what_is_not_there_is_named(bucket: Bucket, tmp_path: Path, source: str, said: str) -> None:
    done = fetch(source, *bucket.arguments(tmp_path / "m")[1:])
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "m").exists()


@contextmanager
def storage(hostile: str, asked: list[str]) -> Iterator[str]:
    """A server that answers as object storage, its URL. `hostile`: "listing", "pages" or the file that has no end,
    "short" for a file that is not all there, "cut" for listings that break off; `asked`: for these, as often."""
    files = {name: WANTED[name] for name in ("config.json", "tokenizer.json")}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(files[Path(self.path).name], body=False)

        def do_GET(self) -> None:
            name = "listing" if "list-type" in self.path else Path(self.path.split("?")[0]).name
            if name == hostile:
                self.send_endless()
            elif name == "listing" and hostile == "cut":
                asked.append(self.path)
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"100\r\n<ListBucketResult>")
                self.close_connection = True
            elif name == "listing":
                self.answer(self.listing())
            elif name in files:
                self.answer(files[name][: 1 if hostile == "short" else None])
            else:
                self.answer(b"<ListBucketResult/>")

        def listing(self) -> bytes:
            sizes, more = {name: len(content) for name, content in files.items()}, "<IsTruncated>false</IsTruncated>"
            if hostile == "pages":
                more = os.urandom(8).hex()
                more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{more}</NextContinuationToken>"
                sizes |= {f"{os.urandom(8).hex()}.json": 1 for _ in range(1000)}
            rows = "".join(f"<Contents><Key>tiny/{n}</Key><Size>{size}</Size></Contents>" for n, size in sizes.items())
            return f"<ListBucketResult>{more}{rows}</ListBucketResult>".encode()

        def answer(self, content: bytes, *, body: bool = True) -> None:
            self.send_response(200)
            self.send_header("ETag", '"x"')
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def send_endless(self) -> None:
            self.send_response(200)
            self.send_header("ETag", '"x"')
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):  # whoever asked has left
                while True:
                    self.wfile.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        ("listing", "more than are listed"),
        ("tokenizer.json", "more than are listed"),
        ("pages", "at most 10000"),
        ("short", "config.json has 1 bytes, and is listed with"),
        ("cut", "ConnectionClosedError"),
    ],
)
def test_object_storage_that_does_not_send_what_it_lists(tmp_path: Path, hostile: str, said: str) -> None:
    """It filled the memory, or a disk that other pods share."""
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    for name in ("accessKeyId", "secretAccessKey"):
        (credentials / name).write_text("x")
    out = tmp_path / "cache" / "m"
    # Far more than is allowed, lest a test without the bound fills this disk.
    limit = ["sh", "-c", 'ulimit -f 300000; ulimit -v 8000000; exec "$@"', "limit"]
    asked: list[str] = []
    with storage(hostile, asked) as url:
        done = fetch(*Bucket(url, credentials).arguments(out, "--resume-as", "pod"), before=limit)
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    if hostile == "cut":
        assert len(asked) > 1, "the client tries again"
    else:
        assert not list(out.parent.iterdir())


# ---- Hub -------------------------------------------------------------------------------------------------------


@dataclass
class Hub:
    """What the hub's client asks of a hub, and no more. `stuck`: file -> bytes after which answers stop.
    `ranges`: the parts of files that were asked for."""

    url: str = ""
    stuck: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    """Names that the listing has besides the files."""
    sha: str = ""
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 by name, as the listing gives it for large files."""
    blobs: dict[str, str] = field(default_factory=dict)
    """What git calls files, by name, in place of what is right."""
    pages: set[str] = field(default_factory=set)
    """Files that are answered once by somebody else's page."""
    sizes: bool = True
    """Whether the listing gives any, as mirrors may not."""
    endless: str = ""
    """The file whose answer has no end, or "listing"."""
    downloads: list[str] = field(default_factory=list)
    sent_to: dict[str, str] = field(default_factory=dict)
    """URL that is answered in place of a file, or of "listing"."""
    odd: dict[str, object] = field(default_factory=dict)
    """What the listing has in place of what is right."""
    xet: bool = False
    """Whether files have a hash of Xet's."""
    large: dict[str, int] = field(default_factory=dict)
    """Sizes that the answer to HEAD has in place of what is right."""
    asked: list[str] = field(default_factory=list)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE = b"<html>Sign in to this network</html>"


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    files = WANTED | UNWANTED | {"1_Pooling/config.json": POOLING}
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            hub.asked.append(path)
            named = "listing" if path.startswith("/api/models/") else path.rpartition(f"/{COMMIT}/")[2]
            if url := hub.sent_to.get(named):
                content = files.get(named, b"")
                head = {"X-Repo-Commit": COMMIT, "ETag": '"e"', "X-Linked-Size": str(len(content)), "Location": url}
                self.send(302, b"", head, body=False)
                return
            if path.startswith("/api/models/owner/tiny/revision/"):
                siblings: list[dict[str, object]] = [{"rfilename": name} for name in (*files, *hub.listed)]
                for one in siblings:
                    if hub.sizes:
                        one["size"] = len(files.get(str(one["rfilename"]), b""))
                    if digest := hub.digests.get(str(one["rfilename"])):
                        one["lfs"] = {"size": 1, "sha256": digest, "pointerSize": 1}
                    else:
                        name = str(one["rfilename"])
                        one["blobId"] = hub.blobs.get(name, git_blob(files.get(name, b"")))
                if hub.endless == "listing":
                    self.send_endless()
                    return
                listing = {"id": "owner/tiny", "sha": hub.sha or COMMIT, "siblings": siblings} | hub.odd
                self.send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, body=body)
                return
            name = path.removeprefix(f"/owner/tiny/resolve/{COMMIT}/")
            hub.downloads.append(path)
            if name not in files:
                self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, body=body)
                return
            if body and name in hub.pages:
                hub.pages.remove(name)
                self.send(200, PAGE, {"Content-Type": "text/html"}, body=True)
                return
            if body and name == hub.endless:
                self.send_endless()
                return
            content, asked = files[name], self.headers.get("Range", "")
            head = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            if not body and name in hub.large:
                head["X-Linked-Size"] = str(hub.large[name])
            if hub.xet:
                head |= {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": "/api/models/owner/tiny/xet-read-token/x"}
            if asked.startswith("bytes=") and body:
                hub.ranges.append(f"{name} {asked}")
                begin = int(asked.removeprefix("bytes=").split("-")[0])
                head["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
                self.send(206, content[begin:], head, body=True, stuck=0 if name in hub.stuck else None)
                return
            self.send(200, content, head, body=body, stuck=hub.stuck.get(name))

        def send_endless(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            with suppress(OSError):  # whoever asked has left
                while not ended.is_set():
                    self.wfile.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")

        def send(
            self, code: int, content: bytes, head: dict[str, str], *, body: bool, stuck: int | None = None
        ) -> None:
            self.send_response(code)
            for key, value in head.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content[:stuck])
            if body and stuck is not None:
                self.close_connection = True
                ended.wait(60)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


@pytest.mark.slow
def test_a_model_of_a_hub(tmp_path: Path) -> None:
    with hub_server() as hub:
        done = fetch("hf://owner/tiny@main", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
        assert done.returncode == 0, done.stderr
        assert holds(tmp_path / "m", WHOLE)
        tokenizer = fetch("hf://owner/tiny", str(tmp_path / "t"), "--tokenizer-only", env={"HF_ENDPOINT": hub.url})
        assert tokenizer.returncode == 0, tokenizer.stderr
        assert holds(tmp_path / "t", {name: WANTED[name] for name in ("config.json", "tokenizer.json")})


def test_a_mirror_that_lists_no_sizes(tmp_path: Path) -> None:
    with hub_server() as hub:
        hub.sizes = False
        done = fetch("hf://owner/tiny@main", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
        assert done.returncode == 0, done.stderr
        assert holds(tmp_path / "m", WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("listed", [True, False])
def test_a_file_that_hubs_give_to_others_alone_is_named(tmp_path: Path, listed: bool) -> None:
    """Before anything is downloaded, where the listing has its size."""
    name = "model-00001.safetensors"
    with hub_server() as hub:
        if listed:
            siblings = [{"rfilename": one, "size": 60_000_000_000 if one == name else 2} for one in WANTED]
            hub.odd = {"siblings": siblings}
        else:
            hub.large = {name: 60_000_000_000}
        done = fetch("hf://owner/tiny@main", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert name in done.stderr and "more than 50 GB" in done.stderr and "hf_transfer" not in done.stderr
    assert not listed or not hub.downloads


@pytest.mark.slow
@pytest.mark.parametrize("endless", ["listing", "tokenizer.json"])
def test_an_answer_without_end_is_left(tmp_path: Path, endless: str) -> None:
    """It filled the memory, or a disk that other pods share, and stayed there for the next try."""
    with hub_server() as hub:
        hub.endless = endless
        out = tmp_path / "cache" / "m"
        arguments = ("hf://owner/tiny@main", str(out), "--resume-as", "pod")
        # Far more than is allowed, lest a test without the bound fills this disk.
        limit = ["sh", "-c", 'ulimit -f 300000; ulimit -v 8000000; exec "$@"', "limit"]
        done = fetch(*arguments, env={"HF_ENDPOINT": hub.url}, before=limit)
    assert done.returncode == 1, done.stderr
    assert "hf://owner/tiny: more than" in done.stderr and "Traceback" not in done.stderr
    assert not list(out.parent.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("what", ["listing", "tokenizer.json"])
@pytest.mark.parametrize("host", ["169.254.169.254", "[::ffff:169.254.169.254]", "168.63.129.16"])
def test_a_hub_sends_nobody_to_an_address_nearer_than_its_own(tmp_path: Path, what: str, host: str) -> None:
    """Whatever pods reach was asked: what clouds tell machines, and services of the cluster."""
    with hub_server() as hub:
        hub.sent_to[what] = f"http://{host}/latest/meta-data"
        done = fetch("hf://owner/tiny@main", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"the hub sends its client to {host.strip('[]')} at " in done.stderr, done.stderr
    assert "a link address, while its own is loopback" in done.stderr


@pytest.mark.slow
def test_a_hub_may_have_its_files_elsewhere(tmp_path: Path) -> None:
    with hub_server() as hub, hub_server() as other:
        hub.sent_to = {name: f"{other.url}/owner/tiny/resolve/{COMMIT}/{name}" for name in WANTED}
        done = fetch("hf://owner/tiny@main", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
        assert done.returncode == 0, done.stderr
        assert {path.rpartition("/")[2] for path in other.downloads} == set(WANTED)
    assert holds(tmp_path / "m", WHOLE)


@pytest.mark.slow
def test_files_come_over_http_alone_where_their_bytes_are_counted(tmp_path: Path) -> None:
    """Xet's client is another one, which goes where the hub says and writes what it is sent."""
    with hub_server() as hub:
        hub.xet = True
        done = fetch("hf://owner/tiny@main", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
        assert done.returncode == 0, done.stderr
        assert not [path for path in hub.asked if "xet" in path]
    assert holds(tmp_path / "m", WHOLE)


@pytest.mark.slow
def test_a_revision_is_pinned_to_the_commit_that_it_was(tmp_path: Path) -> None:
    with hub_server() as hub:
        hub.digests["model-00001.safetensors"] = hashlib.sha256(WEIGHTS).hexdigest()
        out = tmp_path / "m"
        assert fetch("hf://owner/tiny@main", str(out), env={"HF_ENDPOINT": hub.url}).returncode == 0
        assert hub.downloads and all(f"/resolve/{COMMIT}/" in path for path in hub.downloads)
    made = json.loads((out / "isthmus-source.json").read_text())
    assert (made["source"], made["revision"], made["commit"]) == ("hf://owner/tiny", "main", COMMIT)
    assert pinned_revision(out) == COMMIT


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting a small file system needs root"
)
@pytest.mark.parametrize("source", ["hub", "bucket"])
def test_a_disk_that_is_too_small_is_told_as_that_by_either_client(tmp_path: Path, bucket: Bucket, source: str) -> None:
    """A file system of 30 MB in a mount namespace of the command's: 24 MB fit, 48 do not."""
    cache = tmp_path / "cache"
    cache.mkdir()
    small = 'mount -t tmpfs -o size=30m none "$0" && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", small, str(cache)]
    if source == "bucket":
        done = fetch(*bucket.arguments(cache / "m"), before=before)
    else:
        with hub_server() as hub:
            done = fetch("hf://owner/tiny", str(cache / "m"), env={"HF_ENDPOINT": hub.url}, before=before)
    assert done.returncode == 1
    assert f"{cache}: no space is left for m (" in done.stderr and "of 31 MB" in done.stderr
    assert "make the volume larger" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../x", "/etc/cron.d/x.json", "x\0.json", "Config.json"])
def test_a_listing_with_hostile_names_is_refused_before_anything_is_downloaded(tmp_path: Path, name: str) -> None:
    with hub_server() as hub:
        hub.listed = [name]
        done = fetch("hf://owner/tiny@main", str(tmp_path / "a" / "b" / "m"), env={"HF_ENDPOINT": hub.url})
        assert done.returncode == 1
        assert "hf://owner/tiny lists" in done.stderr and "Traceback" not in done.stderr
        assert hub.downloads == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_what_a_hub_says_of_itself_is_not_believed(tmp_path: Path) -> None:
    with hub_server() as hub:
        hub.sha = "../../evil"
        done = fetch("hf://owner/tiny", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
        assert done.returncode == 1 and "which is no commit" in done.stderr and hub.downloads == []
        hub.sha, hub.digests["model-00002.safetensors"] = "", "0" * 64
        done = fetch("hf://owner/tiny", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
        assert done.returncode == 1 and "model-00002.safetensors has SHA-256" in done.stderr
        assert not (tmp_path / "m").exists()
        hub.digests = {}
        for there, here in (("config.json", "config.json"), ("1_Pooling/config.json", "1_Pooling.json")):
            hub.blobs = {there: "0" * 40}
            done = fetch("hf://owner/tiny", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
            assert done.returncode == 1 and f"{here} is {git_blob(WHOLE[here])} to git" in done.stderr
            assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_a_page_that_somebody_else_sends_in_place_of_a_file_begins_none(tmp_path: Path) -> None:
    """The next try went on behind the page, as long as it was shorter than the file."""
    out = tmp_path / "cache" / "m"
    with hub_server() as hub:
        hub.pages = {"config.json", "model-00001.safetensors"}
        for last in (False, True):
            done = fetch("hf://owner/tiny@main", str(out), "--resume-as", "pod", env={"HF_ENDPOINT": hub.url})
            assert done.returncode == (not last), done.stderr
            assert last or "Consistency check failed" in done.stderr
        assert holds(out, WHOLE) and not hub.pages


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [
        {"siblings": [None]},
        {"siblings": [{"rfilename": "config.json", "size": "8"}]},
        {"siblings": [{"rfilename": "config.json", "size": 8, "lfs": {"sha256": 5, "size": 8, "pointerSize": 1}}]},
        {"sha": 5},
    ],
    ids=str,
)
def test_a_listing_that_is_none_is_named(tmp_path: Path, odd: dict[str, object]) -> None:
    with hub_server() as hub:
        hub.odd = odd
        done = fetch("hf://owner/tiny", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
    assert done.returncode == 1 and "the hub's listing " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "m").exists()


def test_a_model_the_hub_does_not_have(tmp_path: Path) -> None:
    with hub_server() as hub:
        done = fetch("hf://owner/other", str(tmp_path / "m"), env={"HF_ENDPOINT": hub.url})
    assert done.returncode == 1
    assert "owner/other does not exist on the hub" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_download_has_a_deadline_and_the_next_try_goes_on_from_it(tmp_path: Path) -> None:
    """As in a pod whose init container is restarted: in the middle of a file."""
    with hub_server() as hub:
        hub.stuck["model-00001.safetensors"] = 22_000_000
        arguments = ("hf://owner/tiny@main", str(tmp_path / "m"), "--resume-as", "pod", "--deadline")
        env = {"HF_ENDPOINT": hub.url}
        # Two pieces are to be written by then, on a machine that others use, too.
        done = fetch(*arguments, "20s", env=env)
        assert done.returncode == 1
        assert "not finished after --deadline 20 s (of an engine: its service's spec.availability" in done.stderr
        hub.stuck.clear()
        hub.ranges.clear()
        done = fetch(*arguments, "60s", env=env)
        assert done.returncode == 0, done.stderr
        assert holds(tmp_path / "m", WHOLE)
        assert hub.ranges == ["model-00001.safetensors bytes=20971520-"]
