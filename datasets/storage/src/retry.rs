//! Repeats requests that the client of [`object_store`] does not: those whose answer is lost or breaks off, where the
//! client does not know whether the store has executed them.

use std::error::Error;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};

use crate::Created;

/// How often a request is sent at most. The client retries each of them by itself where it can.
const TRIES: u32 = 5;
/// The wait before the second try; it doubles from try to try.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// After this time a failed request is not repeated any more.
const LIMIT: Duration = Duration::from_secs(30);
/// How often an object is not there although it could not be created.
const MOST_CONFLICTS: u32 = 10;

/// Sends a request again while its answer is lost. The request must be one that may be executed twice.
pub(super) async fn repeat<T, R>(request: impl Fn() -> R) -> object_store::Result<T>
where
    R: Future<Output = object_store::Result<T>>,
{
    let started = Instant::now();
    let mut wait = FIRST_WAIT;
    for _ in 1..TRIES {
        match request().await {
            Err(error) if is_lost(&error) && started.elapsed() < LIMIT => {
                tokio::time::sleep(wait).await;
                wait *= 2;
            }
            answered => return answered,
        }
    }
    request().await
}

/// Creates an object that must not exist yet.
pub(super) async fn create(
    store: Arc<dyn ObjectStore>,
    key: Path,
    bytes: Bytes,
) -> object_store::Result<Created> {
    let mut conflicts = 0;
    loop {
        let put = || store.put_opts(&key, bytes.clone().into(), PutMode::Create.into());
        match repeat(put).await {
            Ok(_) => return Ok(Created::Yes),
            Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {}
            Err(error) => return Err(error),
        }
        match repeat(|| async { store.get(&key).await?.bytes().await }).await {
            // A repeated request may find what its first try created, of which the answer was lost.
            Ok(found) => return Ok(if found == bytes { Created::Yes } else { Created::Exists }),
            // S3 answers with a conflict while another writer creates the object, who may not succeed.
            Err(object_store::Error::NotFound { .. }) if conflicts < MOST_CONFLICTS => {
                conflicts += 1;
                tokio::time::sleep(FIRST_WAIT * conflicts).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Whether the connection broke after the request had been sent. The client itself repeats what was never sent.
fn is_lost(error: &object_store::Error) -> bool {
    kind_of(error).is_some_and(|kind| !matches!(kind, HttpErrorKind::Connect | HttpErrorKind::Request))
}

/// Whether there was no connection, or nothing came over it in time.
pub(super) fn is_unreachable(error: &object_store::Error) -> bool {
    kind_of(error).is_some_and(|kind| matches!(kind, HttpErrorKind::Connect | HttpErrorKind::Timeout))
}

/// How HTTP failed; `None` if there was an answer, or no request.
fn kind_of(error: &object_store::Error) -> Option<HttpErrorKind> {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<HttpError>() {
            return Some(error.kind());
        }
        cause = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Sends a request whose first `failures` tries fail with `kind`; gives the number of tries, and whether one
    /// worked.
    fn tries(failures: u32, kind: HttpErrorKind) -> (u32, bool) {
        let tried = AtomicU32::new(0);
        let request = || async {
            match tried.fetch_add(1, Ordering::Relaxed) {
                tries if tries < failures => Err(object_store::Error::Generic {
                    store: "S3",
                    source: HttpError::new(kind, std::io::Error::other("broken")).into(),
                }),
                _ => Ok(()),
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let worked = runtime.block_on(repeat(request)).is_ok();
        (tried.into_inner(), worked)
    }

    #[test]
    fn only_requests_without_an_answer_are_repeated() {
        assert_eq!(tries(0, HttpErrorKind::Interrupted), (1, true));
        assert_eq!(tries(2, HttpErrorKind::Interrupted), (3, true));
        assert_eq!(tries(1, HttpErrorKind::Decode), (2, true));
        assert_eq!(tries(9, HttpErrorKind::Timeout), (5, false));
        assert_eq!(tries(1, HttpErrorKind::Connect), (1, false));
    }
}
