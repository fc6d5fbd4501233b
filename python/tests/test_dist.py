"""Tests the packages of `make dist`: paths of this machine, the tarball, systemd units and Kubernetes manifests.

The commands of units and manifests run as processes of this machine, on free ports.
"""

import configparser
import contextlib
import http.client
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from ports import free_port

import onefold

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "dist"))

import dist  # noqa: E402
import paths  # noqa: E402

BINARIES = Path(os.environ["ONEFOLD_BINARIES"])
UNITS = sorted((PROJECT / "dist" / "systemd").iterdir())
MANIFESTS = sorted((PROJECT / "dist" / "kubernetes").iterdir())
PATIENCE = 120.0


# Paths of this machine


def test_compilers_put_other_names_in_place_of_paths(tmp_path, monkeypatch):
    for name in ("CARGO_HOME", "LIBTORCH"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    source = tmp_path / "CARGO_HOME" / "source.rs"
    source.write_text('fn main() { println!("{}", file!()) }\n')
    header = tmp_path / "LIBTORCH" / "header.c"
    header.write_text("const char *file(void) { return __FILE__; }\n")
    settings = paths.compiler_settings()
    flags = settings["CARGO_ENCODED_RUSTFLAGS"].split("\x1f")
    config = tomllib.loads((PROJECT / ".cargo" / "config.toml").read_text())
    (target,) = config["target"].values()
    own = os.environ["RUSTFLAGS"].split() if "RUSTFLAGS" in os.environ else target["rustflags"]
    assert flags[: len(own)] == own and config["env"]["CFLAGS"] in settings["CFLAGS"]
    rust, c = tmp_path / "rust", tmp_path / "c.o"
    subprocess.run(["rustc", *flags, "-C", "strip=symbols", "-o", rust, source], check=True)
    for setting in ("CFLAGS", "CXXFLAGS"):
        subprocess.run([os.environ.get("CC", "cc"), *settings[setting].split(), "-c", "-o", c, header], check=True)
        assert b"/libtorch/header.c\0" in c.read_bytes()
        assert list(paths.found(c, paths.unwanted())) == []
    assert b"/cargo/source.rs" in rust.read_bytes()
    assert list(paths.found(rust, paths.unwanted())) == []


def test_paths_are_found_in_packages(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    program, wheel, packed = tmp_path / "program", tmp_path / "a.whl", tmp_path / "a.tar.gz"
    program.write_bytes(b"\0" + os.fsencode(home / "work" / "lib.rs") + b"\0")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(program, "inside")
        archive.writestr("other", "nothing")
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(program, "inside")
    for package, name in ((program, "program"), (wheel, "inside"), (packed, "inside")):
        (line,) = paths.found(package, paths.unwanted())
        assert line == f"{package.name}: {name} contains {home / 'work'}: '{home / 'work' / 'lib.rs'}'"
    with pytest.raises(SystemExit, match="packages contain paths of this machine"):
        paths.check([program])
    program.write_text(f"no path below it: {home}")
    paths.check([program])


# The tarball


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Returns the folder of an unpacked tarball with some of the programs."""
    folder = tmp_path_factory.mktemp("tarball")
    names = ["onefold", "onefold-read", "onefold-train"]
    path = dist.tarball(BINARIES, names, folder, level=1)
    version = tomllib.loads((PROJECT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert re.fullmatch(rf"onefold-{re.escape(version)}-x86_64-linux-gnu2\.\d+\.tar\.gz", path.name)
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder / path.name.removesuffix(".tar.gz")


def started(program, *arguments):
    environment = {**os.environ, "LD_LIBRARY_PATH": ""}
    return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True)


def test_programs_of_the_tarball_find_libtorch_beside_them(unpacked, run):
    version = run("onefold-train", "--version")
    assert started(unpacked / "bin" / "onefold", "read", "--version").stdout == run("onefold-read", "--version")
    without = started(unpacked / "bin" / "onefold-train", "--version")
    assert without.returncode != 0 and "libtorch_cpu.so" in without.stderr
    (unpacked / "lib").symlink_to(Path(os.environ["LIBTORCH"]) / "lib")
    try:
        found = started(unpacked / "bin" / "onefold", "train", "--version")
    finally:
        (unpacked / "lib").unlink()
    assert (found.stdout, found.stderr) == (version, "")
    program = (unpacked / "bin" / "onefold-train").read_bytes()
    assert b"\0$ORIGIN/../lib\0" in program
    assert b"\0" + os.fsencode(os.environ["LIBTORCH"]) + b"/lib\0" not in program


def test_the_tarball_has_pages_completions_and_examples(unpacked):
    for name in ("share/man/man1/onefold.1", "share/man/man1/onefold-read-head.1"):
        assert (unpacked / name).stat().st_size > 0, name
    links = re.findall(r"\]\((docs/[^)#]+)", (unpacked / "README.md").read_text())
    assert links and [link for link in links if not (unpacked / link).is_file()] == []
    bash = unpacked / "share/bash-completion/completions"
    assert sorted(path.name for path in bash.iterdir()) == ["onefold", "onefold-read", "onefold-train"]
    assert "_onefold__read()" in (bash / "onefold-train").read_text()
    subprocess.run(["bash", "-n", bash / "onefold"], check=True)
    assert (unpacked / "share/zsh/site-functions/_onefold").read_text().startswith("#compdef onefold onefold-")
    assert (unpacked / "share/fish/vendor_completions.d/onefold-read.fish").is_file()
    for folder, files in (("systemd", UNITS), ("kubernetes", MANIFESTS)):
        assert {path.name for path in files} == {path.name for path in (unpacked / "share/onefold" / folder).iterdir()}
    assert os.access(unpacked / "share/onefold/libtorch.sh", os.X_OK)


def test_packages_have_licences_and_a_readme(unpacked, train_wheel):
    def check(licences, readme):
        assert (licences / "LICENSE").read_bytes() == (PROJECT / "LICENSE").read_bytes()
        others = (licences / "THIRD-PARTY.txt").read_text()
        assert re.search(r"^serde [0-9.]+: MIT OR Apache-2.0$", others, re.MULTILINE)
        assert "Permission is hereby granted, free of charge" in others and "onefold" not in others
        assert re.search(r"^# onefold", readme.read_text(), re.MULTILINE | re.IGNORECASE)

    check(unpacked, unpacked / "README.md")
    installed = [Path(onefold.__file__).parents[1].glob("onefold-*.dist-info"), train_wheel.glob("onefold_train-*.dist-info")]
    for (info,) in installed:
        check(info / "licenses", info / "METADATA")


def test_equal_programs_give_equal_tarballs(tmp_path):
    first, second = (dist.tarball(BINARIES, ["onefold"], tmp_path / name, level=1) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_the_container_has_the_versions_of_the_project():
    text = (PROJECT / "dist" / "Containerfile").read_text()
    rust = tomllib.loads((PROJECT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    ((version, compiled),) = re.findall(r"^FROM \S+/rust:(\S+)-(\S+) AS build$", text, re.MULTILINE)
    (runs,) = re.findall(r"^FROM \S+/debian:(\S+)-slim$", text, re.MULTILINE)
    # The feature `delta` of packages needs a newer compiler than the project.
    assert [int(part) for part in version.split(".")] >= [int(part) for part in rust.split(".")]
    # Programs need at least the glibc of the system that compiled them.
    assert compiled == runs


def test_packages_need_a_newer_compiler_than_the_project(tmp_path):
    for name, text in (("cargo", "exit 0"), ("rustc", "echo rustc 1.94.0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    # Without a C++ compiler nothing is compiled. With LIBTORCH nothing is downloaded.
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CARGO": "cargo", "CXX": "no-compiler", "LIBTORCH": "/libtorch"}

    def reported(*options):
        command = [PROJECT / "tests" / "requirements.sh", *options]
        return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True).stderr

    assert "Rust 1.95 or newer is needed; found 1.94.0" in reported("--packages")
    assert "Rust" not in reported()
    for target in ("wheel", "dist", "test-delta"):
        commands = subprocess.run(["make", "-n", target], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
        assert "tests/requirements.sh --packages" in commands, target


# Processes of this machine


class Here:
    """Runs commands that are written for other machines, with addresses, ports and folders of this machine."""

    def __init__(self, folder):
        self.folder = folder
        self.ports = {}
        self.running = contextlib.ExitStack()

    def port(self, port):
        """Returns the free port that replaces a port in the commands."""
        return self.ports.setdefault(int(port), free_port())

    def argument(self, argument):
        """Returns an argument in which addresses, ports and folders are replaced."""
        argument = re.sub(r"0\.0\.0\.0|onefold-serve-master|onefold-cluster-scheduler|\$\(POD_IP\)", "127.0.0.1", argument)
        argument = re.sub(r"\b(7070|7071|50050|50051)\b", lambda found: str(self.port(found[0])), argument)
        return re.sub(r"=/(cache|scratch)$", rf"={self.folder}", argument)

    def start(self, program, *arguments):
        """Starts a program of the project, which the fixture ends."""
        command = [BINARIES / Path(program).name, *map(self.argument, arguments), "--quiet"]
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.running.callback(end, process)
        return process

    def get(self, port, path, process):
        """Returns the answer of a process on a port, after waiting until it listens."""
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port(port)}{path}", timeout=10) as answer:
                    return answer.read().decode()
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until, f"{process.args} does not answer {path}"
            time.sleep(0.05)

    def get_with(self, port, path, part, process):
        """Waits until the answer contains a text, and returns the answer."""
        until = time.monotonic() + PATIENCE
        while part not in (answer := self.get(port, path, process)):
            assert time.monotonic() < until, answer
            time.sleep(0.05)
        return answer


def end(process):
    """Ends a process as systemd and Kubernetes do, and checks that it ends."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def here(tmp_path):
    """Yields a `Here`, and ends its processes."""
    here = Here(tmp_path)
    with here.running:
        yield here


def check_service(here, master, worker):
    assert here.get(7070, "/healthz", master) == here.get(7071, "/healthz", worker) == "ok\n"
    assert "onefold_serve_wanted_workers" in here.get(7070, "/metrics", master)
    here.get_with(7070, "/status.json", f"127.0.0.1:{here.port(7071)}", master)


def check_cluster(here, scheduler, executor):
    here.get_with(50050, "/api/executors", str(here.port(50051)), scheduler)
    assert executor.poll() is None


# Units of systemd

KNOWN = {
    "Unit": {"Description", "Wants", "After"},
    "Service": {
        *("Environment", "EnvironmentFile", "ExecStart", "Restart", "RestartSec", "TimeoutStopSec", "LimitNOFILE"),
        *("CacheDirectory", "DynamicUser", "NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectSystem"),
        *("ProtectHome", "ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups"),
        *("RestrictAddressFamilies", "RestrictSUIDSGID", "LockPersonality"),
    },
    "Install": {"WantedBy"},
}


def read_unit(name):
    unit = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#",))
    unit.optionxform = str
    unit.read_string((PROJECT / "dist" / "systemd" / f"{name}.service").read_text())
    return unit


def start_unit(here, name):
    """Starts the command of a unit. Expands the unit's variables as systemd does."""
    service = read_unit(name)["Service"]
    variables = dict(variable.split("=", 1) for variable in shlex.split(service["Environment"]))
    if "CacheDirectory" in service:
        variables["CACHE_DIRECTORY"] = str(here.folder)
    words = []
    for word in service["ExecStart"].split():
        if whole := re.fullmatch(r"\$(\w+)", word):
            words += variables[whole[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word))
    return here.start(*words)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_have_known_settings(path):
    unit = read_unit(path.stem)
    assert set(unit.sections()) == set(KNOWN)
    for section in unit.sections():
        assert set(unit[section]) <= KNOWN[section]
    assert Path(unit["Service"]["ExecStart"].split()[0]).parent == Path("/opt/onefold/bin")
    variables = {variable.split("=")[0] for variable in shlex.split(unit["Service"]["Environment"])}
    used = set(re.findall(r"\$\{?(\w+)", unit["Service"]["ExecStart"])) - {"CACHE_DIRECTORY"}
    assert used == variables, "variables with defaults"


def test_the_units_of_the_service_run(here):
    master = start_unit(here, "onefold-serve-master")
    check_service(here, master, start_unit(here, "onefold-serve-worker"))
    # A worker that receives SIGTERM waits for its clients for up to a minute.
    assert int(read_unit("onefold-serve-worker")["Service"]["TimeoutStopSec"]) > 60


def test_the_units_of_the_cluster_run(here):
    scheduler = start_unit(here, "onefold-cluster-scheduler")
    # An executor ends if it does not reach the scheduler; systemd starts it again.
    here.get(50050, "/api/executors", scheduler)
    check_cluster(here, scheduler, start_unit(here, "onefold-cluster-executor"))


# Manifests of Kubernetes


def objects_of(path):
    return list(yaml.safe_load_all(path.read_text()))


def objects(kind, manifest):
    """Returns the objects of a kind in a manifest by name."""
    found = objects_of(PROJECT / "dist" / "kubernetes" / manifest)
    return {one["metadata"]["name"]: one for one in found if one["kind"] == kind}


def container_of(deployment):
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def start_container(here, deployment):
    container = container_of(deployment)
    return here.start(*container["command"], *container["args"])


@pytest.mark.parametrize("path", [*MANIFESTS, PROJECT / "ingest/examples/kubernetes.yaml"], ids=lambda path: path.stem)
def test_manifests_have_the_form_of_their_schemas(path):
    for one in objects_of(path):
        for version in ("1.30", "1.37"):
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_deployments_are_complete(path):
    version = tomllib.loads((PROJECT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    deployments = objects("Deployment", path.name).values()
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in deployments]
    for one in deployments:
        container, pod = container_of(one), one["spec"]["template"]["spec"]
        assert container["image"] == f"onefold:{version}"
        assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe"):
            (check,) = (container[probe][kind] for kind in ("httpGet", "tcpSocket") if kind in container[probe])
            assert check["port"] in named
        assert any(str(port) in argument for port in named.values() for argument in container["args"])
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container.get("volumeMounts", [])} == {
            volume["name"] for volume in pod.get("volumes", [])
        }
        assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    for service in objects("Service", path.name).values():
        assert service["spec"]["selector"] in labels


def test_the_manifests_of_the_service_run(here):
    deployments = objects("Deployment", "serve.yaml")
    master = start_container(here, deployments["onefold-serve-master"])
    worker = start_container(here, deployments["onefold-serve-worker"])
    check_service(here, master, worker)
    assert "onefold-serve-master:7070" in " ".join(container_of(deployments["onefold-serve-worker"])["args"])
    assert "onefold-serve-master" in objects("Service", "serve.yaml")


def test_the_autoscaler_has_the_limits_of_the_master():
    (scaler,) = objects("HorizontalPodAutoscaler", "serve.yaml").values()
    deployments = objects("Deployment", "serve.yaml")
    limits = f"--workers={scaler['spec']['minReplicas']}..{scaler['spec']['maxReplicas']}"
    assert limits in container_of(deployments["onefold-serve-master"])["args"]
    scaled = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
    # Otherwise, applying the manifest again would reset the number that the autoscaler chose.
    assert "replicas" not in scaled["spec"]
    assert scaled["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 60


def test_the_manifests_of_the_cluster_run(here):
    deployments = objects("Deployment", "cluster.yaml")
    scheduler = start_container(here, deployments["onefold-cluster-scheduler"])
    # An executor ends if it does not reach the scheduler; Kubernetes starts it again.
    here.get(50050, "/api/executors", scheduler)
    check_cluster(here, scheduler, start_container(here, deployments["onefold-cluster-executor"]))
    assert "onefold-cluster-scheduler" in objects("Service", "cluster.yaml")
