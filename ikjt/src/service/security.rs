//! The credentials of a client: certificates and a token.

use std::env;
use std::error::Error as _;
use std::path::PathBuf;

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

use super::certificate::{not_valid_now, period};
use super::protocol::{PROTOCOL, PROTOCOL_KEY};
use crate::error::{Error, Result};

/// The environment variables with a client's credentials.
const AUTHORITY: &str = "ONEFOLD_TLS_AUTHORITY";
const CERTIFICATE: &str = "ONEFOLD_TLS_CERTIFICATE";
const KEY: &str = "ONEFOLD_TLS_KEY";
const TOKEN: &str = "ONEFOLD_TOKEN";

/// The credentials that a client of a service sends, and the certificate authority that it accepts. They come from
/// the environment, like the credentials of object stores.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Security {
    /// The certificate of the authority that signed the servers' certificates (PEM).
    pub authority: Option<Vec<u8>>,
    /// This process's certificate and private key (PEM), if servers require a client certificate.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The token that authorizes the client to read.
    pub token: Option<String>,
}

impl Security {
    /// Reads the credentials from the environment. The variables `ONEFOLD_TLS_AUTHORITY`, `ONEFOLD_TLS_CERTIFICATE`
    /// and `ONEFOLD_TLS_KEY` name PEM files; `ONEFOLD_TOKEN` is the token.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] for a file that cannot be read, [`Error::Fault`] if only one of the certificate and the key is
    /// given, and for files that [`check`](Self::check) refuses.
    pub fn of_environment() -> Result<Self> {
        let file = |name: &str| env::var_os(name).map(|path| fs_err::read(PathBuf::from(path))).transpose();
        let identity = match (file(CERTIFICATE)?, file(KEY)?) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => {
                return Err(Error::options(
                    format!("only one of `{CERTIFICATE}` and `{KEY}` is set"),
                    "set both to PEM files, or none",
                ));
            }
        };
        let security = Self { authority: file(AUTHORITY)?, identity, token: env::var(TOKEN).ok() };
        let names = [CERTIFICATE, KEY, AUTHORITY].map(|name| format!("of `{name}`"));
        security.check(&names).map_err(|message| {
            let hint =
                format!("set `{CERTIFICATE}`, `{KEY}` and `{AUTHORITY}` to PEM files that are valid now");
            Error::options(message, hint)
        })?;
        Ok(security)
    }

    /// Checks that connections can use the certificate, its key and the authority's certificate, which have these
    /// names in messages.
    ///
    /// # Errors
    ///
    /// The reason, for a file without a certificate, for a certificate that is not valid now, and for the key of
    /// another certificate.
    pub fn check(&self, [certificate, key, authority]: &[String; 3]) -> Result<(), String> {
        let no_certificate = |name: &str| format!("the file {name} contains no certificate in PEM");
        if self.authority.as_ref().is_some_and(|pem| period(pem).is_none()) {
            return Err(no_certificate(authority));
        }
        let Some((pem, _)) = &self.identity else { return Ok(()) };
        let period = period(pem).ok_or_else(|| no_certificate(certificate))?;
        if let Some(why) = not_valid_now(period) {
            return Err(format!("the certificate {certificate} {why}"));
        }
        // TLS compares the certificate with the key when it is configured.
        let configured = Endpoint::from_static("https://localhost").tls_config(self.tls());
        configured.map(drop).map_err(|error| {
            let cause = error.source().map(ToString::to_string).unwrap_or_default();
            format!("the certificate {certificate} and the key {key} cannot be used together: {cause}")
        })
    }

    /// Returns the TLS configuration of connections.
    pub(super) fn tls(&self) -> ClientTlsConfig {
        let mut tls = ClientTlsConfig::new();
        if let Some(authority) = &self.authority {
            tls = tls.ca_certificate(Certificate::from_pem(authority));
        }
        if let Some((certificate, key)) = &self.identity {
            tls = tls.identity(Identity::from_pem(certificate, key));
        }
        tls
    }

    /// Returns the headers of every request.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a token with characters other than visible ASCII.
    pub(super) fn credentials(&self) -> Result<Credentials> {
        let token = self.token.as_ref().map(|token| format!("Bearer {token}").parse()).transpose();
        let token = token.map_err(|_| {
            Error::options(
                format!("the token of `{TOKEN}` has other characters than visible ASCII"),
                "give the text of the service's token file, without line breaks",
            )
        })?;
        Ok(Credentials { token })
    }
}

/// The headers of a client's requests: the version of its messages, and its token.
#[derive(Debug, Clone)]
pub struct Credentials {
    token: Option<MetadataValue<Ascii>>,
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(PROTOCOL_KEY, MetadataValue::from_static(PROTOCOL));
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}
