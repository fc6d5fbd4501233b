//! Addresses of processes that listen on a port.

use std::fmt;
use std::net::Ipv6Addr;
use std::str::FromStr;

use serde::Serialize;

/// The address of a process: `HOST:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// A host name, an IPv4 address, or an IPv6 address in brackets.
    pub host: String,
    /// The port, from 1.
    pub port: u16,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXAMPLE: &str = "write `HOST:PORT`, as `10.0.0.1:7070` or `[fd00::1]:7070`";
        // The last colon of an IPv6 address without a port is within its brackets.
        let split = text.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
        let (host, port) = split.ok_or_else(|| format!("the host has no port; {EXAMPLE}"))?;
        let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) => host.parse::<Ipv6Addr>().is_ok(),
            None => !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || ":/@[]?#".contains(c)),
        };
        if !is_host {
            return Err(format!("`{host}` is not the name or address of a host; {EXAMPLE}"));
        }
        match port.parse() {
            Ok(port) if port > 0 => Ok(Self { host: host.to_owned(), port }),
            _ => Err(format!("`{port}` is not a port from 1 to 65535; {EXAMPLE}")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The output of `--json` of a process that has begun to listen.
#[derive(Debug, Serialize)]
pub struct Listening {
    /// Its address: `HOST:PORT`.
    pub address: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for (text, host, port) in
            [("10.0.0.1:50050", "10.0.0.1", 50050), ("master_1.local:1", "master_1.local", 1)]
        {
            assert_eq!(text.parse(), Ok(Address { host: host.to_owned(), port }));
        }
        let address: Address = "[::1]:7070".parse().unwrap();
        assert_eq!((address.host.as_str(), address.to_string().as_str()), ("[::1]", "[::1]:7070"));
        for (wrong, message) in [
            ("10.0.0.1", "has no port"),
            ("[::1]", "has no port"),
            ("::1:7070", "`::1` is not the name"),
            (":7070", "`` is not the name"),
            ("[host]:7070", "`[host]` is not the name"),
            ("http://10.0.0.1:7070", "`http://10.0.0.1` is not the name"),
            ("http://host", "`//host` is not a port"),
            ("10.0.0.1:x", "`x` is not a port"),
            ("10.0.0.1:0", "`0` is not a port"),
            ("a:70000", "`70000` is not a port"),
        ] {
            let error = wrong.parse::<Address>().unwrap_err();
            assert!(error.contains(message), "{wrong}: {error}");
        }
    }
}
