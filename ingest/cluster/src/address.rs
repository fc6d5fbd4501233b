//! Addresses of processes.

use std::fmt;
use std::str::FromStr;

/// A host name or address, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, port) = text.rsplit_once(':').ok_or("write a host and a port, as `10.0.0.1:50050`")?;
        let port = port.parse().map_err(|_| format!("`{port}` is not a port"))?;
        if host.is_empty() || host.contains('/') {
            return Err(format!("`{host}` is not the name or address of a host"));
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The object that `--json` prints once a process listens.
#[derive(serde::Serialize)]
pub(crate) struct Listening {
    pub(crate) address: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        let address = Address { host: "10.0.0.1".to_owned(), port: 50050 };
        assert_eq!("10.0.0.1:50050".parse(), Ok(address));
        for wrong in ["10.0.0.1", ":50050", "10.0.0.1:x", "http://10.0.0.1:50050", "a:70000"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}
