//! A service on one machine, and what it shows.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use onefold_ikjt::{Dedupe, Reader, ReaderOptions};
use serde_json::{Value, json};

use crate::fleet::{Fleet, START, free_port};
use crate::reading::{dataset, workers};

/// What an HTTP server answers.
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
fn a_local_service_reads_shows_and_ends_as_one() {
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
        dir.command(&line).with_time_limit(60).json()["digest"].clone()
    };
    assert_eq!(digest(&format!("grpc://{address}/clicks")), digest("data"));

    assert_eq!(status()["clients"].as_array().unwrap().len(), 0, "the client has ended");
    // What the workers did is known with their next signs of life.
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
    let metrics = http(&address, "/metrics");
    assert!(
        metrics.contains("\nonefold_serve_workers 2\n") && metrics.contains("samples_computed_total{worker=")
    );
    assert!(http(&address, "/status.json").contains("\"limit\":"));

    let workers: Vec<String> = status()["workers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|worker| worker["address"].as_str().unwrap().to_owned())
        .collect();
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
    let batches = |dedupe| {
        let options = ReaderOptions { dedupe, ..ReaderOptions::new(64) };
        let mut batches = Reader::open(Path::new(&url), options, &workers()).unwrap().epoch(0).unwrap();
        batches.next().unwrap().unwrap();
        batches
    };
    let mut readers = [batches(Dedupe::Off), batches(Dedupe::Window), batches(Dedupe::Window)];
    let field = |name: &str| {
        let jobs = jobs().json();
        jobs["jobs"].as_array().unwrap().iter().map(|job| job[name].clone()).collect::<Vec<Value>>()
    };
    wait_until("there are two jobs", || field("clients").len() == 2);
    let mut clients = field("clients");
    clients.sort_by_key(Value::as_u64);
    assert_eq!(clients, [1, 2]);
    let location = dir.path("data").display().to_string();
    assert!(field("dataset").iter().all(|dataset| *dataset == location));
    wait_until("samples are counted", || {
        // A client that goes on says every second how it fares.
        readers.iter_mut().for_each(|batches| drop(batches.next()));
        field("samples").iter().all(|samples| samples.as_u64() > Some(0))
    });
    assert!(field("waiting_share").iter().all(|share| (0.0..=1.0).contains(&share.as_f64().unwrap())));
    assert!(field("samples_per_second").iter().all(Value::is_f64));
    assert!(jobs().works().contains(" 2 clients, "));
    drop(readers);
    wait_until("nobody reads any more", || field("job").is_empty());
    assert!(jobs().works().contains("no job is read"));
}

#[test]
fn a_local_service_is_for_this_machine() {
    let dir = onefold_tests::Dir::new();
    let local = |options: &str| dir.command(&format!("onefold-serve local {options}")).with_time_limit(30);
    local("--listen 0.0.0.0:7070").fails(&["are on loopback", "onefold-serve worker"]);
}
