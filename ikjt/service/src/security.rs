//! The credentials that a process uses, and the requests that it accepts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use onefold_base::fault::{Fault, Kind, option, text};
use onefold_ikjt::service::Security;
use onefold_ikjt::service::protocol::{PROTOCOL, PROTOCOL_KEY, UNKNOWN_TOKEN, VERSION};
use tonic::Status;
use tonic::metadata::MetadataMap;
use tonic::transport::{Certificate, Identity, ServerTlsConfig};

/// The interval of reloading the files of certificates and tokens.
const RELOAD: Duration = Duration::from_secs(2);

/// The files with a process's credentials, and with the credentials that it accepts.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SecurityArguments {
    /// Certificate of this process (PEM); with it, all connections use TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Certificate of the authority that signed the certificates of the service's processes and clients (PEM); clients
    /// without such a certificate are refused
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,
    /// File with the token of clients; clients without it are refused. A master with this option or `--tls-authority`
    /// also needs `--worker-token-file`
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// File with another token, for the service's own processes; only processes with it can be workers of the master,
    /// or drain workers
    #[arg(long, value_name = "FILE")]
    worker_token_file: Option<PathBuf>,
}

/// The credentials of a process, and the credentials that it accepts.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Proof {
    /// The certificates and token that a worker sends as a client of the master.
    pub(crate) security: Security,
    /// Whether connections use TLS.
    pub(crate) secure: bool,
    /// The token of clients.
    token: Option<String>,
    /// The token of the service's own processes.
    worker_token: Option<String>,
}

impl SecurityArguments {
    /// Returns the arguments that give another process the same files.
    pub(crate) fn to_arguments(&self) -> Vec<OsString> {
        let files = [
            ("--tls-certificate", &self.tls_certificate),
            ("--tls-key", &self.tls_key),
            ("--tls-authority", &self.tls_authority),
            ("--token-file", &self.token_file),
            ("--worker-token-file", &self.worker_token_file),
        ];
        let given =
            files.into_iter().filter_map(|(flag, file)| Some([flag.into(), file.clone()?.into_os_string()]));
        given.flatten().collect()
    }

    /// Reads the files.
    ///
    /// # Errors
    ///
    /// Fails for files that cannot be read or used, such as a certificate that is not valid now.
    pub(crate) fn load(&self) -> anyhow::Result<Proof> {
        let read =
            |path: &PathBuf| fs_err::read(path).context("the files of `--tls-…` must be readable PEM files");
        let identity = match (&self.tls_certificate, &self.tls_key) {
            (Some(certificate), Some(key)) => Some((read(certificate)?, read(key)?)),
            _ => None,
        };
        let token = self.token_file.as_deref().map(read_token).transpose()?;
        let worker_token = self.worker_token_file.as_deref().map(read_token).transpose()?;
        let authority = self.tls_authority.as_ref().map(read).transpose()?;
        let shown = worker_token.clone().or_else(|| token.clone());
        let security = Security { authority, identity, token: shown };
        let name = |path: &Option<PathBuf>| {
            path.as_ref().map_or_else(String::new, |path| format!("`{}` of this process", path.display()))
        };
        let names = [&self.tls_certificate, &self.tls_key, &self.tls_authority].map(name);
        if let Err(message) = security.check(&names) {
            let hint = "give others with `--tls-certificate`, `--tls-key` and `--tls-authority`; replaced files are \
                        taken up";
            bail!(Fault::new(Kind::Options, message).hint(hint));
        }
        Ok(Proof { secure: security.identity.is_some(), security, token, worker_token })
    }

    /// Waits until the files differ from `known` and can be used. Reports a problem that is found twice in a row, such
    /// as a certificate that has expired. The first time, the files may just be in the middle of a replacement.
    pub(crate) async fn changed(&self, known: &Proof) -> Proof {
        let (mut last, mut said) = (String::new(), String::new());
        loop {
            tokio::time::sleep(RELOAD).await;
            let problem = match self.load() {
                Ok(found) if found == *known => String::new(),
                Ok(found) => return found,
                Err(error) => format!("{error:#}"),
            };
            if problem == last && problem != said {
                said.clone_from(&problem);
                if !problem.is_empty() {
                    tracing::warn!("{problem}");
                }
            }
            last = problem;
        }
    }
}

/// Reads the token in a file.
fn read_token(path: &Path) -> anyhow::Result<String> {
    let token = fs_err::read_to_string(path)?.trim().to_owned();
    if token.is_empty() {
        let message = format!("the token file `{}` is empty", path.display());
        bail!(Fault::new(Kind::Options, message).hint("write a long random text into it"));
    }
    if !token.chars().all(|c| c == ' ' || c.is_ascii_graphic()) {
        let message = format!("the token in `{}` has other characters than visible ASCII", path.display());
        bail!(Fault::new(Kind::Options, message).hint("write a long random text of one line into it"));
    }
    Ok(token)
}

impl Proof {
    /// Returns the TLS configuration of a server, or `None` if it does not use TLS.
    pub(crate) fn server_tls(&self) -> Option<ServerTlsConfig> {
        let (certificate, key) = self.security.identity.as_ref()?;
        // Where several cryptographic libraries are compiled (the feature `delta` of the ETL adds one), servers need a
        // choice. The choice fails only if it was made before.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
        Some(match &self.security.authority {
            Some(authority) => tls.client_ca_root(Certificate::from_pem(authority)),
            None => tls,
        })
    }

    /// Checks that a master that authenticates its clients can tell them from workers.
    pub(crate) fn check_roles(&self) -> anyhow::Result<()> {
        let knows_clients = self.token.is_some() || self.security.authority.is_some();
        let option = option("worker_token_file");
        match &self.worker_token {
            None if knows_clients => {
                let message =
                    "every client of this master could become a worker, whose batches others train on";
                let hint = text!["give the service's own processes another token, with ", option];
                bail!(Fault::new(Kind::Options, message).hint(hint))
            }
            Some(_) if self.worker_token == self.token => {
                let message = "clients and the service's own processes have the same token";
                let hint = text!["write another long random text into the file of ", option];
                bail!(Fault::new(Kind::Options, message).hint(hint))
            }
            _ => Ok(()),
        }
    }

    /// Returns the guard that checks a server's requests.
    pub(crate) fn guard(&self) -> Guard {
        let header = |token: &Option<String>| token.as_ref().map(|token| format!("Bearer {token}").into());
        Guard { token: header(&self.token), worker_token: header(&self.worker_token) }
    }
}

/// The role of a request's sender, which its token determines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    /// A sender that reads datasets.
    Client,
    /// A process of the service, or its operator. It may also do everything that clients may do.
    Worker,
}

/// Rejects requests with another version of the messages, and requests without a valid token.
#[derive(Debug, Clone)]
pub(crate) struct Guard {
    token: Option<Arc<str>>,
    worker_token: Option<Arc<str>>,
}

impl Guard {
    /// Returns the role of a sender with this `authorization` header, or `None` if the request is rejected. If clients
    /// have no token, every other sender is a client. Without tokens every sender has both roles.
    pub(crate) fn role(&self, authorization: Option<&str>) -> Option<Role> {
        let has =
            |token: &str| authorization.is_some_and(|found| is_same(found.as_bytes(), token.as_bytes()));
        match (&self.token, &self.worker_token) {
            (Some(token), _) if has(token) => Some(Role::Client),
            (_, Some(token)) if has(token) => Some(Role::Worker),
            (Some(_), _) => None,
            (None, Some(_)) => Some(Role::Client),
            (None, None) => Some(Role::Worker),
        }
    }

    /// Returns the role of a request's sender.
    ///
    /// # Errors
    ///
    /// `Unauthenticated` without a valid token, `FailedPrecondition` for another version of the messages.
    pub(crate) fn admit(&self, metadata: &MetadataMap) -> Result<Role, Status> {
        let text = |key| metadata.get(key).and_then(|value| value.to_str().ok());
        let Some(role) = self.role(text("authorization")) else {
            let hint = "a client sets `ONEFOLD_TOKEN` to the text of the service's token file, a process of the service \
                        has `--worker-token-file`, or `--token-file` if there is no other token";
            return Err(Status::unauthenticated(format!("{UNKNOWN_TOKEN}\n  hint: {hint}")));
        };
        match text(PROTOCOL_KEY) {
            Some(PROTOCOL) => Ok(role),
            version => {
                let message = format!(
                    "the preprocessing service is Onefold {VERSION}, whose messages have version {PROTOCOL}, and those \
                     of this program have {}\n  hint: install the same version everywhere",
                    version.map_or("another one".to_owned(), |version| format!("version {version}"))
                );
                Err(Status::failed_precondition(message))
            }
        }
    }
}

impl Role {
    /// Returns an error for an action of workers if the sender is a client.
    pub(crate) fn check_worker(self, action: &str) -> Result<(), Status> {
        match self {
            Self::Worker => Ok(()),
            Self::Client => Err(Status::permission_denied(format!(
                "the token of clients does not allow `{action}`\n  hint: give the file of the workers' token with \
                 `--worker-token-file`"
            ))),
        }
    }
}

/// Compares two texts in a time that does not depend on where they differ.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(
        guard: &Guard,
        version: Option<&'static str>,
        token: Option<&'static str>,
    ) -> Result<Role, String> {
        let mut metadata = MetadataMap::new();
        let mut insert = |key: &'static str, value: Option<&'static str>| {
            value.map(|value| metadata.insert(key, value.parse().unwrap()))
        };
        insert(PROTOCOL_KEY, version);
        insert("authorization", token);
        guard.admit(&metadata).map_err(|status| status.message().to_owned())
    }

    #[test]
    fn only_the_same_messages_with_the_token_pass() {
        let open = Guard { token: None, worker_token: None };
        assert_eq!(admit(&open, Some(PROTOCOL), None), Ok(Role::Worker));
        assert!(admit(&open, Some("0"), None).unwrap_err().contains("of this program have version 0"));
        assert!(admit(&open, None, None).unwrap_err().contains("install the same version"));
        let closed = Guard { token: Some("Bearer secret".into()), worker_token: None };
        assert_eq!(admit(&closed, Some(PROTOCOL), Some("Bearer secret")), Ok(Role::Client));
        for wrong in [None, Some("Bearer secres"), Some("Bearer"), Some("secret")] {
            assert!(
                admit(&closed, Some(PROTOCOL), wrong).unwrap_err().contains("ONEFOLD_TOKEN"),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn the_client_token_does_not_admit_workers() {
        let both = Guard { token: Some("Bearer read".into()), worker_token: Some("Bearer work".into()) };
        assert_eq!(admit(&both, Some(PROTOCOL), Some("Bearer read")), Ok(Role::Client));
        assert_eq!(admit(&both, Some(PROTOCOL), Some("Bearer work")), Ok(Role::Worker));
        assert!(admit(&both, Some(PROTOCOL), None).is_err());
        let workers = Guard { token: None, worker_token: Some("Bearer work".into()) };
        assert_eq!(admit(&workers, Some(PROTOCOL), None), Ok(Role::Client));
        let refused = Role::Client.check_worker("heartbeat").unwrap_err();
        assert!(refused.message().contains("`--worker-token-file`"), "{refused}");
        assert!(Role::Worker.check_worker("heartbeat").is_ok());
    }
}
