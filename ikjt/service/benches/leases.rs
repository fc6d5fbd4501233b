//! Benchmark of the number of leases per second that a master gives, and of their processor time. Run
//! `cargo bench -p onefold-serve`.
//!
//! The master is a separate process with 256 registered workers. 64 clients request blocks one after the other as
//! fast as they are answered, each over its own connection.
#![expect(clippy::print_stdout, reason = "what it measured")]

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use onefold_ikjt::service::protocol::{ClientState, Lease, Question, SAME_BYTES};
use onefold_ikjt::service::{Network, Security};
use serde_json::{Value, json};

const WORKERS: usize = 256;
const CLIENTS: usize = 64;
const SECONDS: u64 = 5;

/// A heartbeat of a worker in its JSON form.
#[derive(serde::Serialize, serde::Deserialize)]
struct Heartbeat {
    worker: Value,
}

impl Question for Heartbeat {
    const ACTION: &'static str = "heartbeat";
    type Answer = Value;
}

struct Master(Child);

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Master {
    /// Returns the processor time of the master in seconds.
    fn cpu_seconds(&self) -> f64 {
        let status = fs_err::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let fields = status.rsplit_once(')').unwrap().1.split_ascii_whitespace();
        fields.skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap()).sum::<f64>() / 100.0
    }
}

fn network() -> Network {
    Network::new(&Security::default(), false).unwrap()
}

async fn heartbeats(address: String) {
    let network = network();
    loop {
        for worker in 0..WORKERS {
            let worker = json!({
                "address": format!("10.0.{}.{}:7071", worker / 256, worker % 256), "threads": 16,
                "process": worker.to_string(), "same_bytes": SAME_BYTES,
                "memory_limit_bytes": 1_u64 << 36, "blocks": 20, "draining": false, "batches_computed": 0,
                "samples_computed": 0, "batches_sent": 0, "bytes_sent": 0, "bytes_kept": 0,
                "cached_bytes": 0, "cached_bytes_on_disk": 0, "encoded_hits": 0, "decoded_hits": 0, "block_hits": 0,
                "disk_hits": 0, "cpu_seconds": 0.0,
                "verify_seconds": 0.0, "read_seconds": 0.0, "decode_seconds": 0.0, "arrange_seconds": 0.0,
                "cut_seconds": 0.0, "deduplicate_seconds": 0.0, "preprocess_seconds": 0.0, "bytes_verified": 0,
                "bytes_read": 0,
            });
            network.ask(&address, &Heartbeat { worker }).await.expect("the master answers");
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn client(address: String, number: usize, leases: Arc<AtomicU64>, until: Instant) {
    let network = network();
    let (client, job, dataset) =
        (number.to_string(), format!("{number:024x}"), "s3://bucket/dataset".to_owned());
    let state = ClientState { client, job, dataset, seconds: 1.0, ..ClientState::default() };
    for block in 0_u64.. {
        let key = format!("{number:024x}/0/{block}");
        let client = Some(state.clone());
        let lease = Lease { key, affinity: None, avoid: Vec::new(), client, same_bytes: SAME_BYTES };
        network.ask(&address, &lease).await.expect("a worker");
        leases.fetch_add(1, Relaxed);
        if Instant::now() > until {
            return;
        }
    }
}

fn main() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_onefold-serve"));
    command.args(["master", "--quiet", "--listen", &address]).stdout(Stdio::null());
    let master = Master(command.spawn().unwrap());
    while std::net::TcpStream::connect(&address).is_err() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let leases = Arc::new(AtomicU64::new(0));
    runtime.block_on(async {
        let beating = tokio::spawn(heartbeats(address.clone()));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (before, started) = (master.cpu_seconds(), Instant::now());
        let until = started + Duration::from_secs(SECONDS);
        let clients = (0..CLIENTS).map(|number| client(address.clone(), number, Arc::clone(&leases), until));
        futures::future::join_all(clients).await;
        let (count, used) = (leases.load(Relaxed) as f64, master.cpu_seconds() - before);
        println!(
            "{:.0} leases a second; {:.1} us of the master's processor time each, with {WORKERS} workers' signs of life",
            count / started.elapsed().as_secs_f64(),
            1e6 * used / count
        );
        beating.abort();
    });
}
