"""Files, wherever they are: folders of this machine, or whatever fsspec reads by URL.

What a remote store answers is asked for again when the failure may pass; everything else is told
in one sentence.
"""

from __future__ import annotations

import atexit
import errno
import fnmatch
import functools
import glob
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from openelm_jax.errors import UserError

Answer = TypeVar("Answer")

# Seconds between one try of a remote store and the next.
WAITS: tuple[float, ...] = (1, 2, 4, 8, 16)
# Local copies of remote files are thrown away, the longest unused first, to stay below this.
MOST_COPIED_BYTES = 32 << 30

_EXTRAS = {
    **{"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"},
    **{"http": "http", "https": "http", "hf": "hub"},
}
# Left to itself aiohttp unpacks what a server declares to be packed, as some do with every .gz.
_WEB = {"client_kwargs": {"auto_decompress": False, "headers": {"Accept-Encoding": "identity"}}}
_OPTIONS: dict[str, dict[str, Any]] = {"http": _WEB, "https": _WEB}
# Packages of fsspec's back ends whose exceptions may pass and are no OSError.
_REMOTE_PACKAGES = ("aiohttp", "azure", "botocore", "gcsfs", "google", "httpx", "requests")
_ESCAPED = re.compile(r"\[([*?[])\]")  # as glob.escape writes it
_copies: dict[str, str] = {}
_copies_lock = threading.Lock()


def is_url(path: str) -> bool:
    """Return whether `path` is a URL, not a path of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def join(root: str, below: str) -> str:
    """Return what `below` names, seen from `root`; an absolute path or a URL names itself."""
    if is_url(below) or not is_url(root):
        return below if is_url(below) else os.path.join(root, below)
    if os.path.isabs(below):
        return below
    return f"{root}{below}" if root.endswith("/") else f"{root}/{below}"


def list_files(pattern: str) -> list[tuple[str, int]]:
    """Return the files that match an absolute path or URL with `*`, `**`, `?`: (name, bytes).

    They are sorted by name, and none is read. `**` crosses folders; names that begin with a dot
    match only where the pattern has the dot. A file that is not there is an empty list. Raises
    UserError for a folder that cannot be listed.
    """
    scheme, parts = _split(pattern)
    plain = itertools.takewhile(lambda part: not _has_wildcard(part), parts)
    fixed = [_ESCAPED.sub(r"\1", part) for part in plain]
    folder = scheme + "/".join(fixed) or "/"
    if len(fixed) == len(parts):
        size = _size_of_file(folder)
        return [] if size is None else [(folder, size)]
    children = functools.cache(_children)
    if scheme in ("http://", "https://"):
        _require_listing(folder, pattern)
    found = dict(_match(children, folder, parts[len(fixed) :]))
    return [(name, size_of(name) if size is None else size) for name, size in sorted(found.items())]


def size_of(path: str) -> int:
    """Return the bytes that a file has now; raises UserError when it is gone."""
    size = _size_of_file(path)
    if size is None:
        raise _gone(path)
    return size


def read(path: str, start: int, length: int) -> bytes:
    """Return `length` bytes from `start` on, fewer only where the file ends; nothing stays open.

    Raises UserError for a file that is gone or cannot be read.
    """
    if not is_url(path):
        return _ask(path, lambda: _read_local(path, start, length))
    return _ask(path, lambda: _read_remote(path, start, length))


def local_copy(path: str) -> str:
    """Return the path of a file with the same contents on this machine.

    A copy of a remote file lasts at most until the process ends, and may be thrown away when
    others are made: ask again before opening it again. Raises UserError as `read` does.
    """
    if not is_url(path):
        return path
    with _copies_lock:
        if path in _copies:
            _copies[path] = _copies.pop(path)  # now the last to be thrown away
            return _copies[path]
        copy = os.path.join(_copies_folder(), _name_of_copy(path))
        _ask(path, lambda: _copy(path, copy))
        _copies[path] = copy
        total = sum(os.path.getsize(kept) for kept in _copies.values())
        while total > MOST_COPIED_BYTES and len(_copies) > 1:
            oldest = _copies.pop(next(iter(_copies)))
            total -= os.path.getsize(oldest)
            os.remove(oldest)
        return copy


@dataclass(frozen=True)
class _Child:
    """What a folder holds: a file, of this size unless the store does not say, or a folder."""

    name: str
    is_folder: bool
    size: int | None


def _match(
    children: Callable[[str], list[_Child]], folder: str, parts: list[str]
) -> Iterator[tuple[str, int | None]]:
    head, rest = parts[0], parts[1:]
    if head == "**":
        yield from _match(children, folder, rest or ["*"])
        head, rest = "*", parts
    for child in children(folder):
        hidden = child.name.startswith(".") and not head.startswith(".")
        if hidden or not fnmatch.fnmatchcase(child.name, head):
            continue
        path = join(folder, child.name)
        if rest and child.is_folder:
            yield from _match(children, path, rest)
        elif not rest and not child.is_folder:
            yield path, child.size


def _split(pattern: str) -> tuple[str, list[str]]:
    """Return the scheme ("" for a local path) and the parts between the slashes behind it."""
    if is_url(pattern):
        scheme, rest = pattern.split("://", 1)
        return f"{scheme}://", rest.split("/")
    assert os.path.isabs(pattern), pattern
    return "", pattern.split("/")


def _has_wildcard(part: str) -> bool:
    return glob.has_magic(_ESCAPED.sub("", part))


def _children(folder: str) -> list[_Child]:
    """Return what a folder holds; nothing where there is no such folder."""
    try:
        return _attempt(folder, lambda: _list(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise _refused(folder, error) from error


def _list(folder: str) -> list[_Child]:
    if not is_url(folder):
        with os.scandir(folder) as entries:
            return [
                _Child(entry.name, entry.is_dir(), entry.stat().st_size)
                for entry in entries
                if entry.is_dir() or entry.is_file()  # no link that leads nowhere
            ]
    filesystem, inside = _open(folder)
    filesystem.invalidate_cache()
    children = []
    for info in filesystem.ls(inside, detail=True):
        parent, _, name = info["name"].rstrip("/").rpartition("/")
        # Stores list a folder's own marker too, and web pages link to what is not below them.
        if parent == inside.rstrip("/") and not name.startswith("?"):
            children.append(_Child(name, info["type"] == "directory", info["size"]))
    return children


def _require_listing(folder: str, pattern: str) -> None:
    try:
        _attempt(folder, lambda: _list(folder))
    except (FileNotFoundError, PermissionError) as error:
        reason = "not found" if isinstance(error, FileNotFoundError) else _reason(error)
        raise UserError(
            f"{folder}: this server does not list its files ({reason}), so name each file that "
            f"{pattern} stands for."
        ) from error


def _size_of_file(path: str) -> int | None:
    """Return the bytes that a file has now, or None when there is no such file."""
    try:
        return _attempt(path, lambda: _size(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise _refused(path, error) from error


def _size(path: str) -> int | None:
    if not is_url(path):
        return os.path.getsize(path) if os.path.isfile(path) else None
    filesystem, inside = _open(path)
    filesystem.invalidate_cache()
    info = filesystem.info(inside)
    if info["type"] != "file":
        return None
    if info["size"] is None:
        raise UserError(
            f"{path}: its server does not say how many bytes it has; download it, and give the "
            "local folder."
        )
    return info["size"]


def _read_local(path: str, start: int, length: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(length)


def _read_remote(path: str, start: int, length: int) -> bytes:
    filesystem, inside = _open(path)
    try:
        data = filesystem.cat_file(inside, start=start, end=start + length)
    except Exception as error:
        # Some stores refuse a range that begins at the end, others answer it with nothing.
        if _is_of_the_range(error) and start >= filesystem.size(inside):
            return b""
        raise
    if len(data) == length:
        return data
    size = filesystem.size(inside)
    if len(data) > length or len(data) == size > size - start:
        raise UserError(
            f"{path}: its server sends whole files only (no range requests); download it, and "
            "give the local folder."
        )
    if len(data) != max(0, size - start):
        raise OSError(f"{len(data)} bytes came, not {max(0, size - start)}")
    return data


def _copy(path: str, copy: str) -> None:
    filesystem, inside = _open(path)
    filesystem.get_file(inside, f"{copy}.part")
    os.replace(f"{copy}.part", copy)


@functools.cache
def _copies_folder() -> str:
    folder = tempfile.mkdtemp(prefix="openelm_jax-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _name_of_copy(path: str) -> str:
    return f"{hashlib.sha256(path.encode()).hexdigest()[:16]}-{path.rpartition('/')[2]}"


def _open(url: str) -> tuple[Any, str]:
    """Return the filesystem of a URL, and what the URL is called in it."""
    import fsspec.core

    scheme = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        cure = f"run pip install -e '.[{extra}]'" if extra else f"install it ({error})"
        raise UserError(
            f"{url}: reading {scheme}:// needs a package that is not installed; {cure}."
        ) from error
    except ValueError as error:
        raise UserError(
            f"{url}: {scheme}:// is no storage that fsspec knows ({error}); correct the URL."
        ) from error


def _ask(path: str, operation: Callable[[], Answer]) -> Answer:
    """Return what `operation` does on a file that has been listed."""
    try:
        return _attempt(path, operation)
    except FileNotFoundError as error:
        raise _gone(path) from error
    except PermissionError as error:
        raise _refused(path, error) from error


def _attempt(path: str, operation: Callable[[], Answer]) -> Answer:
    """Return what `operation` does, tried again where a remote failure may pass.

    Raises FileNotFoundError and PermissionError, whatever the store calls them, and UserError.
    """
    waits = WAITS if is_url(path) else ()
    for tried, wait in enumerate((*waits, None), start=1):
        try:
            return operation()
        except UserError:
            raise
        except Exception as error:
            verdict = _verdict(error)
            if verdict == "gone":
                raise FileNotFoundError(_reason(error)) from error
            if verdict == "refused":
                raise PermissionError(_reason(error)) from error
            if verdict == "ours":
                raise
            if wait is None:
                times = f" in {tried} tries, {sum(waits):g} s apart in all" if waits else ""
                raise UserError(
                    f"{path}: it cannot be read ({_reason(error)}){times}; see that its storage "
                    "is there, and start again."
                ) from error
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def _verdict(error: BaseException) -> Literal["gone", "refused", "may pass", "ours"]:
    """Return what to make of an error; ours are mistakes of programs."""
    error = _cause(error)
    status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
        return "gone"
    no_credentials = re.search("Credentials|RefreshError", type(error).__name__) is not None
    forbidden = str(error).startswith("Forbidden")  # gcsfs has only this word for it
    if isinstance(error, PermissionError) or no_credentials or forbidden or status in (401, 403):
        return "refused"
    package = type(error).__module__.partition(".")[0]
    return "may pass" if isinstance(error, OSError) or package in _REMOTE_PACKAGES else "ours"


def _is_of_the_range(error: Exception) -> bool:
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    return status == 416 or getattr(error, "errno", None) == errno.EINVAL


def _cause(error: BaseException) -> BaseException:
    """Return the error itself, where fsspec says "not found" of whatever happened on the web."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.startswith("aiohttp"):
        assert cause is not None
        return cause
    return error


def _reason(error: BaseException) -> str:
    error = _cause(error)
    status = getattr(error, "status", None)
    said = getattr(error, "message", None) if status else str(error)
    words = " ".join(str(part) for part in (status, said) if part).split()
    return " ".join(words).rstrip(".") or type(error).__name__


def _gone(path: str) -> UserError:
    return UserError(f"{path}: the file is gone since it was listed; put it back.")


def _refused(path: str, error: BaseException) -> UserError:
    return UserError(
        f"{path}: access is refused ({_reason(error)}); give the account or the credentials of "
        "this process the right to read it."
    )
