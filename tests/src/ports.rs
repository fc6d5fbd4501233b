//! Ports for servers that tests start as processes.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// The first port that is given, and how many there are. All lie below those that Linux gives to `connect` and to
/// `bind` with port 0 (from 32768 on), so that no other process gets one between the test of the port and its use.
const FIRST: u32 = 12_000;
const COUNT: u32 = 20_000;
/// How far apart the first ports of processes with successive ids are.
const STRIDE: u32 = 199;

/// The ports that this process has tried.
static TRIED: AtomicU32 = AtomicU32::new(0);

/// A port of 127.0.0.1 at which nothing listens, for a server that cannot say which port it got. It is free until the
/// server uses it: neither another call in this process gives it, nor does the system give it to another process.
///
/// # Panics
///
/// If all ports are in use.
pub fn free_port() -> u16 {
    // Test programs that run side by side begin at different ports.
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
