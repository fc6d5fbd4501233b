//! The backend that executes the requests of a server: `s3s-fs` with a directory, or another server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;

use futures::{Stream, StreamExt, stream};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{ETAG, HeaderName, IF_MATCH, IF_NONE_MATCH};
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::TokioIo;
use s3s::service::S3Service;
use tokio::net::TcpStream;

use super::answer::{Answer, Broken, broken, file_body, object_file, refusal};

pub(super) enum Backend {
    /// Objects are files in a directory.
    Folder(Box<Folder>),
    /// Another server, to which requests are forwarded unchanged.
    Other(SocketAddr),
}

pub(super) struct Folder {
    pub(super) service: S3Service,
    pub(super) path: PathBuf,
    /// Held while a conditional write is executed, because `s3s-fs` checks and writes in two steps.
    pub(super) conditional_writes: tokio::sync::Mutex<()>,
}

impl Backend {
    /// Returns the answer to a request.
    pub(super) async fn execute(&self, request: Request<Incoming>) -> Result<Response<Answer>, Broken> {
        match self {
            Self::Folder(folder) => folder.execute(request).await,
            Self::Other(address) => forward(*address, request).await,
        }
    }
}

impl Folder {
    async fn execute(&self, request: Request<Incoming>) -> Result<Response<Answer>, Broken> {
        let header = |name: HeaderName| request.headers().get(name).cloned();
        let (if_match, if_none_match) = (header(IF_MATCH), header(IF_NONE_MATCH));
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        let conditional = !reads && (if_match.is_some() || if_none_match.is_some());
        let is_get = *request.method() == Method::GET && request.uri().query().is_none();
        let file = if is_get { object_file(&self.path, request.uri().path()) } else { None };
        let turn = if conditional { Some(self.conditional_writes.lock().await) } else { None };
        let response = self.service.call(request.map(s3s::Body::from)).await;
        let response = response.map_err(|error| Broken(format!("{error:?}")))?;
        drop(turn);
        let tag = response.headers().get(ETAG);
        if reads && response.status().is_success() && if_match.is_some() && if_match.as_ref() != tag {
            return Ok(refusal(StatusCode::PRECONDITION_FAILED, "PreconditionFailed"));
        }
        let file = file.filter(|_| response.status().is_success());
        let from_file = file.and_then(|file| file_body(file, response.headers()));
        Ok(response
            .map(|body| from_file.unwrap_or_else(|| Answer(body.map(|chunk| chunk.map_err(broken)).boxed()))))
    }
}

/// Reads the body of a request to its end. If a server answers earlier, it may reset the connection while the client
/// is sending.
pub(super) async fn drain(request: Request<Incoming>) {
    frames(request.into_body()).for_each(|_| async {}).await;
}

fn frames(mut body: Incoming) -> impl Stream<Item = hyper::Result<Frame<Bytes>>> {
    stream::poll_fn(move |context| Pin::new(&mut body).poll_frame(context))
}

/// Sends a request to the server at `address` over a new connection.
async fn forward(address: SocketAddr, request: Request<Incoming>) -> Result<Response<Answer>, Broken> {
    let stream = TcpStream::connect(address).await.map_err(broken)?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(broken)?;
    tokio::spawn(connection);
    let mut response = sender.send_request(request).await.map_err(broken)?;
    *response.version_mut() = Version::HTTP_11;
    Ok(response.map(|body| {
        let chunks = frames(body).filter_map(|frame| async move {
            match frame {
                Ok(frame) => frame.into_data().ok().map(Ok),
                Err(error) => Some(Err(broken(error))),
            }
        });
        Answer(chunks.boxed())
    }))
}
