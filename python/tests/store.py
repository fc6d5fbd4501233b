"""An object store on the loopback interface with the functions that readers need: S3 objects, ranges and listings."""

import contextlib
import datetime
import email.utils
import http.server
import threading
import urllib.parse
from pathlib import Path
from xml.sax.saxutils import escape

BUCKET = "bucket"


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the files of a directory, over persistent connections."""

    protocol_version = "HTTP/1.1"
    folder: Path

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        key = urllib.parse.unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        if query.get("list-type") == "2":
            self.answer(200, self.listing(query.get("prefix", ""), query.get("start-after", "")))
        elif (self.folder / key).is_file():
            self.object(self.folder / key)
        else:
            self.answer(404, b"")

    do_HEAD = do_GET

    def object(self, file):
        headers = {"ETag": tag(file), "Last-Modified": email.utils.formatdate(file.stat().st_mtime, usegmt=True)}
        content = file.read_bytes()
        if "Range" not in self.headers:
            self.answer(200, content, headers)
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1) + 1
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self.answer(206, content[start:end], headers)

    def listing(self, prefix, after):
        found = []
        for file in sorted(self.folder.rglob("*")):
            key = file.relative_to(self.folder).as_posix()
            if file.is_file() and key.startswith(prefix) and key > after:
                status = file.stat()
                modified = datetime.datetime.fromtimestamp(int(status.st_mtime), datetime.timezone.utc)
                found.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{modified:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
                    f"<ETag>{escape(tag(file))}</ETag><Size>{status.st_size}</Size></Contents>"
                )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>".encode()

    def answer(self, status, content, headers=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def tag(file):
    return f'"{file.stat().st_mtime_ns}"'


def settings(port):
    """Returns the environment variables with which a program accesses a store at this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextlib.contextmanager
def store(handler):
    """Yields the environment variables for a store whose requests `handler` answers in threads of this process."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # Neither open connections nor threads keep the process running.
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield settings(server.server_port)
        finally:
            server.shutdown()
            thread.join()


def store_of(folder):
    """Runs a store whose bucket contains the files of a directory, as `store` does."""
    return store(type("FolderHandler", (Handler,), {"folder": Path(folder)}))
