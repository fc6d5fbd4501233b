//! URLs of datasets that a service reads.

use std::path::Path;

use onefold_base::address::Address;

use crate::error::{Error, Result};

/// The schemes of services, and whether they use TLS.
const SCHEMES: [(&str, bool); 2] = [("grpc://", false), ("grpcs://", true)];

/// The address of a dataset that a service reads: `grpc://HOST:PORT/DATASET`. DATASET is a location from the view of
/// the workers, or a name that the master knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceAddress {
    /// `HOST:PORT` of the master.
    pub master: String,
    /// Whether connections use TLS, which the scheme `grpcs` selects.
    pub secure: bool,
    /// The part after `HOST:PORT/`.
    pub dataset: String,
    /// Whether batches are compressed for the transfer, which `?compression=zstd` after the dataset selects.
    pub compressed: bool,
}

impl ServiceAddress {
    /// Parses a location. Returns `None` if it is not the URL of a service.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the host, the port or the dataset is missing.
    pub fn parse(location: &Path) -> Result<Option<Self>> {
        let Some(text) = location.to_str() else { return Ok(None) };
        let Some((rest, secure)) =
            SCHEMES.iter().find_map(|(scheme, secure)| Some((text.strip_prefix(scheme)?, *secure)))
        else {
            return Ok(None);
        };
        let wrong = |message: &str| {
            Error::options(
                format!("`{text}` is not a dataset of a preprocessing service: {message}"),
                "write `grpc://HOST:PORT/DATASET`, as `grpc://reader:7070/s3://bucket/folder`, or with two slashes \
                 before the path of a local dataset",
            )
        };
        let (master, dataset) = rest.split_once('/').unwrap_or((rest, ""));
        master.parse::<Address>().map_err(|message| wrong(&message))?;
        let (dataset, options) = dataset.split_once('?').unwrap_or((dataset, ""));
        let mut compressed = false;
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option {
                "compression=zstd" => compressed = true,
                "compression=none" => compressed = false,
                _ => {
                    return Err(wrong(&format!("it knows no option `{option}`, only `compression=zstd`")));
                }
            }
        }
        if dataset.is_empty() {
            return Err(wrong("it names no dataset"));
        }
        Ok(Some(Self { master: master.to_owned(), secure, dataset: dataset.to_owned(), compressed }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_distinguished_from_other_locations() {
        let parse = |text: &str| ServiceAddress::parse(Path::new(text));
        let address = |master: &str, secure, dataset: &str| {
            let (master, dataset) = (master.to_owned(), dataset.to_owned());
            Some(ServiceAddress { master, secure, dataset, compressed: false })
        };
        assert_eq!(parse("data/set").unwrap(), None);
        assert_eq!(parse("s3://bucket/folder").unwrap(), None);
        assert_eq!(parse("grpc://host:1/s3://b/f").unwrap(), address("host:1", false, "s3://b/f"));
        assert_eq!(parse("grpcs://[::1]:7070/clicks").unwrap(), address("[::1]:7070", true, "clicks"));
        assert_eq!(parse("grpc://host:1//data/set").unwrap(), address("host:1", false, "/data/set"));
        let compressed = parse("grpc://host:1/s3://b/f?compression=zstd").unwrap().unwrap();
        assert_eq!((compressed.dataset.as_str(), compressed.compressed), ("s3://b/f", true));
        let plain = parse("grpc://host:1/clicks?compression=zstd&compression=none").unwrap().unwrap();
        assert_eq!((plain.dataset.as_str(), plain.compressed), ("clicks", false));
        for (wrong, message) in [
            ("grpc://host/clicks", "no port"),
            ("grpc://:1/clicks", "not the name or address of a host"),
            ("grpc://host:0/clicks", "`0` is not a port"),
            ("grpc://host:1", "no dataset"),
            ("grpc://host:1/", "no dataset"),
            ("grpc://host:1/?compression=zstd", "no dataset"),
            ("grpc://host:1/clicks?join", "no option `join`"),
            ("grpc://host:1/clicks?compression=snappy", "no option `compression=snappy`"),
        ] {
            assert!(parse(wrong).unwrap_err().to_string().contains(message), "{wrong}");
        }
    }
}
