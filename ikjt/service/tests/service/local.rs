//! Tests of a service on one machine, and of the pages that it shows.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use onefold_ikjt::{Dedupe, Reader, ReaderOptions};
use onefold_tests::free_port;
use serde_json::{Value, json};

use crate::fleet::{Fleet, START};
use crate::reading::{SetAtEnd, dataset, workers};

/// Returns the response of an HTTP server.
fn http(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < START, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_local_service_serves_batches_shows_its_status_and_ends_all_processes() {
    let dir = dataset();
    let address = format!("127.0.0.1:{}", free_port());
    let options =
        format!("--dataset clicks={} --memory-limit 512MiB --threads 2", dir.path("data").display());
    let mut service =
        dir.command(&format!("onefold-serve local --workers 2 --listen {address} {options}")).spawn();
    wait_until("the master listens", || TcpStream::connect(&address).is_ok());
    let status = || dir.command(&format!("onefold-serve status --master {address}")).json();
    wait_until("there are two workers", || status()["workers"].as_array().unwrap().len() == 2);
    let digest = |dataset: &str| {
        let line = format!("onefold-read digest {dataset} --preprocess steps.toml --batch-size 64");
        dir.command(&line).with_time_limit(600).json()["digest"].clone()
    };
    assert_eq!(digest(&format!("grpc://{address}/clicks")), digest("data"));

    wait_until("the client has ended", || status()["clients"].as_array().unwrap().is_empty());
    // The master knows the figures of the workers after their next heartbeats.
    let computed = || {
        let workers: Vec<Value> = status()["workers"].as_array().unwrap().clone();
        workers.iter().map(|worker| worker["samples_computed"].as_u64().unwrap()).sum::<u64>()
    };
    wait_until("6,000 samples are computed", || computed() >= 6000);
    let page = http(&address, "/");
    assert!(page.starts_with("HTTP/1.1 200") && page.contains("Preprocessing service"), "{page}");
    assert!(
        !page.contains("http-equiv") && !page.contains("src=") && !page.contains("<script"),
        "self-contained"
    );
    // A worker that gets no processor time for seconds counts as lost until its next heartbeat.
    wait_until("the metrics count two workers", || {
        let metrics = http(&address, "/metrics");
        metrics.contains("\nonefold_serve_workers 2\n") && metrics.contains("samples_computed_total{worker=")
    });
    assert!(http(&address, "/status.json").contains("\"limit\":"));

    let mut last = Value::Null;
    wait_until("there are two workers", || {
        last = status();
        last["workers"].as_array().unwrap().len() == 2
    });
    let workers: Vec<String> = last["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| worker["address"].as_str().unwrap().to_owned())
        .collect();
    for worker in &workers {
        assert!(http(worker, "/healthz").ends_with("ok\n"), "{worker}");
        assert!(http(worker, "/metrics").contains("\nonefold_serve_samples_computed_total "), "{worker}");
    }
    assert!(http(&address, "/healthz").ends_with("ok\n"));
    service.kill().unwrap();
    service.wait().unwrap();
    for worker in workers {
        wait_until("workers end with the service", || TcpStream::connect(&worker).is_err());
    }
}

#[test]
fn jobs_are_listed_with_what_their_clients_get() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    fleet.wait_for_workers(1);
    let jobs = || fleet.command(&format!("onefold-serve jobs --master {}", fleet.address()));
    assert_eq!(jobs().json(), json!({"jobs": []}));
    let url = fleet.url("data");
    let over = AtomicBool::new(false);
    // Takes a batch, and stays registered as a client until the test is over.
    let read = |dedupe| {
        let options = ReaderOptions { dedupe, ..ReaderOptions::new(64) };
        let reader = Reader::open(Path::new(&url), options, &workers()).unwrap();
        let mut batches = reader.batches().unwrap();
        batches.next().unwrap().unwrap();
        wait_until("the test is over", || over.load(Relaxed));
    };
    let location = dir.path("data").display().to_string();
    std::thread::scope(|scope| {
        let _end = SetAtEnd(&over);
        for dedupe in [Dedupe::Off, Dedupe::Window, Dedupe::Window] {
            let read = &read;
            scope.spawn(move || read(dedupe));
        }
        wait_until("two jobs are read by three clients, whose samples are counted", || {
            let listed = jobs().json();
            let field = |name: &str| -> Vec<Value> {
                listed["jobs"].as_array().unwrap().iter().map(|job| job[name].clone()).collect()
            };
            assert!(field("dataset").iter().all(|dataset| *dataset == location), "{listed}");
            let shares = field("waiting_share");
            assert!(shares.iter().all(|share| (0.0..=1.0).contains(&share.as_f64().unwrap())), "{listed}");
            assert!(field("samples_per_second").iter().all(Value::is_f64), "{listed}");
            let mut clients = field("clients");
            clients.sort_by_key(Value::as_u64);
            clients == [1, 2] && field("samples").iter().all(|samples| samples.as_u64() > Some(0))
        });
        wait_until("the clients of a job are counted", || jobs().works().contains(" 2 clients, "));
    });
    // A report that a client sent before its end may arrive after it.
    wait_until("all clients have ended", || jobs().json() == json!({"jobs": []}));
    wait_until("no job is listed", || jobs().works().contains("no job is read"));
}

/// Checks that a client stays registered while its trainer evaluates or writes a checkpoint, and takes no batches.
#[test]
fn a_client_whose_caller_pauses_stays() {
    let dir = dataset();
    let fleet = Fleet::new(&dir, 1);
    fleet.wait_for_workers(1);
    let reader = Reader::open(Path::new(&fleet.url("data")), ReaderOptions::new(16), &workers()).unwrap();
    let mut batches = reader.batches().unwrap();
    batches.next().unwrap().unwrap();
    fleet.wait_for("the client reports", |status| status["clients"].as_array().unwrap().len() == 1);
    // The master drops a client that has not reported for 10 seconds, so a client that is there later has reported.
    fleet.wait_for("the client has reported during the whole pause", |status| {
        let clients = status["clients"].as_array().unwrap();
        assert_eq!(clients.len(), 1, "{status}");
        clients[0]["seconds"].as_f64() > Some(12.0)
    });
    drop(batches);
    fleet.wait_for("the client has ended", |status| status["clients"].as_array().unwrap().is_empty());
}

#[test]
fn a_local_service_is_for_this_machine() {
    let dir = onefold_tests::Dir::new();
    let local = |options: &str| dir.command(&format!("onefold-serve local {options}")).with_time_limit(300);
    local("--listen 0.0.0.0:7070").fails(&["are on loopback", "onefold-serve worker"]);
    local("--listen 127.0.0.1:0 --workers 1..100 --memory-limit 1GiB")
        .fails(&["100 workers would have", "`--workers`"]);
}
