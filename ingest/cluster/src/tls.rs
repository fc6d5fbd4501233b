//! Mutual TLS: each process presents a certificate, and accepts only certificates that one authority signed.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use ballista_core::extension::EndpointOverrideFn;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity, ServerTlsConfig};

/// The files of a process's identity.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct TlsArguments {
    /// Certificate of this process (PEM); with it, all connections use mutual TLS
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_authority"])]
    tls_certificate: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Certificate of the authority that signed those of all processes (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,
}

/// The certificate that a process presents, and the authority whose certificates it accepts.
#[derive(Debug, Clone)]
pub(crate) struct Tls {
    identity: Identity,
    authority: Certificate,
}

impl TlsArguments {
    /// Loads the files; returns `None` if the options name none.
    pub(crate) fn load(&self) -> anyhow::Result<Option<Tls>> {
        let (Some(certificate), Some(key), Some(authority)) =
            (&self.tls_certificate, &self.tls_key, &self.tls_authority)
        else {
            return Ok(None);
        };
        let read =
            |path: &PathBuf| fs_err::read(path).context("the files of `--tls-…` must be readable PEM files");
        Ok(Some(Tls {
            identity: Identity::from_pem(read(certificate)?, read(key)?),
            authority: Certificate::from_pem(read(authority)?),
        }))
    }
}

impl Tls {
    /// Returns the TLS configuration of a server.
    pub(crate) fn server(&self) -> ServerTlsConfig {
        // Where several cryptographic libraries are compiled (the feature `delta` of the ETL adds one), servers need a
        // choice. The choice fails only if it was made before.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        ServerTlsConfig::new().identity(self.identity.clone()).client_ca_root(self.authority.clone())
    }

    /// Returns the TLS configuration of a client.
    fn client(&self) -> ClientTlsConfig {
        ClientTlsConfig::new().identity(self.identity.clone()).ca_certificate(self.authority.clone())
    }

    /// Returns the function that Ballista applies to each connection that it opens.
    pub(crate) fn endpoints(&self) -> EndpointOverrideFn {
        let client = self.client();
        Arc::new(move |endpoint: Endpoint| {
            let url = endpoint.uri().to_string().replacen("http://", "https://", 1);
            // The scheme of the URL decides whether TLS is used, so a new endpoint is made.
            let secure = Endpoint::from_shared(url)?;
            Ok(secure.tls_config(client.clone())?.tcp_nodelay(true))
        })
    }
}
