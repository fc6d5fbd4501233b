//! Network connections to the processes of a service.

use std::collections::HashMap;
use std::error::Error as _;
use std::sync::Mutex;
use std::time::Duration;

use arrow_flight::flight_service_client::FlightServiceClient;
use arrow_flight::{Action, FlightData, Ticket as FlightTicket};
use onefold_base::fault::{Fault, Kind};
use onefold_base::sync::locked;
use onefold_storage::runtime;
use tonic::codec::CompressionEncoding;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Status, Streaming};

use super::protocol::{MOST_MESSAGE_BYTES, OF_WORKER, Question, Ticket, UNKNOWN_TOKEN};
use super::security::{Credentials, Security};
use crate::error::{Error, Result};

/// The time limit for establishing a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// The interval and the time limit of keep-alive pings. They detect a host that is gone or a process that was
/// stopped.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The time limit of a question. Reading a snapshot takes longest.
const QUESTION: Duration = Duration::from_secs(120);

/// The flow-control window of one block in bytes. A worker may send this much before the client reads it, so that a
/// batch does not wait for the acknowledgment of the previous one.
pub(super) const BLOCK_WINDOW: u32 = 4 << 20;

/// The flow-control window of all blocks of a connection in bytes, the maximum of gRPC. The client reads blocks in
/// order, so later blocks must never use up the window that the first one needs.
const CONNECTION_WINDOW: u32 = i32::MAX as u32;

/// The size of HTTP/2 frames in bytes. The default of 16 KiB took twice the processor time of everything else.
const FRAME_BYTES: u32 = 1 << 20;

/// The maximal size of a message besides its batch, in bytes.
const HEADER_BYTES: usize = 64 << 20;

/// Usual causes of a failed TLS connection.
pub(super) const TLS_HINT: &str = "each side must have a valid certificate that an authority of the other side signed: \
    a client's files are named by `ONEFOLD_TLS_AUTHORITY`, `ONEFOLD_TLS_CERTIFICATE` and `ONEFOLD_TLS_KEY`, those of a \
    process of the service by `--tls-authority`, `--tls-certificate` and `--tls-key`";

/// Parts of the messages of connections that fail in the same way every time, with the remedies.
const REFUSED: [(&str, &str); 4] = [
    ("certificate", TLS_HINT),
    ("received fatal alert", TLS_HINT),
    // The answer of a process without TLS to one with TLS.
    (
        "received corrupt message",
        "the other process does not use TLS: write `grpc://` in place of `grpcs://`, or give all processes of the \
         service `--tls-certificate`",
    ),
    // The answer of a process with TLS to one without.
    (
        "frame with invalid size",
        "the other process uses TLS (write `grpcs://` in place of `grpc://`, or give a process of the service \
         `--tls-certificate`), or it is not a process of a preprocessing service",
    ),
];

type Client = FlightServiceClient<InterceptedService<Channel, Credentials>>;

/// The reason why a request failed.
#[derive(Debug)]
pub enum Failure {
    /// An error that would occur again.
    Final(Error),
    /// An error that may not occur later or with another worker.
    Passing(Fault),
    /// The worker does not know the job, because it was restarted or has evicted the job.
    UnknownJob,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let message = describe(&status);
        // Only a local failure has a source; a status that a process sent has none.
        let is_of_connection = status.source().is_some();
        let refused = REFUSED.iter().find(|(part, _)| is_of_connection && message.contains(part));
        if let Some((_, hint)) = refused {
            let message = format!("cannot connect to the preprocessing service: {message}");
            return Self::Final(Error::Fault(Fault::new(Kind::Options, message).hint(*hint)));
        }
        // A process of the service sends a fault in the details of the status; a failed connection has no details.
        let fault = |kind| {
            let sent = serde_json::from_slice(status.details()).ok();
            sent.unwrap_or_else(|| Fault::new(kind, message))
        };
        match status.code() {
            Code::NotFound => Self::UnknownJob,
            Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::Unauthenticated
            | Code::PermissionDenied
            | Code::Unimplemented
            | Code::OutOfRange => Self::Final(Error::Fault(fault(Kind::Options))),
            Code::DataLoss => Self::Final(Error::Fault(fault(Kind::Data))),
            _ => Self::Passing(fault(Kind::Storage)),
        }
    }
}

impl Failure {
    /// Adds the worker's name to a failure of its storage, memory, token or certificate, because the worker's operator
    /// must act.
    pub(super) fn of_worker(self, worker: &str) -> Self {
        let is_of_worker = |fault: &Fault| {
            let text = fault.to_string();
            let mut parts = REFUSED.iter().map(|(_, hint)| *hint).chain([UNKNOWN_TOKEN, OF_WORKER]);
            fault.kind == Kind::Storage || parts.any(|part| text.contains(part))
        };
        let named = |fault: Fault| match is_of_worker(&fault) {
            true => fault.within(&format!("the worker `{worker}`")),
            false => fault,
        };
        match self {
            Self::Final(Error::Fault(fault)) => Self::Final(Error::Fault(named(fault))),
            Self::Passing(fault) => Self::Passing(named(fault)),
            other => other,
        }
    }
}

/// Returns the message of a status with its causes, which explain failed connections.
fn describe(status: &Status) -> String {
    let mut message = status.message().to_owned();
    let mut source = status.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !message.contains(&text) {
            message = if message.is_empty() { text } else { format!("{message}: {text}") };
        }
        source = error.source();
    }
    message
}

/// Connections to processes, by address.
#[derive(Debug)]
pub struct Network {
    credentials: Credentials,
    tls: Option<ClientTlsConfig>,
    compressed: bool,
    channels: Mutex<HashMap<String, Channel>>,
}

impl Network {
    /// Creates a network without connections. `secure` says whether connections use TLS.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] for a token that cannot be sent.
    pub fn new(security: &Security, secure: bool) -> Result<Self> {
        let tls = secure.then(|| security.tls());
        Ok(Self { credentials: security.credentials()?, tls, compressed: false, channels: Mutex::default() })
    }

    /// Sets whether messages to this process are compressed with zstd. Compression of ids saves time if the network
    /// is slow.
    pub fn compressed(self, compressed: bool) -> Self {
        Self { compressed, ..self }
    }

    /// Returns a client of the process at `host`.
    fn client(&self, host: &str) -> Result<Client> {
        let mut channels = locked(&self.channels);
        let channel = match channels.get(host) {
            Some(channel) => channel.clone(),
            None => {
                let channel = self.channel(host)?;
                channels.insert(host.to_owned(), channel.clone());
                channel
            }
        };
        let service = InterceptedService::new(channel, self.credentials.clone());
        let client =
            FlightServiceClient::new(service).max_decoding_message_size(MOST_MESSAGE_BYTES + HEADER_BYTES);
        Ok(if self.compressed { client.accept_compressed(CompressionEncoding::Zstd) } else { client })
    }

    /// Creates a connection, which is established on first use and re-established after a failure.
    fn channel(&self, host: &str) -> Result<Channel> {
        let wrong = |error: tonic::transport::Error| {
            let message = match error.source() {
                Some(source) => format!("`{host}`: {error}: {source}"),
                None => format!("`{host}`: {error}"),
            };
            Error::Fault(Fault::new(Kind::Options, message))
        };
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let mut endpoint = Endpoint::from_shared(format!("{scheme}://{host}")).map_err(wrong)?;
        if let Some(tls) = &self.tls {
            endpoint = endpoint.tls_config(tls.clone()).map_err(wrong)?;
        }
        let endpoint = endpoint
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .keep_alive_while_idle(true)
            .max_frame_size(FRAME_BYTES)
            .initial_stream_window_size(BLOCK_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        // Hyper starts tasks on the current runtime.
        let _entered = runtime::handle()?.enter();
        Ok(endpoint.connect_lazy())
    }

    /// Asks the process at `host`, which is `HOST:PORT`.
    ///
    /// # Errors
    ///
    /// A [`Failure`] of the connection or of the process.
    pub async fn ask<Q: Question>(&self, host: &str, question: &Q) -> Result<Q::Answer, Failure> {
        let body = serde_json::to_vec(question).map_err(|error| malformed("a question", &error))?;
        let action = Action::new(Q::ACTION, body);
        let mut client = self.client(host).map_err(Failure::Final)?;
        let asked = async {
            let mut answers = client.do_action(action).await?.into_inner();
            let mut answer = Vec::new();
            while let Some(part) = answers.message().await? {
                answer.extend_from_slice(&part.body);
            }
            Ok::<_, Status>(answer)
        };
        let answer = tokio::time::timeout(QUESTION, asked).await;
        let silent = |_| Failure::Passing(Fault::new(Kind::Storage, format!("`{host}` does not answer")));
        let answer = answer.map_err(silent)??;
        serde_json::from_slice(&answer).map_err(|error| malformed("an answer", &error))
    }

    /// Requests the batches of a ticket from the worker at `host`.
    pub(super) async fn get(&self, host: &str, ticket: &Ticket) -> Result<Streaming<FlightData>, Failure> {
        let body = serde_json::to_vec(ticket).map_err(|error| malformed("a ticket", &error))?;
        let ticket = FlightTicket { ticket: body.into() };
        let answer = self.client(host).map_err(Failure::Final)?.do_get(ticket).await;
        Ok(answer?.into_inner())
    }
}

/// Returns the failure for a message that does not have the expected format.
pub(super) fn malformed(what: &str, error: &dyn std::fmt::Display) -> Failure {
    let message = format!("{what} of the preprocessing service cannot be read: {error}");
    Failure::Final(Error::Fault(Fault::new(Kind::Data, message)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_connections_fail_for_their_certificates() {
        let sent = Status::unavailable("`s3://certificates/clicks`: it does not answer");
        assert!(matches!(Failure::from(sent), Failure::Passing(_)));
        let mut connection = Status::unavailable("transport error");
        connection
            .set_source(std::sync::Arc::new(std::io::Error::other("invalid peer certificate: Expired")));
        match Failure::from(connection).of_worker("10.0.0.2:7071") {
            Failure::Final(error) => {
                let text = error.to_string();
                assert!(text.starts_with("the worker `10.0.0.2:7071`: cannot connect"), "{text}");
                assert!(text.contains("Expired") && text.contains("ONEFOLD_TLS_AUTHORITY"), "{text}");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_side_without_tls_is_reported() {
        for (message, remedy) in [
            ("received corrupt message of type InvalidContentType", "does not use TLS: write `grpc://`"),
            ("connection error detected: frame with invalid size", "uses TLS (write `grpcs://`"),
        ] {
            let mut connection = Status::unavailable("transport error");
            connection.set_source(std::sync::Arc::new(std::io::Error::other(message)));
            match Failure::from(connection) {
                Failure::Final(error) => assert!(error.to_string().contains(remedy), "{error}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_worker_whose_operator_must_act_is_named() {
        let storage = Fault::new(Kind::Storage, "`s3://bucket/clicks` cannot be read: denied");
        let token = Fault::new(Kind::Options, UNKNOWN_TOKEN);
        let memory = Fault::new(Kind::Options, "no room").hint(format!("raise `--memory-limit` {OF_WORKER}"));
        let feature = Fault::new(Kind::Options, "the dataset has no sparse feature `a`");
        for (fault, is_named) in [(storage, true), (token, true), (memory, true), (feature, false)] {
            match Failure::Final(Error::Fault(fault)).of_worker("10.0.0.2:7071") {
                Failure::Final(error) => {
                    let text = error.to_string();
                    assert_eq!(text.starts_with("the worker `10.0.0.2:7071`: "), is_named, "{text}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
}
