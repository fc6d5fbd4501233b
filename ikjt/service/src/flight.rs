//! The part of Arrow Flight that the service speaks: `DoAction` for questions. Batches, by `DoGet`, are
//! [sent](crate::sending) without the library.

use std::sync::Arc;

use arrow_flight::flight_service_server::{FlightService, FlightServiceServer};
use arrow_flight::{
    Action, ActionType, Criteria, Empty, FlightData, FlightDescriptor, FlightInfo, HandshakeRequest,
    HandshakeResponse, PollInfo, PutResult, SchemaResult, Ticket as FlightTicket,
};
use futures::stream::{self, BoxStream, StreamExt};
use onefold_ikjt::service::protocol::{ANSWER_BYTES, Question, Ticket};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::codec::CompressionEncoding;
use tonic::{Request, Response, Status, Streaming};

use crate::sending::Message;

/// Batches as they are sent.
pub(crate) type Batches = BoxStream<'static, Result<Message, Status>>;

/// What a process answers.
#[tonic::async_trait]
pub(crate) trait Answers: Send + Sync + 'static {
    /// The answer to an action, as JSON; `None` if the process knows no such action.
    async fn act(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, Status>;

    /// The batches of a ticket.
    async fn get(&self, ticket: Ticket) -> Result<Batches, Status>;
}

/// A Flight service that answers as `answers` says.
pub(crate) fn server<A: Answers>(answers: Arc<A>) -> FlightServiceServer<Flight<A>> {
    FlightServiceServer::new(Flight(answers))
        // For clients that ask for it.
        .send_compressed(CompressionEncoding::Zstd)
}

/// A question of type `Q`, whose answer `answer` gives.
pub(crate) async fn answer<Q: Question>(
    body: &[u8],
    answer: impl AsyncFnOnce(Q) -> Result<Q::Answer, Status>,
) -> Result<Option<Vec<u8>>, Status> {
    to_json(&answer(of_json(body)?).await?).map(Some)
}

pub(crate) fn of_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Status> {
    serde_json::from_slice(body)
        .map_err(|error| Status::invalid_argument(format!("the request cannot be read: {error}")))
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>, Status> {
    serde_json::to_vec(value).map_err(|error| Status::internal(error.to_string()))
}

pub(crate) struct Flight<A>(Arc<A>);

/// The error for what the service does not do.
fn unknown<T>(what: &str) -> Result<T, Status> {
    Err(Status::unimplemented(format!("Onefold's preprocessing service has no {what}")))
}

#[tonic::async_trait]
impl<A: Answers> FlightService for Flight<A> {
    type HandshakeStream = BoxStream<'static, Result<HandshakeResponse, Status>>;
    type ListFlightsStream = BoxStream<'static, Result<FlightInfo, Status>>;
    type DoGetStream = BoxStream<'static, Result<FlightData, Status>>;
    type DoPutStream = BoxStream<'static, Result<PutResult, Status>>;
    type DoExchangeStream = BoxStream<'static, Result<FlightData, Status>>;
    type DoActionStream = BoxStream<'static, Result<arrow_flight::Result, Status>>;
    type ListActionsStream = BoxStream<'static, Result<ActionType, Status>>;

    async fn do_action(&self, request: Request<Action>) -> Result<Response<Self::DoActionStream>, Status> {
        let Action { r#type: action, body } = request.into_inner();
        let Some(answer) = self.0.act(&action, &body).await? else {
            return unknown(&format!("action `{action}`"));
        };
        let answer = bytes::Bytes::from(answer);
        let parts = (0..answer.len().max(1)).step_by(ANSWER_BYTES).map(move |start| {
            let end = (start + ANSWER_BYTES).min(answer.len());
            Ok(arrow_flight::Result { body: answer.slice(start..end) })
        });
        Ok(Response::new(stream::iter(parts).boxed()))
    }

    async fn do_get(&self, _: Request<FlightTicket>) -> Result<Response<Self::DoGetStream>, Status> {
        unknown("batches by this way")
    }

    async fn handshake(
        &self,
        _: Request<Streaming<HandshakeRequest>>,
    ) -> Result<Response<Self::HandshakeStream>, Status> {
        unknown("handshake")
    }

    async fn list_flights(&self, _: Request<Criteria>) -> Result<Response<Self::ListFlightsStream>, Status> {
        unknown("list of flights")
    }

    async fn get_flight_info(&self, _: Request<FlightDescriptor>) -> Result<Response<FlightInfo>, Status> {
        unknown("flight information")
    }

    async fn poll_flight_info(&self, _: Request<FlightDescriptor>) -> Result<Response<PollInfo>, Status> {
        unknown("flight information")
    }

    async fn get_schema(&self, _: Request<FlightDescriptor>) -> Result<Response<SchemaResult>, Status> {
        unknown("schema by descriptor")
    }

    async fn do_put(&self, _: Request<Streaming<FlightData>>) -> Result<Response<Self::DoPutStream>, Status> {
        unknown("upload")
    }

    async fn do_exchange(
        &self,
        _: Request<Streaming<FlightData>>,
    ) -> Result<Response<Self::DoExchangeStream>, Status> {
        unknown("exchange")
    }

    async fn list_actions(&self, _: Request<Empty>) -> Result<Response<Self::ListActionsStream>, Status> {
        unknown("list of actions")
    }
}
