"""A server that speaks S3, moto's, behind one that fails as a test says."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

moto = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")

Fault = Callable[[str, str], "str | float | None"]
"""Returns what happens to a request of a method and a path: "503 SlowDown", which is answered;
"cut", the connection ends in the middle; seconds before it is answered; None, nothing."""


class FaultyServer(ThreadingHTTPServer):
    """Passes requests on to another server, or fails."""

    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.fault: Fault = lambda *_: None

    def handle_error(self, *_: object) -> None:
        """Say nothing about clients that have gone."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path)
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "cut" and self.command != "GET":
            self.close_connection = True
            return
        if isinstance(fault, str) and fault != "cut":
            status, _, code = fault.partition(" ")
            text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
            self.reply(int(status), {"Content-Type": "application/xml"}, text.encode())
            return
        connection = http.client.HTTPConnection(*self.server.target)
        connection.request(self.command, self.path, body, dict(self.headers))
        got = connection.getresponse()
        data = got.read()
        connection.close()
        headers = {k: v for k, v in got.getheaders() if k.lower() not in _OWN}
        if self.command == "HEAD":
            headers["Content-Length"] = got.getheader("Content-Length") or "0"
        self.reply(got.status, headers, data, cut=fault == "cut")

    def reply(
        self, status: int, headers: dict[str, str], data: bytes, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:  # that of a HEAD is of what is not sent
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection |= cut

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815  # http.server's names


_OWN = {"content-length", "connection", "transfer-encoding", "date", "server"}


@contextmanager
def bucket(patch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """Yield the server of "s3://bucket", which is empty; clients repeat nothing by themselves."""
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    reset = http.client.HTTPConnection(host, port)  # servers of a process share their buckets
    reset.request("POST", "/moto-api/reset")
    reset.getresponse().read()
    front = FaultyServer((host, port))
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    try:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{front.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield front
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        front.shutdown()
        front.server_close()
        thread.join()
        server.stop()
