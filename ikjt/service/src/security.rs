//! What a process shows, and whom it answers.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::{Context, bail};
use onefold_base::fault::{Fault, Kind};
use onefold_ikjt::service::Security;
use onefold_ikjt::service::protocol::{VERSION, VERSION_KEY};
use tonic::service::Interceptor;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};
use tonic::{Request, Status};

/// The files that a process proves itself with, and knows others by.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SecurityArguments {
    /// Certificate of this process (PEM); with it, all connections use TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Certificate of the authority that signed those of the service's processes and clients (PEM): whoever has none is
    /// refused
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,
    /// File with a token: whoever does not send it is refused
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// What a process proves itself with, and knows others by.
#[derive(Debug, Clone)]
pub(crate) struct Proof {
    /// What it shows as a client.
    pub(crate) security: Security,
    /// Whether connections use TLS.
    pub(crate) secure: bool,
}

impl SecurityArguments {
    /// The same for another process, as arguments.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let files = [
            ("--tls-certificate", &self.tls_certificate),
            ("--tls-key", &self.tls_key),
            ("--tls-authority", &self.tls_authority),
            ("--token-file", &self.token_file),
        ];
        let given =
            files.into_iter().filter_map(|(flag, file)| Some([flag.into(), file.clone()?.into_os_string()]));
        given.flatten().collect()
    }

    /// Reads the files.
    pub(crate) fn load(&self) -> anyhow::Result<Proof> {
        let read =
            |path: &PathBuf| fs_err::read(path).context("the files of `--tls-…` must be readable PEM files");
        let identity = match (&self.tls_certificate, &self.tls_key) {
            (Some(certificate), Some(key)) => Some((read(certificate)?, read(key)?)),
            _ => None,
        };
        let token = match &self.token_file {
            None => None,
            Some(path) => {
                let token = fs_err::read_to_string(path)?.trim().to_owned();
                if token.is_empty() {
                    let message = format!("the token file `{}` is empty", path.display());
                    bail!(Fault::new(Kind::Options, message).hint("write a long random text into it"));
                }
                Some(token)
            }
        };
        let authority = self.tls_authority.as_ref().map(read).transpose()?;
        Ok(Proof { secure: identity.is_some(), security: Security { authority, identity, token } })
    }
}

impl Proof {
    /// How a server encrypts connections; `None` if it does not.
    pub(crate) fn server_tls(&self) -> Option<ServerTlsConfig> {
        let (certificate, key) = self.security.identity.as_ref()?;
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
        Some(match &self.security.authority {
            Some(authority) => tls.client_ca_root(Certificate::from_pem(authority)),
            None => tls,
        })
    }

    /// Whom a server answers.
    pub(crate) fn guard(&self) -> Guard {
        Guard { token: self.security.token.as_ref().map(|token| format!("Bearer {token}").into()) }
    }
}

/// Refuses senders of another version, and those without the token.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    token: Option<std::sync::Arc<str>>,
}

impl Guard {
    /// Whether somebody who sends this is answered.
    pub(crate) fn admits(&self, authorization: Option<&str>) -> bool {
        self.token.as_ref().is_none_or(|token| {
            authorization.is_some_and(|found| is_same(found.as_bytes(), token.as_bytes()))
        })
    }
}

impl Interceptor for Guard {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let text = |key| request.metadata().get(key).and_then(|value| value.to_str().ok());
        if !self.admits(text("authorization")) {
            let message = "the token is missing or unknown\n  hint: set `ONEFOLD_TOKEN` to the text of the service's \
                           token file, or give `--token-file`";
            return Err(Status::unauthenticated(message));
        }
        match text(VERSION_KEY) {
            Some(version) if version == VERSION => Ok(request),
            version => {
                let message = format!(
                    "the preprocessing service is Onefold {VERSION}, this program is {}\n  hint: install the same \
                     version everywhere",
                    version.map_or("another one".to_owned(), |version| format!("Onefold {version}"))
                );
                Err(Status::failed_precondition(message))
            }
        }
    }
}

/// Equality in a time that does not depend on where texts differ.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_version_with_the_token_passes() {
        let call = |guard: &Guard, version: Option<&'static str>, token: Option<&'static str>| {
            let mut request = Request::new(());
            let mut insert = |key, value: Option<&'static str>| {
                value.map(|value| request.metadata_mut().insert(key, value.parse().unwrap()))
            };
            insert(VERSION_KEY, version);
            insert("authorization", token);
            guard.clone().call(request).map(|_| ()).map_err(|status| status.message().to_owned())
        };
        let open = Guard { token: None };
        assert_eq!(call(&open, Some(VERSION), None), Ok(()));
        assert!(call(&open, Some("0.0.9"), None).unwrap_err().contains("this program is Onefold 0.0.9"));
        assert!(call(&open, None, None).unwrap_err().contains("install the same version"));
        let closed = Guard { token: Some("Bearer secret".into()) };
        assert_eq!(call(&closed, Some(VERSION), Some("Bearer secret")), Ok(()));
        for wrong in [None, Some("Bearer secres"), Some("Bearer"), Some("secret")] {
            assert!(call(&closed, Some(VERSION), wrong).unwrap_err().contains("ONEFOLD_TOKEN"), "{wrong:?}");
        }
    }
}
