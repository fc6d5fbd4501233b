//! The requests that a process answers: questions in JSON, and tickets for batches. [`sending`](crate::sending)
//! implements the wire format.

use futures::stream::BoxStream;
use onefold_ikjt::service::protocol::{Question, Ticket};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;

use crate::sending::Sent;

/// A stream of batches and notices to send.
pub(crate) type Batches = BoxStream<'static, Result<Sent, Status>>;

/// A process that answers requests.
#[tonic::async_trait]
pub(crate) trait Answers: Send + Sync + 'static {
    /// Returns whether only processes of the service may request an action.
    fn is_for_workers(&self, action: &str) -> bool {
        let _ = action;
        false
    }

    /// Returns the answer to an action in JSON, or `None` if the process does not know the action.
    async fn act(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, Status>;

    /// Returns the batches of a ticket.
    async fn get(&self, ticket: Ticket) -> Result<Batches, Status>;
}

/// Decodes a question of type `Q`, and encodes the answer that `answer` returns.
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
