//! Training and planning with the URL of a preprocessing service.

use std::net::TcpStream;
use std::process::Child;
use std::time::{Duration, Instant};

use onefold_tests::{Dir, free_port};

use crate::ranks::{losses, with_dataset};

/// A service on this machine. The process ends when this value is dropped.
struct Service(Child, String);

impl Service {
    fn start(dir: &Dir) -> Self {
        let address = format!("127.0.0.1:{}", free_port());
        let line = format!(
            "onefold-serve local --workers 2 --threads 2 --listen {address} --dataset logged={}",
            dir.path("dataset").display()
        );
        let service = Self(dir.command(&line).spawn(), format!("grpc://{address}/logged"));
        let started = Instant::now();
        while TcpStream::connect(&address).is_err() {
            assert!(started.elapsed() < Duration::from_secs(300), "the service does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        service
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_model_trains_by_url_as_it_does_from_files() {
    let dir = with_dataset();
    let service = Service::start(&dir);
    let url = &service.1;
    let run = |data: &str, more: &str| {
        let line = format!("onefold-train run logs/train.toml --threads 1 --data {data} {more}");
        dir.command(&line).with_time_limit(900).json()
    };
    let local = losses(&run("dataset", "--out local"));
    assert_eq!(losses(&run(url, "--out served")), local);
    // A run that was started from files continues by URL at the same position.
    run("dataset", "--out both --max-steps 10");
    assert_eq!(losses(&run(url, "--out both --resume"))[10..], local[10..]);
    let evaluate = |data: &str| {
        let line = format!("onefold-train eval local --data {data}");
        let mut found = dir.command(&line).with_time_limit(900).json();
        found.as_object_mut().unwrap().retain(|key, _| !key.ends_with("seconds") && !key.ends_with("_bytes"));
        (found["ne"].clone(), found["auc"].clone(), found["samples"].clone())
    };
    assert_eq!(evaluate(url), evaluate("dataset"));
}

#[test]
fn tables_are_measured_by_url() {
    let dir = with_dataset();
    let service = Service::start(&dir);
    let tables = |data: &str, out: &str| {
        let line = format!("onefold-shard tables logs/train.toml --data {data} --out {out}");
        dir.command(&line).with_time_limit(900).works();
        dir.text(out)
    };
    assert_eq!(tables(&service.1, "served.json"), tables("dataset", "local.json"));
}
