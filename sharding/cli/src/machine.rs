//! Measures the bandwidths of this machine, for topologies of ranks on its processor.

use std::hint::black_box;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

use onefold_base::process::{available_threads, hardware_name};
use onefold_sharding::{Error, Topology};

/// The number of words that a core reads in a pass: 32 MiB, more than its part of the caches.
const WORDS: usize = 4 << 20;
const PASSES: usize = 4;
/// The bytes of a message, and the number of messages per connection.
const MESSAGE: usize = 1 << 20;
const MESSAGES: usize = 64;
/// The largest number of simultaneous connections.
const MOST_CONNECTIONS: u32 = 16;

/// Returns the topology of ranks on this machine's processor, each with `memory_bytes`. Bandwidths are measured while all
/// ranks are busy: that of memory by reading it on all cores, and that of links by messages over the loopback interface,
/// as ranks on one machine exchange them.
pub(crate) fn measured(ranks: u32, memory_bytes: u64) -> Result<Topology, Error> {
    let (cores, ranks) = (available_threads(), ranks.max(1));
    let connections = ranks.min(MOST_CONNECTIONS);
    let exchange_bandwidth = exchange_bandwidth(connections)? / f64::from(connections);
    Ok(Topology {
        ranks,
        ranks_per_node: ranks,
        memory_bandwidth_bytes_per_second: memory_bandwidth(cores) / f64::from(ranks),
        intra_node_bandwidth_bytes_per_second: exchange_bandwidth,
        inter_node_bandwidth_bytes_per_second: exchange_bandwidth,
        hardware: Some(hardware_name((cores / ranks as usize).max(1))),
        ..Topology::h100(1, memory_bytes)?
    })
}

/// Returns the bytes per second that all cores together read.
fn memory_bandwidth(cores: usize) -> f64 {
    let buffers: Vec<Vec<u64>> = (0..cores).map(|_| vec![1; WORDS]).collect();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for buffer in &buffers {
            scope.spawn(move || {
                for _ in 0..PASSES {
                    black_box(buffer.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
                }
            });
        }
    });
    per_second(cores * PASSES * WORDS * size_of::<u64>(), started)
}

/// Returns the bytes per second that all connections together send.
fn exchange_bandwidth(connections: u32) -> io::Result<f64> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    let started = Instant::now();
    std::thread::scope(|scope| -> io::Result<()> {
        let mut ends: Vec<ScopedJoinHandle<'_, io::Result<()>>> =
            (0..connections).map(|_| scope.spawn(move || send(address))).collect();
        for _ in 0..connections {
            let (stream, _) = listener.accept()?;
            ends.push(scope.spawn(move || receive(stream)));
        }
        ends.into_iter().try_for_each(|end| {
            end.join().unwrap_or_else(|_| Err(io::Error::other("a thread that exchanged messages panicked")))
        })
    })?;
    Ok(per_second(connections as usize * MESSAGES * MESSAGE, started))
}

fn send(address: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect(address)?;
    let message = vec![0; MESSAGE];
    (0..MESSAGES).try_for_each(|_| stream.write_all(&message))
}

/// Reads until the other end closes the connection.
fn receive(mut stream: TcpStream) -> io::Result<()> {
    let mut message = vec![0; MESSAGE];
    while stream.read(&mut message)? > 0 {}
    Ok(())
}

fn per_second(bytes: usize, started: Instant) -> f64 {
    bytes as f64 / started.elapsed().as_secs_f64().max(1e-9)
}
