#!/usr/bin/env python3
"""Tests the status page with Chromium while a reader reads through a service; all commands must be built.

    browser.py [OUT]    OUT: a folder for the screenshots and the small dataset (target/browser by default)

The test fails if the page does not show the job, the workers, their rates and the limiting factor, does not refresh
itself, loads anything from other servers, or has an error in the browser's console. Chromium is the first of
$CHROMIUM, `chromium` and `google-chrome` that is installed.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[3]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
SAMPLES = 240_000
SECONDS = 60
TABLES = "[...document.querySelectorAll('table')].map(t => [...t.rows].map(r => [...r.cells].map(c => c.innerText)))"
BARS = "[...document.querySelectorAll('svg rect')].map(bar => bar.getBoundingClientRect().width)"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def fail(message, hint):
    sys.exit(f"error: {message}\n  hint: {hint}")


def find_chromium():
    names = [os.environ.get("CHROMIUM"), "chromium", "google-chrome"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found:
        return found
    fail("there is no Chromium", "install it (Debian: package chromium), or set CHROMIUM")


def free_port():
    """Returns a port on which no process listens. It is below the ports that the system assigns to `connect` and to
    `bind` with port 0, so no other process gets it before it is used."""
    for tried in range(20_000):
        port = 12_000 + (os.getpid() * 199 + tried) % 20_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    fail("no port is free", "end what listens at the ports from 12000 on")


def run(program, *arguments):
    command = [TARGET / "release" / program, *map(str, arguments), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)


class Browser:
    """A page in Chromium, controlled over the DevTools pipe. Messages are JSON objects that end with a zero byte."""

    def __init__(self, chromium, profile):
        (child_in, self.into), (self.out, child_out) = os.pipe(), os.pipe()
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            "--window-size=1200,1400",
            f"--user-data-dir={profile}",
        ]
        # Chromium reads from descriptor 3 and writes to descriptor 4.
        shell = f'exec "$@" 3<&{child_in} 4>&{child_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", chromium, *options], pass_fds=(child_in, child_out), stderr=subprocess.DEVNULL
        )
        os.close(child_in)
        os.close(child_out)
        self.received, self.count, self.session, self.events = b"", 0, None, []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network"]:
            self.ask(f"{domain}.enable")

    def message(self):
        while b"\0" not in self.received:
            ready, _, _ = select.select([self.out], [], [], SECONDS)
            if not ready or not (more := os.read(self.out, 1 << 16)):
                fail("Chromium does not answer", "see what `chromium --headless --dump-dom about:blank` says")
            self.received += more
        text, self.received = self.received.split(b"\0", 1)
        return json.loads(text)

    def ask(self, method, **parameters):
        self.count += 1
        question = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            question["sessionId"] = self.session
        os.write(self.into, json.dumps(question).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == self.count:
                return message.get("result", {})
            self.events.append(message)

    def value(self, expression):
        """Returns the value of an expression in the page, or `None` while the page loads."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True).get("result", {}).get("value")

    def screenshot(self, file):
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def of(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    def close(self):
        self.process.kill()
        self.process.wait()


class Reader:
    """Reads one job after the other. Each job has another seed, so no worker has cached its batches."""

    def __init__(self, url):
        bench = f'"{TARGET}/release/onefold-read" bench "{url}" --batch-size 32 --quiet'
        line = f"for seed in {{1..1000}}; do {bench} --shuffle $seed || exit 1; done"
        self.process = subprocess.Popen(["bash", "-c", line], stdout=subprocess.DEVNULL, start_new_session=True)

    def close(self):
        os.killpg(self.process.pid, 9)
        self.process.wait()


def number(text):
    """Returns the number at the beginning of a cell, such as `12,345` or `1.5 MiB/s`."""
    return float(text.split()[0].replace(",", ""))


def missing(browser, status):
    """Returns the names of the parts that the page should show while a client reads, but does not show."""
    text, tables = browser.value("document.body ? document.body.innerText : ''") or "", browser.value(TABLES) or []
    rows = [row for table in tables for row in table[1:]]
    clients = [row for row in rows if row[0].endswith("/data") and len(row) == 6]
    workers = [row for row in rows if row[0].split()[0] in [worker["address"] for worker in status["workers"]]]
    # The job stays the same, but its clients change.
    jobs = {client["job"][:8] for client in status["clients"]}
    found = {
        "the heading": "Preprocessing service" in text,
        "what limits": "up " in text and "Nobody reads." not in text,
        "the job": any(row[1] in jobs for row in clients),
        "samples/s of a client": any(number(row[2]) > 0 for row in clients),
        "bytes of a client": any(number(row[3]) > 0 for row in clients),
        "samples of a client": any(number(row[5]) > 0 for row in clients),
        "both workers": len(workers) == 2,
        "samples/s of a worker": any(number(row[3]) > 0 for row in workers),
        "busy threads of a worker": any(number(row[1]) > 0 for row in workers),
        "bars of stages": any(width > 20 for width in browser.value(BARS) or []),
        "the dataset's name": any(row[0] == "clicks" and row[1].endswith("/data") for row in rows),
        "a refresh of its own": len(browser.of("Page.loadEventFired")) > 2,
    }
    return [what for what, there in found.items() if not there]


def wait(what, holds):
    """Waits until `holds` returns no missing parts."""
    until = time.monotonic() + SECONDS
    while (left := holds()) and time.monotonic() < until:
        time.sleep(0.1)
    if left:
        fail(f"{what}: {', '.join(left)}", "open the page while a reader reads (`onefold-serve local`)")


def check_events(browser, url):
    """Checks that the page loads nothing from other servers, and that no error occurs in it."""
    requests = {event["request"]["url"] for event in browser.of("Network.requestWillBeSent")}
    elsewhere = sorted(request for request in requests if not request.startswith((url, "data:")))
    if elsewhere:
        fail(f"the page loads {', '.join(elsewhere)}", "a status page needs nothing from elsewhere")
    details = [event["exceptionDetails"] for event in browser.of("Runtime.exceptionThrown")]
    thrown = [detail.get("exception", {}).get("description", detail["text"]) for detail in details]
    logged = [event["entry"]["text"] for event in browser.of("Log.entryAdded")]
    console = [str(event["args"]) for event in browser.of("Runtime.consoleAPICalled")]
    if thrown + logged + console:
        fail(f"the browser's console says: {'; '.join(thrown + logged + console)}", "open the page with its console")
    return len(requests), len(browser.of("Page.loadEventFired"))


def look(browser, address, dataset, out):
    def status():
        with urlopen(f"http://{address}/status.json", timeout=10) as answer:
            return json.load(answer)

    url = f"http://{address}/"
    wait("the service has too few workers", lambda: ["two workers"] * (len(status()["workers"]) != 2))
    browser.ask("Page.navigate", url=url)
    text = "document.body ? document.body.innerText : ''"
    wait("the page does not say", lambda: ["Nobody reads."] * ("Nobody reads." not in (browser.value(text) or "")))
    reader = Reader(f"grpc://{address}/clicks")
    try:
        wait("the page does not show", lambda: missing(browser, status()))
        for scheme in ["light", "dark"]:
            browser.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.screenshot(out / f"status-{scheme}.png")
        if (overflow := browser.value(OVERFLOW)) != 0:
            fail(f"the page is {overflow} pixels wider than its window", f"see {out / 'status-light.png'}")
    finally:
        reader.close()
    requests, loads = check_events(browser, url)
    print(f"the page was loaded {loads} times and asked for {requests} addresses; screenshots: {out}/status-*.png")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET / "browser"
    chromium, data = find_chromium(), out / "data"
    out.mkdir(parents=True, exist_ok=True)
    if not (data / "snapshots").exists():
        for folder in [data, out / "logs"]:
            shutil.rmtree(folder, ignore_errors=True)
        run("onefold-data", "generate", "--workload", "rm1", "--samples", SAMPLES, "--seed", 1, "--out", out / "logs")
        run("onefold-ingest", "build", out / "logs" / "dataset.toml", "--layout", "folded", "--out", data)
    address = f"127.0.0.1:{free_port()}"
    serve = [TARGET / "release" / "onefold-serve", "local", "--workers", "2", "--listen", address]
    serve += ["--memory-limit", "512MiB", "--threads", "2", "--dataset", f"clicks={data.resolve()}", "--quiet"]
    service = subprocess.Popen(serve, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + SECONDS
        while socket.socket().connect_ex(("127.0.0.1", int(address.rsplit(":", 1)[1]))) and time.monotonic() < until:
            time.sleep(0.05)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = Browser(chromium, profile)
            try:
                look(browser, address, data, out)
            finally:
                browser.close()
    finally:
        service.terminate()
        service.wait(timeout=90)


if __name__ == "__main__":
    main()
