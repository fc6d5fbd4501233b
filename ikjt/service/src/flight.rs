//! The requests that a process answers: questions, as JSON, and tickets for batches. [`sending`](crate::sending) has
//! the wire format.

use futures::stream::BoxStream;
use onefold_ikjt::service::protocol::{Question, Ticket};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::Status;

use crate::sending::Sent;

/// Batches as they are sent.
pub(crate) type Batches = BoxStream<'static, Result<Sent, Status>>;

/// Answers requests.
#[tonic::async_trait]
pub(crate) trait Answers: Send + Sync + 'static {
    /// Whether only processes of the service may ask for an action.
    fn is_for_workers(&self, action: &str) -> bool {
        let _ = action;
        false
    }

    /// The answer to an action, as JSON; `None` if the process knows no such action.
    async fn act(&self, action: &str, body: &[u8]) -> Result<Option<Vec<u8>>, Status>;

    /// The batches of a ticket.
    async fn get(&self, ticket: Ticket) -> Result<Batches, Status>;
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
