//! A service on one machine, and what it shows.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::fleet::{START, free_port};
use crate::reading::dataset;

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
fn a_local_service_is_for_this_machine() {
    let dir = onefold_tests::Dir::new();
    let local = |options: &str| dir.command(&format!("onefold-serve local {options}")).with_time_limit(30);
    local("--listen 0.0.0.0:7070").fails(&["are on loopback", "onefold-serve worker"]);
}
