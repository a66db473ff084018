"""Does a download bring all files or nothing, and say in one line why it failed?"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dfl.datasets import DATASETS, mnist
from dfl.datasets.files import Source
from tests.idx_files import IMAGES, PACKED, TEST_IMAGES, TEST_LABELS, refused, same, write


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and of a file *.cut promises more than it sends."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        whole = Path(self.translate_path(self.path))
        if not Path(f"{whole}.cut").exists():
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", str(whole.stat().st_size))
        self.end_headers()
        self.wfile.write(whole.read_bytes()[:100])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is served on the loopback in place of MNIST's."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = write(tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        md5 = {f"{name}.gz": hashlib.md5(content).hexdigest() for name, content in PACKED.items()}
        source = Source(f"http://127.0.0.1:{http.server_port}/", md5)
        monkeypatch.setitem(mnist.SOURCES, "mnist", source)
        yield folder
        http.shutdown()
        thread.join()


def test_download(tmp_path: Path, server: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "new" / "home"
    data = DATASETS["mnist"](home)
    assert same(data, DATASETS["mnist"](server))
    assert os.listdir(home) == ["mnist"]
    assert sorted(os.listdir(home / "mnist")) == sorted(mnist.SOURCES["mnist"].md5)
    assert {path.stat().st_mode & 0o777 for path in (home / "mnist").iterdir()} == {0o644}
    assert capfd.readouterr() == ("", "")
    (server / f"{IMAGES}.gz").unlink()
    assert same(data, DATASETS["mnist"](home))  # the second time nothing is downloaded


def test_download_to_the_cache(tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pooch

    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    assert same(DATASETS["mnist"](None), DATASETS["mnist"](server))
    assert os.listdir(tmp_path / "cache" / "dfl") == ["mnist"]


def test_progress_on_a_terminal(tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Terminal:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    DATASETS["mnist"](tmp_path / "home")
    assert f"{IMAGES}.gz" in "".join(written)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("wrong checksum", "does not match the known hash"),
        ("404", "404"),
        ("truncated", "IncompleteRead"),
        ("unreachable", "Connection refused"),
        ("not writable", "not-a-folder"),
        ("interrupted", ""),
    ],
)
def test_failed_download_leaves_nothing(
    tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch, failure: str, words: str
) -> None:
    home, last = tmp_path / "home", server / f"{TEST_LABELS}.gz"
    if failure == "wrong checksum":
        last.write_bytes(last.read_bytes() + b"\0")
    if failure == "404":
        last.unlink()
    if failure == "truncated":
        (server / f"{TEST_IMAGES}.gz.cut").write_bytes(b"")
    if failure == "unreachable":
        monkeypatch.setitem(mnist.SOURCES, "mnist", Source("http://127.0.0.1:1/", mnist.SOURCES["mnist"].md5))
    if failure == "not writable":
        home = tmp_path / "not-a-folder"
        home.write_text("")
    if failure == "interrupted":
        interrupted(home, monkeypatch)
    else:
        message = refused(lambda: DATASETS["mnist"](home))
        assert words in message
        assert message.startswith("cannot download ")
        assert f"or put {IMAGES}.gz, " in message
        assert message.endswith(f"into {home / 'mnist'}")
    assert not home.is_dir() or os.listdir(home) == []


def interrupted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C when the first bytes have been written."""
    from rich.progress import Progress

    def stop(*_: object) -> None:
        assert list(home.rglob("tmp*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", stop)
    with pytest.raises(KeyboardInterrupt):
        DATASETS["mnist"](home)


def test_two_downloads_at_once(tmp_path: Path, server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, rename = tmp_path / "home", Path.rename

    def slower(whole: Path, folder: Path) -> Path:
        write(folder)  # another run has come first
        return rename(whole, folder)

    monkeypatch.setattr(Path, "rename", slower)
    assert same(DATASETS["mnist"](home), DATASETS["mnist"](server))
    assert os.listdir(home) == ["mnist"]
