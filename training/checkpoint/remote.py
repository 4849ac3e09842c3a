"""Folders and files at a URL that fsspec knows, such as s3://bucket/prefix.

Nothing is renamed there: an object is whole or absent, and a reader goes by the marker. Credentials and endpoint are
those of the environment, as the library of the protocol reads them (s3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL, profiles, roles); none is ever in a URL, and so in no config, log or checkpoint.
"""

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

WAITS: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between tries
FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
PART_BYTES = 1 << 25  # of a file that is written or read at a time; S3 takes 10,000 parts, so files of 335 GB


@dataclass(frozen=True, order=True)
class Remote:
    """What a Path is on a disk. Raises OSError with the URL as its file."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "Remote":
        return Remote(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "Remote":
        return Remote(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether it is a file, or a folder with something in it."""
        is_file = self._try(lambda files: bool(files.isfile(self.url)))
        return is_file or any(not entry["name"].endswith("/") for entry in self._list())

    def is_dir(self) -> bool:
        return self._try(lambda files: bool(files.isdir(self.url)))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """An object store has no empty folders."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file in the folder, by name. Listings come in pages, which fsspec's libraries put together.
        Some stores leave an object of the folder's own name, with a slash."""
        files = [entry for entry in self._list() if entry["type"] == "file" and not entry["name"].endswith("/")]
        return {Remote(entry["name"]).name: entry["size"] for entry in files}

    def folders(self) -> list["Remote"]:
        return [self / Remote(entry["name"].rstrip("/")).name for entry in self._list() if entry["type"] == "directory"]

    def _list(self) -> list[dict[str, Any]]:
        try:
            return self._try(lambda files: files.ls(self.url, detail=True))
        except FileNotFoundError:
            return []

    def read_bytes(self) -> bytes:
        return self._try(lambda files: files.cat_file(self.url))

    def write_bytes(self, data: bytes) -> None:
        self._try(lambda files: files.pipe_file(self.url, data))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._try(lambda files: files.rm_file(self.url))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_folder(self) -> None:
        """Nothing happens where there is none."""
        with suppress(FileNotFoundError):
            self._try(lambda files: files.rm(self.url, recursive=True))

    def open(self, mode: str) -> Any:
        """A stream. Parts of a file are tried again by the protocol's library."""
        blocks = {"cache_type": "blockcache", "cache_options": {"maxblocks": 8}} if mode == "rb" else {}
        return self._try(lambda files: files.open(self.url, mode, block_size=PART_BYTES, **blocks))

    def _try(self, action: Callable[[Any], T]) -> T:
        """Again and again, longer apart, what may go better the next time. Raises OSError."""
        for wait in (*WAITS, None):
            try:
                return action(_filesystem(self.url.partition("://")[0]))
            except FINAL as error:
                raise type(error)(error.errno or errno.EIO, _first_line(error), self.url) from error
            except Exception as error:  # each library has exceptions of its own
                if wait is None or _needs_a_person(error):
                    raise OSError(errno.EIO, _first_line(error), self.url) from error
                time.sleep(wait)
        raise AssertionError


@cache
def _filesystem(protocol: str) -> Any:
    """Its own tries of a request, with their backoff, are botocore's."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False}  # other ranks and runs write there too
    if protocol == "s3":
        options["config_kwargs"] = {"retries": {"mode": "standard", "max_attempts": 4}, "connect_timeout": 20}
    return fsspec.filesystem(protocol, **options)


def _needs_a_person(error: Exception) -> bool:
    """botocore's NoCredentialsError, PartialCredentialsError, NoRegionError, ... are not cured by waiting."""
    return isinstance(error, ImportError) or type(error).__name__.startswith(("NoCredentials", "Partial", "NoRegion"))


def _first_line(error: Exception) -> str:
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(said).strip().splitlines()[0]


Folder = Path | Remote


def folder_at(place: str) -> Folder:
    """A path, or a URL as checkpoint.dir and checkpoint.load have it."""
    protocol, sign, rest = place.partition("://")
    if not sign or protocol == "file":
        return Path(rest or place)
    return Remote(place.rstrip("/"))


def missing_package(place: str) -> str:
    """Why a URL cannot be opened here, from the names of packages alone; "" where it can."""
    from importlib.util import find_spec

    from fsspec.registry import known_implementations

    protocol, sign, _ = place.partition("://")
    if not sign or protocol == "file":
        return ""
    if protocol not in known_implementations:
        return f"fsspec knows no {protocol}://"
    package = known_implementations[protocol]["class"].partition(".")[0]
    return "" if find_spec(package) is not None else f"the package {package} is not installed"
