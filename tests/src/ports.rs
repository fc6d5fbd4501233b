//! Ports for servers that tests start as processes.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// The first port that is used, and the number of ports. All of them are below the ports that Linux assigns for
/// `connect` and for `bind` with port 0 (from 32768), so no other process gets a port between its check and its use.
const FIRST: u32 = 12_000;
const COUNT: u32 = 20_000;
/// The distance between the first ports of processes with consecutive ids.
const STRIDE: u32 = 199;

/// The number of ports that this process has tried.
static TRIED: AtomicU32 = AtomicU32::new(0);

/// Returns a port of 127.0.0.1 on which nothing listens, for a server that cannot report its port. Until the server
/// uses it, neither another call in this process returns it nor does the system assign it to another process.
///
/// # Panics
///
/// If all ports are in use.
pub fn free_port() -> u16 {
    // Test programs that run at the same time start at different ports.
    let start = std::process::id() % COUNT * STRIDE;
    for _ in 0..COUNT {
        let tried = TRIED.fetch_add(1, Ordering::Relaxed) % COUNT;
        let port = u16::try_from(FIRST + (start + tried) % COUNT).expect("a port");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port from {FIRST} to {} is free", FIRST + COUNT - 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_given_once_and_can_be_listened_at() {
        let ports = [(); 20].map(|()| free_port());
        for (index, port) in ports.iter().enumerate() {
            assert!(!ports[..index].contains(port), "{ports:?}");
            assert!((12_000..32_000).contains(port), "{port}");
        }
        TcpListener::bind(("127.0.0.1", ports[0])).unwrap();
    }
}
