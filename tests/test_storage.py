"""Files are listed and read alike wherever they are; what a store does wrong is one sentence."""

import glob
import http.server
import os
import random
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from openelm_jax.data import storage
from openelm_jax.errors import UserError

TREE = (
    *("a.jsonl", "b.jsonl", "B.jsonl", "a.parquet", "ab.jsonl", ".hidden.jsonl"),
    *("web/a.jsonl", "web/deep/a.jsonl", "web/deep/deeper/c.jsonl", "code/a.jsonl"),
    *("web/.cache/a.jsonl", "[x]/a.jsonl", "x/a.jsonl", "with space/a.jsonl"),
)


class FlakyFileSystem(MemoryFileSystem):
    """A store in memory whose next answers are the errors in `troubles`."""

    protocol = "flaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    troubles: ClassVar[list[Exception]] = []

    def _trouble(self):
        if self.troubles:
            raise self.troubles.pop(0)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._trouble()
        return super().cat_file(path, start=start, end=end, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._trouble()
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path, **kwargs):
        self._trouble()
        return super().info(path, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        self._trouble()
        return super().get_file(rpath, lpath, **kwargs)


@pytest.fixture
def waits(monkeypatch):
    """Return the list of the waits between tries, which take no time."""
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    return waited


@pytest.fixture
def flaky():
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.store.clear()
    FlakyFileSystem.troubles.clear()
    with fsspec.open("flaky://corpus/a.jsonl", "wb") as file:
        file.write(b"0123456789")
    return FlakyFileSystem.troubles


class Handler(http.server.BaseHTTPRequestHandler):
    """A web server of a folder, with range requests; the tests set what it does wrong."""

    folder: Path
    listings = True
    ranges = True
    failures: ClassVar[list[int]] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.folder / urllib.parse.unquote(self.path).strip("/")
        if self.failures:
            self._send(self.failures.pop(0), b"")
        elif path.is_dir() and not self.listings:
            self._send(403, b"")
        elif path.is_dir():
            names = [f"{p.name}/" if p.is_dir() else p.name for p in path.iterdir()]
            links = "".join(f'<a href="{urllib.parse.quote(n)}">{n}</a>' for n in names)
            up = '<a href="../">up</a><a href="?C=N;O=D">by name</a>'
            self._send(200, f"{up}{links}".encode(), kind="text/html")
        elif not path.is_file():
            self._send(404, b"")
        else:
            self._send_file(path)

    def _send_file(self, path):
        data = path.read_bytes()
        headers = {"Content-Encoding": "gzip"} if path.suffix == ".gz" else {}
        if not self.ranges or "Range" not in self.headers:
            self._send(200, data, headers)
            return
        start, end = self.headers["Range"].removeprefix("bytes=").split("-")
        part = data[int(start) : int(end) + 1]
        if int(start) >= len(data):
            self._send(416, b"")
            return
        headers["Content-Range"] = f"bytes {start}-{int(start) + len(part) - 1}/{len(data)}"
        self._send(206, part, headers)

    def _send(self, status, data, headers=None, kind="application/octet-stream"):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """Return (URL, handler class) of a web server of tmp_path/web."""
    pytest.importorskip("aiohttp")
    (tmp_path / "web").mkdir()

    class Here(Handler):
        folder = tmp_path / "web"
        failures: ClassVar[list[int]] = []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Here
        server.shutdown()
        thread.join()


def grow(root, names=TREE):
    """Write files that hold their own names."""
    for name in names:
        path = storage.join(str(root), name)
        if not storage.is_url(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with fsspec.open(path, "wb") as file:
            file.write(name.encode())


def below(root, pattern):
    root = str(root)
    escaped = root if storage.is_url(root) else glob.escape(root)
    found = storage.list_files(storage.join(escaped, pattern))
    assert all(len(path[len(root) + 1 :].encode()) == size for path, size in found)
    return [path[len(root) + 1 :] for path, _ in found]


PATTERNS = (
    *("*.jsonl", "**/*.jsonl", "*/*.jsonl", "?.jsonl", "web/**", "**", "**/deep/*", "**/a.*"),
    *("web/a.jsonl", "no.jsonl", "web", "*", "*/deep/a.jsonl", "[ab].jsonl", ".*.jsonl"),
    *("**/.cache/*", "[[]x]/*", "no/*.jsonl", "a.jsonl/*", "**/**/c.jsonl", "with space/*.jsonl"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_folder_is_matched_as_python_matches_it(tmp_path, pattern):
    grow(tmp_path)
    expected = set(glob.glob(pattern, root_dir=tmp_path, recursive=True))
    assert below(tmp_path, pattern) == sorted(n for n in expected if (tmp_path / n).is_file())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_store_is_matched_as_a_folder_is(tmp_path, pattern):
    url = f"memory://{tmp_path.name}"
    grow(tmp_path)
    grow(url)
    assert below(url, pattern) == below(tmp_path, pattern)


def test_the_name_of_the_folder_is_no_pattern(tmp_path):
    grow(tmp_path / "data[1]*")
    grow(tmp_path / "data1x")
    assert below(tmp_path / "data[1]*", "*.jsonl") == sorted(
        ["a.jsonl", "b.jsonl", "B.jsonl", "ab.jsonl"]
    )
    assert below(tmp_path / "data[1]*", "a.jsonl") == ["a.jsonl"]


def test_links_are_followed_unless_they_lead_nowhere(tmp_path):
    grow(tmp_path / "there")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "folder").symlink_to(tmp_path / "there" / "web")
    (tmp_path / "here" / "file.jsonl").symlink_to(tmp_path / "there" / "a.jsonl")
    (tmp_path / "here" / "broken.jsonl").symlink_to(tmp_path / "there" / "no.jsonl")
    found = storage.list_files(f"{tmp_path}/here/**/*.jsonl")
    assert [(os.path.basename(path), size) for path, size in found] == [
        ("file.jsonl", len("a.jsonl")),
        ("a.jsonl", len("web/a.jsonl")),
        ("a.jsonl", len("web/deep/a.jsonl")),
        ("c.jsonl", len("web/deep/deeper/c.jsonl")),
    ]


def test_paths_and_urls_are_joined_as_they_are_written():
    assert storage.join("/data", "web/*") == "/data/web/*"
    assert storage.join("/data", "/other/*") == "/other/*"
    assert storage.join("gs://bucket/data", "web/*") == "gs://bucket/data/web/*"
    assert storage.join("gs://bucket/data/", "web/*") == "gs://bucket/data/web/*"
    assert storage.join("memory://", "web") == "memory://web"
    assert storage.join("/data", "gs://bucket/*") == "gs://bucket/*"
    assert storage.join("gs://bucket", "/data/*") == "/data/*"
    assert not storage.is_url("/data/a://b")


def write(kind, tmp_path, data):
    path = f"memory://{tmp_path.name}/a.jsonl" if kind == "memory" else f"{tmp_path}/a.jsonl"
    with fsspec.open(path, "wb") as file:
        file.write(data)
    return path


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_any_range_of_a_file_is_read(tmp_path, kind):
    data = random.Random(0).randbytes(1000)
    path = write(kind, tmp_path, data)
    assert storage.size_of(path) == 1000
    for start, length in [(0, 1000), (0, 7), (990, 10), (995, 10), (1000, 10), (2000, 1), (5, 0)]:
        assert storage.read(path, start, length) == data[start : start + length]
    assert Path(storage.local_copy(path)).read_bytes() == data


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_file_that_is_gone_names_itself(tmp_path, kind):
    path = write(kind, tmp_path, b"x")
    (fsspec.filesystem("memory").rm if kind == "memory" else os.remove)(path)
    for use in (storage.size_of, lambda path: storage.read(path, 0, 1)):
        with pytest.raises(
            UserError, match=r"a\.jsonl: the file is gone since it was listed; put it back\.$"
        ):
            use(path)
    assert storage.list_files(path) == []


def test_the_size_is_that_of_now(tmp_path):
    path = write("memory", tmp_path, b"x")
    assert storage.list_files(path) == [(path, 1)]
    write("memory", tmp_path, b"xyz")
    assert storage.size_of(path) == 3


def test_a_file_or_folder_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    grow(tmp_path, ["web/a.jsonl"])
    monkeypatch.setattr(storage, "open", refuse, raising=False)
    with pytest.raises(
        UserError,
        match=r"a\.jsonl: access is refused \(.*Permission denied\); .*right to read it\.$",
    ):
        storage.read(f"{tmp_path}/web/a.jsonl", 0, 1)
    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(UserError, match=r"web: access is refused"):
        storage.list_files(f"{tmp_path}/web/*.jsonl")


USES = {
    "read": lambda: storage.read("flaky://corpus/a.jsonl", 2, 3) == b"234",
    "size": lambda: storage.size_of("flaky://corpus/a.jsonl") == 10,
    "list": lambda: storage.list_files("flaky://corpus/*") == [("flaky://corpus/a.jsonl", 10)],
    "copy": lambda: Path(storage.local_copy("flaky://corpus/a.jsonl")).stat().st_size == 10,
}


@pytest.mark.parametrize("use", USES)
def test_a_store_that_fails_and_recovers_is_asked_again(flaky, waits, use):
    storage._copies.clear()
    flaky += [TimeoutError(), ConnectionResetError("reset by peer"), OSError("busy")]
    assert USES[use]()
    assert waits == [1, 2, 4]


@pytest.mark.parametrize("use", USES)
def test_a_store_that_never_recovers_is_given_up_with_its_reason(flaky, waits, use):
    storage._copies.clear()
    flaky += [ConnectionResetError("reset by peer")] * 6
    expected = (
        r"^flaky://corpus(/a\.jsonl)?: it cannot be read \(reset by peer\) in 6 tries, "
        r"31 s apart in all; see that its storage is there, and start again\.$"
    )
    with pytest.raises(UserError, match=expected):
        USES[use]()
    assert waits == [1, 2, 4, 8, 16]


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("not yours"),
        NoCredentialsError("not yours"),
        OSError("Forbidden: a.jsonl\nnot yours"),
    ],
)
@pytest.mark.parametrize("use", USES)
def test_a_store_that_refuses_is_not_asked_again(flaky, waits, use, error):
    storage._copies.clear()
    flaky.append(error)
    with pytest.raises(
        UserError, match=r"access is refused \((.* )?not yours\); give .*credentials"
    ):
        USES[use]()
    assert waits == []


def test_a_short_answer_is_asked_for_again(flaky, waits, monkeypatch):
    answers = [b"2"]
    whole = FlakyFileSystem.cat_file
    monkeypatch.setattr(
        FlakyFileSystem,
        "cat_file",
        lambda *args, **named: answers.pop() if answers else whole(*args, **named),
    )
    assert storage.read("flaky://corpus/a.jsonl", 2, 3) == b"234"
    assert waits == [1]


def test_mistakes_of_programs_are_not_hidden(flaky, waits):
    flaky.append(KeyError("a mistake"))
    with pytest.raises(KeyError):
        storage.read("flaky://corpus/a.jsonl", 2, 3)


def test_copies_are_made_once_and_the_oldest_go(flaky, monkeypatch):
    storage._copies.clear()
    for name in "bcd":
        with fsspec.open(f"flaky://corpus/{name}.jsonl", "wb") as file:
            file.write(name.encode() * 10)
    monkeypatch.setattr(storage, "MOST_COPIED_BYTES", 25)
    urls = [f"flaky://corpus/{name}.jsonl" for name in "bcd"]
    copies = [storage.local_copy(url) for url in urls[:2]]
    FlakyFileSystem.troubles.append(KeyError("made again"))
    assert storage.local_copy(urls[0]) == copies[0]
    FlakyFileSystem.troubles.clear()
    copies.append(storage.local_copy(urls[2]))
    assert [os.path.exists(copy) for copy in copies] == [True, False, True]
    assert Path(storage.local_copy(urls[1])).read_bytes() == b"c" * 10


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://bucket/a.jsonl", "s3fs", "s3"),
        ("gs://bucket/a.jsonl", "gcsfs", "gcs"),
        ("https://host/a.jsonl", "aiohttp", "http"),
        ("hf://datasets/a/b/a.jsonl", "huggingface_hub", "hub"),
    ],
)
def test_a_missing_back_end_names_the_extra(monkeypatch, url, module, extra):
    scheme = url.partition("://")[0]
    monkeypatch.delitem(_registry, scheme, raising=False)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    expected = rf"^{url}: reading {scheme}:// needs a package .*pip install -e '\.\[{extra}\]'\.$"
    for use in (storage.list_files, storage.size_of, lambda url: storage.read(url, 0, 1)):
        with pytest.raises(UserError, match=expected):
            use(url)


def test_an_unknown_scheme_is_named():
    with pytest.raises(UserError, match=r"nfs://a: nfs:// is no storage that fsspec knows"):
        storage.size_of("nfs://a")


def test_ranges_of_a_web_file_are_read(web, waits):
    url, here = web
    data = random.Random(0).randbytes(1000)
    (here.folder / "a.jsonl").write_bytes(data)
    path = f"{url}/a.jsonl"
    assert storage.list_files(path) == [(path, 1000)]
    assert storage.list_files(f"{url}/b.jsonl") == []
    for start, length in [(0, 1000), (0, 7), (990, 10), (995, 10), (1000, 10), (0, 2000)]:
        assert storage.read(path, start, length) == data[start : start + length]
    assert Path(storage.local_copy(path)).read_bytes() == data
    here.failures += [500, 503, 500]  # a HEAD that fails is tried as a GET first
    assert storage.size_of(path) == 1000
    here.failures += [503, 429]
    assert storage.read(path, 1, 2) == data[1:3]
    assert waits == [1, 1, 2]
    os.remove(here.folder / "a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl: the file is gone"):
        storage.read(path, 0, 1)


def test_a_packed_web_file_arrives_packed(web):
    url, here = web
    (here.folder / "a.jsonl.gz").write_bytes(b"as it is")
    assert storage.read(f"{url}/a.jsonl.gz", 3, 2) == b"it"
    assert Path(storage.local_copy(f"{url}/a.jsonl.gz")).read_bytes() == b"as it is"


def test_a_web_server_that_lists_its_folders_is_matched(web):
    url, here = web
    names = [name for name in TREE if not name.startswith("[")]
    grow(here.folder, names)
    for pattern in ("**/*.jsonl", "*.jsonl", "*", "with space/*"):
        assert [
            (urllib.parse.unquote(path.removeprefix(f"{url}/")), size)
            for path, size in storage.list_files(f"{url}/{pattern}")
        ] == [
            (path.removeprefix(f"{here.folder}/"), size)
            for path, size in storage.list_files(f"{here.folder}/{pattern}")
        ]


def test_a_web_server_that_lists_nothing_says_to_name_each_file(web):
    url, here = web
    here.listings = False
    expected = r"this server does not list its files \(403 Forbidden\), so name each file that http"
    with pytest.raises(UserError, match=expected):
        storage.list_files(f"{url}/*.jsonl")
    with pytest.raises(UserError, match=r"does not list its files \(not found\)"):
        storage.list_files(f"{url}/nowhere/*.jsonl")


def test_a_web_server_without_ranges_is_refused(web):
    url, here = web
    here.ranges = False
    (here.folder / "a.jsonl").write_bytes(b"0123456789")
    assert storage.read(f"{url}/a.jsonl", 0, 10) == b"0123456789"
    for start, length in [(0, 5), (5, 5), (5, 20)]:
        with pytest.raises(UserError, match=r"sends whole files only \(no range requests\)"):
            storage.read(f"{url}/a.jsonl", start, length)


def test_a_web_server_that_is_down_is_given_up_with_its_reason(web, waits):
    url, here = web
    here.failures += [503] * 12
    with pytest.raises(UserError, match=r"a\.jsonl: it cannot be read \(503 .* in 6 tries"):
        storage.read(f"{url}/a.jsonl", 0, 5)
    here.failures.clear()
    for use in (storage.size_of, storage.list_files, lambda path: storage.read(path, 0, 1)):
        with pytest.raises(UserError, match=r"it cannot be read \(.*onnect.* in 6 tries"):
            use("http://127.0.0.1:9/a.jsonl")
    here.failures += [403]
    with pytest.raises(UserError, match=r"a\.jsonl: access is refused \(403 Forbidden\)"):
        storage.read(f"{url}/a.jsonl", 0, 5)
