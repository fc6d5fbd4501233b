//! A dataset in another implementation of S3, the server of moto, accessed directly and through a failing network.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use onefold_base::sync::locked;
use onefold_datasets::Snapshot;
use onefold_tests::{Dir, Fault, S3Server, TestCommand, When, free_port};
use serde_json::{Value, json};

use crate::remote::{SOON, whole_path, with_logs};
use crate::samples::without_random_names;

/// A process with moto's server, which ends when no test uses it.
struct Moto {
    process: Child,
    address: SocketAddr,
    /// The directory of the server, which writes to its log continually. It is separate, because tests check that a
    /// failing command changes no file in their own directory.
    folder: Dir,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Moto {
    /// Returns the server that all running tests share. Each of them uses different keys.
    fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Moto>> = Mutex::new(Weak::new());
        let mut shared = locked(&SHARED);
        shared.upgrade().unwrap_or_else(|| {
            let moto = Arc::new(Self::start());
            *shared = Arc::downgrade(&moto);
            moto
        })
    }

    /// Starts a server with the bucket `data` on a free port of 127.0.0.1.
    fn start() -> Self {
        let folder = Dir::new();
        let packages = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/moto.sh")).output().unwrap();
        assert!(packages.status.success(), "{}", String::from_utf8_lossy(&packages.stderr));
        let packages = String::from_utf8(packages.stdout).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let log = fs_err::File::create(folder.path("moto.log")).unwrap().into_file();
        let mut command = Command::new("python3");
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &address.port().to_string()]);
        command.env("PYTHONPATH", packages.trim()).env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::null());
        command.stdout(log.try_clone().unwrap()).stderr(log);
        let mut moto = Self { process: command.spawn().unwrap(), address, folder };
        let started = Instant::now();
        while !moto.creates_bucket() {
            let ended = moto.process.try_wait().unwrap().is_some();
            let told = || moto.folder.text("moto.log");
            assert!(!ended, "moto ended: {}", told());
            assert!(started.elapsed() < Duration::from_secs(600), "moto does not answer: {}", told());
            std::thread::sleep(Duration::from_millis(100));
        }
        moto
    }

    fn creates_bucket(&self) -> bool {
        TcpStream::connect(self.address).is_ok_and(|stream| {
            request(stream, "PUT /data", &[]);
            true
        })
    }

    /// Creates or replaces an object in the bucket `data`.
    fn put(&self, key: &str, bytes: &[u8]) {
        put(self.address, key, bytes);
    }

    /// Returns the bytes of an object in the bucket `data`.
    fn get(&self, key: &str) -> Vec<u8> {
        request(TcpStream::connect(self.address).unwrap(), &format!("GET /data/{key}"), &[])
    }

    /// Returns a command that accesses this server at `s3://` URLs, with keys in its environment.
    fn command(&self, dir: &Dir, line: &str) -> TestCommand {
        let keys = [
            ("AWS_ACCESS_KEY_ID", "onefold"),
            ("AWS_SECRET_ACCESS_KEY", "a secret"),
            ("AWS_REGION", "us-east-1"),
        ];
        self.command_with(dir, line, &keys)
    }

    /// Returns a command that accesses this server at `s3://` URLs, with the credentials in `variables`.
    fn command_with(&self, dir: &Dir, line: &str, variables: &[(&str, &str)]) -> TestCommand {
        let endpoint = format!("http://{}", self.address);
        let of_server = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("NO_PROXY", "127.0.0.1"),
            ("no_proxy", "127.0.0.1"),
        ];
        let command = dir.command(line).without_variables("AWS_");
        let variables = of_server.iter().chain(variables);
        variables.fold(command, |command, (name, value)| command.with_variable(name, value))
    }
}

/// Creates or replaces an object in the bucket `data` of the server at `address`.
fn put(address: SocketAddr, key: &str, bytes: &[u8]) {
    request(TcpStream::connect(address).unwrap(), &format!("PUT /data/{key}"), bytes);
}

/// Sends a request, which must succeed, and returns the body of its answer.
fn request(mut stream: TcpStream, line: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    // The creator of an object may read it, and moto does not verify signatures.
    let signed = "AWS4-HMAC-SHA256 Credential=onefold/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";
    let head = format!(
        "Host: 127.0.0.1\r\nAuthorization: {signed}\r\nContent-Length: {length}\r\nConnection: close"
    );
    stream.write_all(format!("{line} HTTP/1.1\r\n{head}\r\n\r\n").as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    let head = String::from_utf8_lossy(&answer[..end]);
    assert!(head.starts_with("HTTP/1.1 200"), "{line}: {head}");
    answer.split_off(end)
}

#[test]
fn a_dataset_in_moto_is_that_of_a_local_disk() {
    let dir = with_logs(3000);
    let local = whole_path("dataset", "run-local", &|line| dir.command(line));
    let moto = Moto::shared();
    let remote = whole_path("s3://data/some/ds", "run-moto", &|line| moto.command(&dir, line));
    assert_eq!(remote, local);
    // Commits rely on this: an existing object is not created again.
    let build = "onefold-ingest build logs/dataset.toml --out s3://data/some/ds";
    moto.command(&dir, build).fails(&["`s3://data/some/ds` already exists"]);
    moto.command(&dir, "onefold-read bench s3://nowhere/ds").fails(&["`s3://nowhere/ds", "no such bucket"]);
}

/// Credentials are keys in a file, and a role for which moto's STS exchanges them.
#[test]
fn profiles_of_aws_give_credentials_for_moto() {
    let dir = with_logs(1000);
    let moto = Moto::shared();
    let home = Dir::new();
    let keys = "[keys]\naws_access_key_id = onefold\naws_secret_access_key = a secret\n";
    home.write(".aws/credentials", keys);
    let role = "role_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = keys\nregion = us-east-1";
    let sso = "sso_session = people\nsso_account_id = 1\nsso_role_name = reader";
    let session = "sso_region = us-east-1\nsso_start_url = https://example.invalid/start";
    let config = format!("[profile role]\n{role}\n[profile sso]\n{sso}\n[sso-session people]\n{session}\n");
    home.write(".aws/config", config);
    let home = home.path("").display().to_string();
    let command = |profile: &str, line: &str| {
        moto.command_with(&dir, line, &[("HOME", home.as_str()), ("AWS_PROFILE", profile)])
    };
    command("keys", "onefold-ingest build logs/dataset.toml --out s3://data/profiles/ds").works();
    let read = "onefold-read bench s3://data/profiles/ds";
    let [keys, role] = ["keys", "role"].map(|profile| command(profile, read).json()["values"].clone());
    assert_eq!(keys, role);
    command("sso", read)
        .with_time_limit(SOON)
        .fails(&["`sso` gives no credentials", "aws sso login --profile sso"]);
    command("nobody", read)
        .with_time_limit(SOON)
        .fails(&["AWS_PROFILE is `nobody`", "`keys`, `role`, `sso`"]);
}

/// Builds, appends to, verifies and reads a dataset at `location`. Returns the results that must not depend on the
/// location.
fn short_path(location: &str, command: &dyn Fn(&str) -> TestCommand) -> Value {
    let ingest = |what: &str| command(&format!("onefold-ingest {what} --threads 2")).json();
    let built = ingest(&format!("build logs/dataset.toml --out {location}"));
    let appended = ingest(&format!("append more/dataset.toml --out {location}"));
    assert_eq!([&built["snapshot"], &appended["snapshot"]], [&json!(1), &json!(2)]);
    let verified = ingest(&format!("verify {location}"));
    assert_eq!(verified["problems"], json!([]));
    let read = command(&format!("onefold-read bench {location} --threads 2 --shuffle 3")).json();
    let of = |summary: &Value, keys: &[&str]| keys.iter().map(|key| summary[*key].clone()).collect::<Value>();
    json!([
        of(&verified, &["snapshot", "samples", "sessions", "bytes_on_disk", "digest"]),
        of(&read, &["samples", "batches", "values", "dedupe_factor"]),
    ])
}

#[test]
#[allow(clippy::print_stdout, reason = "`--nocapture` shows the figures")]
fn faults_in_front_of_moto_change_nothing() {
    let dir = with_logs(1000);
    let local = short_path("dataset", &|line| dir.command(line));
    let snapshot = without_random_names(&Snapshot::load(&dir.path("dataset")).unwrap());
    let moto = Moto::shared();
    let slow = Fault::Slow { bytes_per_second: 1_000_000 };
    let kinds =
        [Fault::SlowDown, Fault::InternalError, Fault::Reset, Fault::LoseAnswer, Fault::Truncate, slow];
    for (kind, seed) in kinds.into_iter().zip(1..) {
        let server = S3Server::in_front_of(moto.address);
        // The commit, on which everything else depends, fails in each case.
        server.inject("PUT /data/ds-", kind, When::Nth(2));
        server.inject("/snapshots/00000002.json", kind, When::First(2));
        server.inject("", kind, When::Chance { probability: 0.2, seed });
        let key = format!("ds-{seed}");
        let remote = short_path(&format!("s3://data/{key}"), &|line| dir.command(line).with_s3(&server));
        assert_eq!(remote, local, "{kind:?}");
        let counted = server.counters();
        assert!(counted.faults > 5, "{kind:?}: {counted:?}");
        println!("{kind:?}: {} faults in {} requests", counted.faults, counted.requests);
        // Apart from random names, the dataset in moto equals the one on the local disk.
        assert!(without_random_names(&snapshot_of(&moto, &key, 2)) == snapshot, "{kind:?}");
    }
}

/// Returns a snapshot in moto, with its manifests.
fn snapshot_of(moto: &Moto, dataset: &str, number: u64) -> Snapshot {
    let copy = Dir::new();
    let file = |path: &str| {
        let bytes = moto.get(&format!("{dataset}/{path}"));
        copy.write(format!("ds/{path}"), &bytes);
        bytes
    };
    let snapshot: Value = serde_json::from_slice(&file(&format!("snapshots/{number:08}.json"))).unwrap();
    for entry in snapshot["manifests"].as_array().unwrap() {
        file(entry["path"].as_str().unwrap());
    }
    Snapshot::load(&copy.path("ds")).unwrap()
}

/// A data file is replaced by another object with the same name: while it is read, and between reading the snapshot
/// and the first request for the file.
#[test]
fn a_file_that_is_replaced_in_moto_is_noticed() {
    let dir = with_logs(1000);
    // The dataset has only one file.
    dir.edit("logs/dataset.toml", "by = \"hour\"", "columns = []");
    let moto = Moto::shared();
    let server = S3Server::in_front_of(moto.address);
    let command = |line: &str| dir.command(line).with_s3(&server);
    let built = command("onefold-ingest build logs/dataset.toml --out s3://data/ds").json();
    assert_eq!(built["snapshot"], json!(1));
    let snapshot = snapshot_of(&moto, "ds", 1);
    let path = snapshot.partitions[0].files[0].path();
    let (key, url) = (format!("ds/{path}"), format!("s3://data/ds/{path}"));
    let whole = moto.get(&key);
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    let longer = [&whole[..], b"more"].concat();

    let read = "onefold-read bench s3://data/ds";
    let verify = "onefold-ingest verify s3://data/ds";
    let replaced_at = |request: &str, nth: u64, with: &[u8], line: &str, parts: &[&str]| {
        moto.put(&key, &whole);
        let (address, key, bytes) = (moto.address, key.clone(), with.to_vec());
        server.before(&format!("{request} /data/ds/data/"), nth, move || put(address, &key, &bytes));
        command(line).fails(&[&[url.as_str()], parts].concat());
        server.heal();
    };
    // The first request gets the ETag, and all later requests require it.
    let changed = ["was changed while it was read", "find out what else writes there"];
    for with in [&flipped, &longer] {
        replaced_at("GET", 1, with, read, &changed);
        replaced_at("GET", 2, with, &format!("{read} --no-verify"), &changed);
        replaced_at("GET", 1, with, verify, &changed);
        replaced_at("GET", 2, with, verify, &changed);
    }
    replaced_at("HEAD", 1, &flipped, read, &["checksum"]);
    let sizes = format!("it has {} bytes, the snapshot says {}", longer.len(), whole.len());
    replaced_at("HEAD", 1, &longer, read, &[&sizes]);
    moto.put(&key, &flipped);
    let verified = command(verify).output();
    assert_eq!(verified.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&verified.stderr).contains("has a problem"), "{verified:?}");
    assert!(String::from_utf8_lossy(&verified.stdout).contains("checksum"), "{verified:?}");
    moto.put(&key, &whole);
    command(read).works();
    command(verify).works();
}
