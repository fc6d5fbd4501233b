//! Implements the part of Arrow Flight that the service uses: `DoAction` for questions in JSON, and `DoGet` for the
//! batches of a ticket.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Response};
use axum::routing::post;
use bytes::Bytes;
use futures::stream::{self, BoxStream, Stream, StreamExt};
use http_body::Frame;
use http_body_util::StreamBody;
use onefold_ikjt::service::protocol::{ANSWER_BYTES, Question, Ticket};
use prost::Message as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;
use tonic::metadata::MetadataMap;

use crate::security::{Guard, Role};
use crate::sending::{Encoded, Sent, frames_of};

/// The maximal size of a request in bytes. The largest requests are jobs, whose pipelines may contain tables.
const MOST_REQUEST_BYTES: usize = 64 << 20;

/// The gRPC headers that negotiate compression.
const ACCEPTS: &str = "grpc-accept-encoding";
const ENCODING: &str = "grpc-encoding";

/// A stream of batches and notices to send.
pub(crate) type Batches = BoxStream<'static, Result<Sent, Status>>;

/// A process that answers requests.
#[tonic::async_trait]
pub(crate) trait Answers: Send + Sync + 'static {
    /// The name of the process's role.
    const ROLE: &'static str;

    /// Returns whether only processes of the service may request an action.
    fn is_for_workers(&self, action: &str) -> bool {
        let _ = action;
        false
    }

    /// Returns the answer to an action in JSON, or `None` if the process does not know the action.
    async fn act(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, Status>;

    /// Returns the batches of a ticket, if the process has batches.
    async fn get(&self, _: Ticket) -> Result<Batches, Status> {
        Err(not_answered::<Self>("DoGet"))
    }
}

/// Returns the error for a request that processes of this role do not answer.
fn not_answered<A: Answers + ?Sized>(request: &str) -> Status {
    Status::unimplemented(format!(
        "this process is a {} of a preprocessing service, which does not answer `{request}`\n  hint: give the address of \
         the service's master",
        A::ROLE
    ))
}

/// Decodes a question of type `Q`, and encodes the answer that `answer` returns.
pub(crate) async fn answer<Q: Question>(
    body: &[u8],
    answer: impl AsyncFnOnce(Q) -> Result<Q::Answer, Status>,
) -> Result<Option<Vec<u8>>, Status> {
    to_json(&answer(of_json(body)?).await?).map(Some)
}

fn of_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Status> {
    serde_json::from_slice(body)
        .map_err(|error| Status::invalid_argument(format!("the request cannot be read: {error}")))
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>, Status> {
    serde_json::to_vec(value).map_err(|error| Status::internal(error.to_string()))
}

/// Returns the routes for requests that `guard` admits.
pub(crate) fn routes<A: Answers>(answers: Arc<A>, guard: Guard) -> Router {
    Router::new()
        .route("/arrow.flight.protocol.FlightService/DoAction", post(act::<A>))
        .route("/arrow.flight.protocol.FlightService/DoGet", post(get::<A>))
        .with_state((answers, guard))
}

async fn act<A: Answers>(
    State((answers, guard)): State<(Arc<A>, Guard)>,
    request: Request,
) -> Response<Body> {
    let compressed = takes_compressed(&request);
    match answered(&*answers, guard, request).await {
        Err(status) => status.into_http(),
        Ok(answer) => {
            let parts = (0..answer.len().max(1)).step_by(ANSWER_BYTES).map(move |start| {
                let end = (start + ANSWER_BYTES).min(answer.len());
                let part = arrow_flight::Result { body: answer.slice(start..end) };
                Ok((Bytes::from(part.encode_to_vec()), Bytes::new()))
            });
            response(stream::iter(parts), compressed)
        }
    }
}

async fn get<A: Answers>(
    State((answers, guard)): State<(Arc<A>, Guard)>,
    request: Request,
) -> Response<Body> {
    let compressed = takes_compressed(&request);
    match batches(&*answers, guard, request).await {
        Err(status) => status.into_http(),
        Ok(batches) => response(batches.map(|sent| sent.and_then(Sent::encoded)), compressed),
    }
}

/// Returns the answer to a question in JSON.
async fn answered<A: Answers>(answers: &A, guard: Guard, request: Request) -> Result<Bytes, Status> {
    let (arrow_flight::Action { r#type: action, body }, role) = received(&guard, request).await?;
    if answers.is_for_workers(&action) {
        role.check_worker(&action)?;
    }
    let answer = answers.act(&action, &body).await?;
    answer.map(Bytes::from).ok_or_else(|| not_answered::<A>(&action))
}

/// Returns the batches that a request asks for.
async fn batches<A: Answers>(answers: &A, guard: Guard, request: Request) -> Result<Batches, Status> {
    let (ticket, _): (arrow_flight::Ticket, Role) = received(&guard, request).await?;
    answers.get(of_json(&ticket.ticket)?).await
}

/// Returns whether the client accepts a compressed answer.
fn takes_compressed(request: &Request) -> bool {
    let accepts = request.headers().get_all(ACCEPTS).iter().filter_map(|value| value.to_str().ok());
    accepts.flat_map(|value| value.split(',')).any(|encoding| encoding.trim() == "zstd")
}

/// Decodes a request if `guard` admits its sender, and returns the message and the sender's role.
async fn received<M: prost::Message + Default>(guard: &Guard, request: Request) -> Result<(M, Role), Status> {
    let (parts, body) = request.into_parts();
    let role = guard.admit(&MetadataMap::from_headers(parts.headers))?;
    let wrong = |error: &dyn std::fmt::Display| {
        Status::invalid_argument(format!("the request cannot be read: {error}"))
    };
    let bytes = axum::body::to_bytes(body, MOST_REQUEST_BYTES).await.map_err(|error| wrong(&error))?;
    // Clients do not compress requests.
    let message = match bytes.split_first_chunk::<5>() {
        Some(([0, length @ ..], message)) if u32::from_be_bytes(*length) as usize == message.len() => message,
        _ => return Err(wrong(&"it is not a message of gRPC")),
    };
    Ok((M::decode(message).map_err(|error| wrong(&error))?, role))
}

/// Returns a response with these messages.
fn response(
    messages: impl Stream<Item = Result<Encoded, Status>> + Send + 'static,
    compressed: bool,
) -> Response<Body> {
    let mut response = Response::new(Body::new(StreamBody::new(frames(messages, compressed))));
    let headers = response.headers_mut();
    headers.insert("content-type", HeaderValue::from_static("application/grpc"));
    if compressed {
        headers.insert(ENCODING, HeaderValue::from_static("zstd"));
    }
    response
}

/// Returns the frames of an answer, followed by the status.
fn frames(
    messages: impl Stream<Item = Result<Encoded, Status>> + Send,
    compressed: bool,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
    let of_message = move |message: Result<Encoded, Status>| match message
        .and_then(|message| frames_of(message, compressed))
    {
        Ok(parts) => parts
            .into_iter()
            .filter(|part| !part.is_empty())
            .map(|part| Ok(Frame::data(part)))
            .collect::<Vec<_>>(),
        Err(status) => vec![Err(status)],
    };
    let parts = messages.flat_map(move |message| stream::iter(of_message(message)));
    let ended = stream::once(async { Err(Status::ok("")) });
    // The first status ends the answer.
    parts.chain(ended).scan(false, |over, part| {
        let next = match part {
            _ if *over => None,
            Ok(frame) => Some(Ok(frame)),
            Err(status) => {
                *over = true;
                Some(Ok(Frame::trailers(trailers(&status))))
            }
        };
        futures::future::ready(next)
    })
}

fn trailers(status: &Status) -> HeaderMap {
    let mut headers = HeaderMap::new();
    // A message that does not fit into a header is omitted.
    if status.add_header(&mut headers).is_err() {
        headers.insert(Status::GRPC_STATUS, HeaderValue::from_static("13"));
    }
    headers
}
