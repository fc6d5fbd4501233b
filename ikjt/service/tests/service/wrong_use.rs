//! Tests that errors are reported once, to the person who can resolve them.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use onefold_ikjt::service::protocol::{Define, FindSnapshot, Job, Lease, SAME_BYTES};
use onefold_ikjt::service::{Failure, Network, Security};
use onefold_ikjt::{Rank, ReaderOptions};
use onefold_tests::{BUCKET, Dir, EXPIRY, Fault, S3Server, TestCommand, When};

use crate::fleet::{Fleet, START};
use crate::reading::dataset;

/// Runs commands in parallel, because some of them wait for seconds. Each one must fail, with all of its parts in its
/// error.
fn all_fail<const N: usize>(commands: [(TestCommand, &[&str]); N]) {
    std::thread::scope(|scope| {
        for (command, parts) in commands {
            scope.spawn(move || command.fails(parts));
        }
    });
}

#[test]
fn wrong_requests_have_one_clear_error() {
    let dir = dataset();
    let data = dir.path("data").display().to_string();
    let fleet = Fleet::with(&dir, 1, None, "", &format!("--dataset clicks={data}"));
    fleet.wait_for_workers(1);
    let host = fleet.address();
    let read = |dataset: &str, more: &str| {
        fleet.command(&format!("onefold-read digest grpc://{host}/{dataset} {more}"))
    };
    read("clicks", "").works();
    read("views", "").fails(&["no dataset `views`", "the datasets are `clicks`"]);
    read("/nowhere/data", "").fails(&["`/nowhere/data` is not a dataset"]);
    read("clicks", "--at 7").fails(&["snapshot 7"]);
    read("clicks", "--features user_99").fails(&["no sparse feature `user_99`"]);
    read("clicks", "--streams 1000").fails(&["1000 streams"]);
    dir.write("wrong.toml", "format_version = 1\n[[step]]\nop = \"log1p\"\ninputs = [\"label\"]\n");
    read("clicks", "--preprocess wrong.toml").fails(&["wrong.toml", "line 2"]);
    fleet.command("onefold-read digest grpc://127.0.0.1/clicks").fails(&["the host has no port"]);
    let status = fleet.command(&format!("onefold-serve drain 127.0.0.1:1 --master {host}"));
    status.fails(&["no worker `127.0.0.1:1`"]);
    fleet.command("onefold-serve status --master 127.0.0.1:1").fails(&["no master answers at `127.0.0.1:1`"]);
    let worker = fleet.wait_for_workers(1)["workers"][0]["address"].as_str().unwrap().to_owned();
    let is_worker: &[&str] = &["this process is a worker", "the service's master"];
    fleet.command(&format!("onefold-serve status --master {worker}")).fails(is_worker);
    fleet.command(&format!("onefold-read digest grpc://{worker}/clicks")).fails(is_worker);
}

#[test]
fn damaged_data_is_named() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    fleet.wait_for_workers(1);
    let file = onefold_tests::files_below(&dir.path("data/data")).into_keys().next().unwrap();
    let file = dir.path("data/data").join(file);
    let mut bytes = fs_err::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs_err::write(&file, bytes).unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    fleet.command(&format!("onefold-read digest {}", fleet.url("data"))).fails(&[name, "checksum"]);
}

#[test]
fn a_master_refuses_two_datasets_of_one_name() {
    let dir = Dir::new();
    let command = |line: &str| dir.command(line).with_time_limit(300);
    all_fail([
        (
            command("onefold-serve master --listen 127.0.0.1:0 --dataset a=s3://b/c --dataset a=s3://b/d"),
            &["two datasets have the name `a`", "`s3://b/c` and `s3://b/d`"],
        ),
        (
            command("onefold-serve worker --master 127.0.0.1:1 --listen 0.0.0.0:0"),
            &["clients cannot reach a worker at `0.0.0.0:0`", "`--host`"],
        ),
        // No process listens there.
        (
            command("onefold-read digest grpc://127.0.0.1:1/clicks"),
            &["the preprocessing service at `127.0.0.1:1`", "onefold-serve status --master 127.0.0.1:1"],
        ),
    ]);
}

/// Checks that the client and the worker report at once that the worker's storage denies access.
#[test]
fn denied_storage_and_missing_workers_are_reported() {
    let dir = dataset();
    let server = S3Server::start();
    server.inject("", Fault::Denied, When::Always);
    let fleet = Fleet::with(&dir, 1, Some(&server), "", "");
    fleet.wait_for_workers(1);
    let read = format!("onefold-read digest grpc://{}/s3://{BUCKET}/data", fleet.address());
    fleet.command(&read).fails(&["the worker `127.0.0.1:", "denied the request", "AWS_ACCESS_KEY_ID"]);
    let nobody = Fleet::new(&dir, 0);
    let read = format!("onefold-read digest {}", nobody.url("data"));
    nobody.command(&read).fails(&["has no worker", " has waited for ", "onefold-serve status"]);
}

/// A process that is killed when this is dropped, also if the test fails.
struct KilledAtEnd(Child);

impl Drop for KilledAtEnd {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the lines that a process prints on stderr, while it runs.
fn stderr_of(process: &mut Child) -> Receiver<String> {
    let stderr = process.stderr.take().unwrap();
    let (sender, lines) = channel();
    // The thread ends with the process.
    std::thread::spawn(move || {
        BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    lines
}

/// Checks that a worker reports once that its cache cannot be written, and that its clients read on.
#[test]
fn a_worker_reports_a_full_cache_disk() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 0);
    // The batches need 26 MiB; the items do not all fit into memory.
    let options = format!("--threads 1 --memory-limit 32MiB --cache-dir {}", dir.path("cache").display());
    let line = format!("onefold-serve worker --master {} {options}", fleet.address());
    let mut worker = dir.command(&line).with_file_limit(1).spawn_with_stderr();
    fleet.wait_for_workers(1);
    let lines = stderr_of(&mut worker);
    let worker = KilledAtEnd(worker);
    let is_warning = |line: &String| line.contains("`--cache-dir` cannot be written to");
    let read = |options: &str| {
        fleet.command(&format!("onefold-read digest {} {options}", fleet.url("data"))).works();
    };
    let (started, mut warnings, mut seed) = (Instant::now(), 0, 0);
    while warnings == 0 {
        assert!(started.elapsed() < START, "the worker says nothing");
        read(&format!("--shuffle {seed}"));
        read("");
        seed += 1;
        warnings += lines.try_iter().filter(is_warning).count();
    }
    // Further writes fail, about which the worker is silent.
    (100..103).for_each(|seed| read(&format!("--shuffle {seed}")));
    drop(worker);
    assert_eq!(warnings + lines.iter().filter(is_warning).count(), 1);
}

/// Checks that a worker with too little memory reports this to its operator, as it does to the client.
#[test]
fn a_worker_reports_too_little_memory() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 0);
    let line = format!("onefold-serve worker --master {} --threads 1 --memory-limit 64KiB", fleet.address());
    let mut worker = dir.command(&line).spawn_with_stderr();
    let lines = stderr_of(&mut worker);
    let _worker = KilledAtEnd(worker);
    fleet.wait_for_workers(1);
    let needs: &[&str] =
        &["must be at least", "the worker `127.0.0.1:", "`--memory-limit` of `onefold-serve worker`"];
    fleet.command(&format!("onefold-read digest {}", fleet.url("data"))).fails(needs);
    while !lines.recv_timeout(START).expect("the worker reports its memory").contains(needs[0]) {}
}

/// Checks that a worker reads only locations that its master names, for all clients.
#[test]
fn workers_read_only_named_datasets() {
    let dir = dataset();
    let data = dir.path("data").display().to_string();
    let fleet = Fleet::with(&dir, 1, None, "", &format!("--only-named --dataset clicks={data}"));
    let worker = fleet.wait_for_workers(1)["workers"][0]["address"].as_str().unwrap().to_owned();
    fleet.command(&format!("onefold-read digest grpc://{}/clicks", fleet.address())).works();
    let network = Network::new(&Security::default(), false).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ask = |location: &str| {
        let question = FindSnapshot { location: location.to_owned(), number: None };
        runtime.block_on(network.ask(&worker, &question))
    };
    assert!(ask(&data).is_ok());
    for location in [dir.path("other").display().to_string(), format!("grpc://{}/clicks", fleet.address())] {
        match ask(&location) {
            Err(Failure::Final(error)) => assert!(error.to_string().contains("does not read"), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}

/// Checks that neither the master nor a worker gives batches to a client of another version, and that both say so.
#[test]
fn another_version_is_reported() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    let worker = fleet.wait_for_workers(1)["workers"][0]["address"].as_str().unwrap().to_owned();
    let network = Network::new(&Security::default(), false).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let same_bytes = SAME_BYTES + 1;
    let lease = Lease { key: "key".to_owned(), affinity: None, avoid: Vec::new(), client: None, same_bytes };
    match runtime.block_on(network.ask(&fleet.address(), &lease)) {
        Err(Failure::Passing(fault)) => {
            assert!(fault.to_string().contains("of another version of Onefold"), "{fault}");
        }
        other => panic!("{other:?}"),
    }
    let job = Job {
        dataset: dir.path("data").display().to_string(),
        identity: "identity".to_owned(),
        options: ReaderOptions::new(64),
        rank: Rank::default(),
    };
    match runtime.block_on(network.ask(&worker, &Define { job, same_bytes })) {
        Err(Failure::Final(error)) => {
            assert!(error.to_string().contains("install the same version"), "{error}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_client_token_does_not_admit_workers() {
    let dir = dataset();
    dir.write("token", "a-text-for-clients\n");
    dir.write("worker-token", "a-text-for-workers\n");
    let fleet = Fleet::with(&dir, 1, None, "--token-file token --worker-token-file worker-token", "");
    fleet.wait_for_workers(1);
    let read = format!("onefold-read digest {}", fleet.url("data"));
    fleet.command(&read).with_variable("ONEFOLD_TOKEN", "a-text-for-clients").works();
    let master = fleet.address();
    let line = format!(
        "onefold-serve worker --master {master} --token-file token --memory-limit 64MiB --quiet --json"
    );
    // The worker prints its address before the master rejects it.
    let output = fleet.command(&line).output();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("`--worker-token-file`"), "{stderr}");
    let worker = fleet.wait_for_workers(1)["workers"][0]["address"].as_str().unwrap().to_owned();
    let drain = format!("onefold-serve drain {worker} --master {master} --token-file token");
    fleet.command(&drain).fails(&["does not allow `drain`"]);
}

/// Checks that a master that authenticates its clients needs a separate token for workers.
#[test]
fn a_master_with_one_token_is_refused() {
    let dir = Dir::new();
    dir.certificate("ours", "ours", 2);
    dir.write("token", "a-text-for-all\n");
    dir.write("same", "a-text-for-all\n");
    dir.write("other", "a-text-for-workers\n");
    dir.write("lines", "a-text\nof-two-lines\n");
    let master = |options: &str| {
        let line = format!("onefold-serve master --listen 127.0.0.1:0 {options}");
        dir.command(&line).with_time_limit(300)
    };
    let local =
        dir.command("onefold-serve local --listen 127.0.0.1:0 --token-file token").with_time_limit(300);
    let could: &[&str] = &["could become a worker", "`--worker-token-file`"];
    all_fail([
        (master("--token-file token"), could),
        (local, could),
        (master(&tls("ours", "ours")), could),
        (master(&format!("{} --token-file token", tls("ours", "ours"))), could),
        (master("--token-file lines --worker-token-file other"), &["`lines` has other characters"]),
        (
            master("--token-file token --worker-token-file same"),
            &["have the same token", "`--worker-token-file`"],
        ),
    ]);
    let both = Fleet::with(&dir, 0, None, "--token-file token --worker-token-file other", "");
    assert_eq!(both.wait_for_workers(0)["workers"].as_array().map(Vec::len), Some(0));
}

/// Checks that tokens, like certificates, can be replaced while the service runs.
#[test]
fn a_replaced_token_is_taken_up() {
    let dir = dataset();
    dir.write("token", "the-first-text\n");
    dir.write("worker-token", "the-first-text-of-workers\n");
    let fleet = Fleet::with(&dir, 1, None, "--token-file token --worker-token-file worker-token", "");
    fleet.wait_for_workers(1);
    let read = |token: &str| {
        let command = fleet.command(&format!("onefold-read digest {}", fleet.url("data")));
        command.with_variable("ONEFOLD_TOKEN", token)
    };
    read("the-first-text").works();
    dir.write("token", "the-second-text\n");
    dir.write("worker-token", "the-second-text-of-workers\n");
    let started = Instant::now();
    while !read("the-second-text").output().status.success() {
        assert!(started.elapsed() < START, "the new token is not taken up");
    }
    read("the-first-text").fails(&["the token is missing or unknown"]);
}

fn tls(certificate: &str, authority: &str) -> String {
    format!(
        "--tls-certificate {certificate}.pem --tls-key {certificate}.key --tls-authority {authority}-ca.pem"
    )
}

#[test]
fn only_clients_with_certificate_and_token_are_answered() {
    let dir = dataset();
    dir.certificate("old", "ours", 0);
    let made = Instant::now();
    dir.certificate("ours", "ours", 2);
    dir.certificate("theirs", "theirs", 2);
    dir.write("token", "a-long-random-text\n");
    dir.write("worker-token", "another-long-random-text\n");
    dir.write("tokens-ca.pem", "a-long-random-text\n");
    let with = |tls: &str| format!("{tls} --token-file token --worker-token-file worker-token");
    let options = with(&tls("ours", "ours"));
    let fleet = Fleet::with(&dir, 1, None, &options, "");
    fleet.wait_for_workers(1);
    let url = fleet.url("data").replace("grpc://", "grpcs://");
    let read = |certificate: &str, authority: &str, token: &str| -> TestCommand {
        fleet
            .command(&format!("onefold-read digest {url}"))
            .with_variable("ONEFOLD_TLS_CERTIFICATE", &format!("{certificate}.pem"))
            .with_variable("ONEFOLD_TLS_KEY", &format!("{certificate}.key"))
            .with_variable("ONEFOLD_TLS_AUTHORITY", &format!("{authority}-ca.pem"))
            .with_variable("ONEFOLD_TOKEN", token)
    };
    assert_eq!(read("ours", "ours", "a-long-random-text").json()["samples"], 6000);
    std::thread::sleep(EXPIRY.saturating_sub(made.elapsed()));
    let address = fleet.address();
    let serve = |line: &str, tls: &str| fleet.command(&format!("onefold-serve {line} {}", with(tls)));
    let worker = format!("worker --master {address} --memory-limit 64MiB");
    let expired: &[&str] = &["the certificate `old.pem` of this process expired at ", "`--tls-certificate`"];
    all_fail([
        (read("ours", "ours", "guessed"), &["the token is missing or unknown", "ONEFOLD_TOKEN"]),
        (read("ours", "theirs", "a-long-random-text"), &["cannot connect", "UnknownIssuer"]),
        // The service sends the reason, or closes the connection before the client has read it.
        (read("theirs", "ours", "a-long-random-text"), &["`ONEFOLD_TLS_CERTIFICATE`"]),
        (
            read("old", "ours", "a-long-random-text"),
            &["the certificate of `ONEFOLD_TLS_CERTIFICATE` expired at "],
        ),
        (fleet.command(&format!("onefold-read digest {}", fleet.url("data"))), &["`grpcs://`"]),
        (
            read("ours", "tokens", "a-long-random-text"),
            &["the file of `ONEFOLD_TLS_AUTHORITY` contains no certificate"],
        ),
        (
            serve("master --listen 127.0.0.1:0", &tls("ours", "ours").replace("ours.key", "theirs.key")),
            &[
                "`ours.pem` of this process and the key `theirs.key` of this process cannot be used",
                "`--tls-key`",
            ],
        ),
        (serve("master --listen 127.0.0.1:0", &tls("old", "ours")), expired),
        (serve(&worker, &tls("old", "ours")), expired),
        (serve(&format!("status --master {address}"), &tls("old", "ours")), expired),
    ]);
    // The address is printed before the master rejects the worker.
    let output = serve(&worker, "--quiet --json").output();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("the other process uses TLS"), "{stderr}");
}

/// Checks that a worker says by itself that its certificate has expired while it runs.
#[test]
fn a_running_worker_reports_its_expired_certificate() {
    let dir = Dir::new();
    dir.certificate("old", "ours", 0);
    let made = Instant::now();
    dir.certificate("ours", "ours", 2);
    dir.write("token", "a-long-random-text\n");
    let options = format!("{} --worker-token-file token", tls("ours", "ours"));
    let fleet = Fleet::with(&dir, 0, None, &options, "");
    std::thread::sleep(EXPIRY.saturating_sub(made.elapsed()));
    let line = format!("onefold-serve worker --master {} --memory-limit 64MiB {options}", fleet.address());
    let mut worker = dir.command(&line).spawn_with_stderr();
    let lines = stderr_of(&mut worker);
    let _worker = KilledAtEnd(worker);
    fleet.wait_for_workers(1);
    // The files that the worker reads again contain the expired certificate from now on.
    for file in ["ours.pem", "ours.key"] {
        fs_err::copy(dir.path(file.replace("ours", "old")), dir.path(file)).unwrap();
    }
    let expired = "the certificate `ours.pem` of this process expired at ";
    while !lines.recv_timeout(START).expect("the worker reports the certificate").contains(expired) {}
}
