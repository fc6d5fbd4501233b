//! The one policy by which failed requests are sent again: reads of objects and ranges, listings, heads and uploads.
//!
//! Each try has a timeout that is well below the [budget](BUDGET), so a request that stalls is sent again. The client
//! of [`object_store`] repeats requests whose failure it understands: a busy store, a refused connection, and a timeout
//! of a request that may be executed twice. [`repeat`] repeats those whose answer is lost or breaks off, where the
//! client does not know whether the store has executed them. Both stop when the budget is spent. Neither repeats a
//! request that the store refuses (no permission, no such bucket, another region): that error is reported at once.

use std::error::Error;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, ObjectStoreExt, PutMode, RetryConfig};

use crate::Created;

/// After this time a failed request is not sent again. Stores sign requests for longer.
pub(super) const BUDGET: Duration = Duration::from_secs(180);
/// The same for the first request to a store, which may not be there.
pub(super) const FIRST_REQUEST_BUDGET: Duration = Duration::from_secs(8);
/// The time that a try may take for what does not depend on its bytes.
const LATENCY: Duration = Duration::from_secs(15);
/// The time that a try of a first request may take: a second try begins within its budget.
const FIRST_REQUEST_LATENCY: Duration = Duration::from_secs(5);
/// Bytes a second with which a transfer is not taken for stalled.
const SLOWEST: u64 = 1 << 20;
/// The wait before the second try; it doubles from try to try.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// How often an object is not there although it could not be created.
const MOST_CONFLICTS: u32 = 10;

/// The time that a try may take if it transfers up to `bytes`.
pub(super) fn try_timeout(bytes: u64) -> Duration {
    LATENCY + Duration::from_secs(bytes.div_ceil(SLOWEST))
}

/// The time that a try of the first request to a store may take.
pub(super) fn first_try_timeout() -> Duration {
    FIRST_REQUEST_LATENCY
}

/// The retries of a client of [`object_store`].
pub(super) fn of_client(budget: Duration) -> RetryConfig {
    // Each wait is random, up to three times the one before it, so that they grow.
    let backoff = BackoffConfig { init_backoff: FIRST_WAIT, max_backoff: LONGEST_WAIT, base: 3.0 };
    // Time is what limits the patience with a store: ten tries may be over after two seconds, because the waits
    // between them are random.
    RetryConfig { backoff, max_retries: 1000, retry_timeout: budget }
}

/// Sends a request again while its answer is lost. The request must be one that may be executed twice.
pub(super) async fn repeat<T, R>(request: impl Fn() -> R) -> object_store::Result<T>
where
    R: Future<Output = object_store::Result<T>>,
{
    repeat_within(BUDGET, request).await
}

/// As [`repeat`], for as long as `budget`.
pub(super) async fn repeat_within<T, R>(budget: Duration, request: impl Fn() -> R) -> object_store::Result<T>
where
    R: Future<Output = object_store::Result<T>>,
{
    let started = Instant::now();
    let mut wait = FIRST_WAIT;
    loop {
        match request().await {
            Err(error) if is_lost(&error) && started.elapsed() + wait < budget => {
                tokio::time::sleep(wait).await;
                wait = LONGEST_WAIT.min(wait * 2);
            }
            answered => return answered,
        }
    }
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
    use crate::remote::LARGEST_REQUEST;

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
        let worked = runtime.block_on(repeat_within(Duration::from_secs(1), request)).is_ok();
        (tried.into_inner(), worked)
    }

    #[test]
    fn only_requests_without_an_answer_are_repeated() {
        assert_eq!(tries(0, HttpErrorKind::Interrupted), (1, true));
        assert_eq!(tries(2, HttpErrorKind::Interrupted), (3, true));
        assert_eq!(tries(1, HttpErrorKind::Decode), (2, true));
        assert_eq!(tries(2, HttpErrorKind::Timeout), (3, true));
        // After 0, 100, 300 and 700 ms; a try after 1.5 s is beyond the budget.
        let (tried, worked) = tries(9, HttpErrorKind::Timeout);
        assert!((2..=4).contains(&tried) && !worked, "{tried}");
        assert_eq!(tries(1, HttpErrorKind::Connect), (1, false));
    }

    /// A request that stalls is one failed try: its budget has room for more of them.
    #[test]
    fn the_budget_has_room_for_several_stalled_tries() {
        assert!(try_timeout(LARGEST_REQUEST) * 4 < BUDGET);
        // A store that is busy for a minute is asked again afterwards.
        assert!(Duration::from_secs(60) + LONGEST_WAIT < BUDGET);
        assert!(first_try_timeout() < FIRST_REQUEST_BUDGET);
        assert_eq!(try_timeout(0), LATENCY);
        assert_eq!(try_timeout((525 << 20) - 1), LATENCY + Duration::from_secs(525));
    }

    #[test]
    fn what_a_store_refuses_is_not_repeated() {
        let tried = AtomicU32::new(0);
        let request = || async {
            tried.fetch_add(1, Ordering::Relaxed);
            Err::<(), _>(object_store::Error::PermissionDenied { path: "a".to_owned(), source: "403".into() })
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(repeat(request)).unwrap_err();
        assert_eq!(tried.into_inner(), 1);
    }
}
