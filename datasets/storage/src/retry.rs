//! The policy for repeating failed requests. It applies to reads of objects and ranges, listings, heads and
//! uploads.
//!
//! Each attempt has a timeout far below the [budget](BUDGET), so a stalled request is repeated. The client of
//! [`object_store`] repeats requests after failures that it understands: a busy store, a refused connection,
//! and a timeout of an idempotent request. [`repeat`] repeats requests without a complete answer, for which
//! the client does not know whether the store executed them. Both stop when the budget is used up. Neither
//! repeats a request that the store rejects (no permission, no such bucket, another region); that error is
//! reported immediately.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::client::{HttpError, HttpErrorKind};
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, ObjectStoreExt, PutMode, RetryConfig};

use crate::Created;
use crate::service::find_cause;

/// The largest number of bytes of a request, except by a client for [larger
/// requests](crate::RemoteStore::connect_with).
pub(crate) const LARGEST_REQUEST: u64 = 8 << 20;
/// The time after which a failed request is not repeated. The signatures of requests are valid for longer.
const BUDGET: Duration = Duration::from_secs(180);
/// The budget of the first request to a store, which may be unreachable.
pub(super) const FIRST_REQUEST_BUDGET: Duration = Duration::from_secs(8);
/// The part of an attempt's timeout that does not depend on the number of bytes.
const LATENCY: Duration = Duration::from_secs(15);
/// The timeout of an attempt of a first request. Its budget allows a second attempt to begin.
const FIRST_REQUEST_LATENCY: Duration = Duration::from_secs(5);
/// The transfer rate in bytes per second below which a transfer counts as stalled.
const SLOWEST: u64 = 1 << 20;
/// The wait before the second attempt. It doubles with each attempt.
const FIRST_WAIT: Duration = Duration::from_millis(100);
/// The longest wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// The largest number of tolerated conflicts, in which creating an object fails although it does not exist.
const MOST_CONFLICTS: u32 = 10;

/// How long a client keeps trying.
///
/// The environment variables `AWS_TIMEOUT`, `GOOGLE_TIMEOUT` and `AZURE_TIMEOUT` (for example `30 seconds`)
/// set the timeout of an attempt for both variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// For reading and writing data: an attempt may take 15 seconds plus one second per MiB, and a failed
    /// request is repeated for three minutes.
    Long,
    /// For the first requests to a store: a wrong endpoint is reported after about ten seconds.
    Short,
}

impl Patience {
    /// Returns the timeout of an attempt that transfers up to `bytes` bytes.
    pub(super) fn try_timeout(self, bytes: u64) -> Duration {
        match self {
            Self::Long => LATENCY + Duration::from_secs(bytes.div_ceil(SLOWEST)),
            Self::Short => FIRST_REQUEST_LATENCY,
        }
    }

    /// Returns the retry configuration of a client of [`object_store`].
    pub(super) fn retries(self) -> RetryConfig {
        // Each wait is random, at most three times the previous one, so waits grow.
        let backoff = BackoffConfig { init_backoff: FIRST_WAIT, max_backoff: LONGEST_WAIT, base: 3.0 };
        let retry_timeout = match self {
            Self::Long => BUDGET,
            Self::Short => FIRST_REQUEST_BUDGET,
        };
        // Only time limits the retries. A limit of ten attempts could be reached after two seconds, because the
        // waits between them are random.
        RetryConfig { backoff, max_retries: 1000, retry_timeout }
    }
}

/// Repeats a request while its answer is lost. The request must be idempotent.
pub(super) async fn repeat<T, R>(request: impl Fn() -> R) -> object_store::Result<T>
where
    R: Future<Output = object_store::Result<T>>,
{
    repeat_within(BUDGET, request).await
}

/// Works like [`repeat`] with the given `budget`.
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
            // A repeated request may find the object that the first attempt created, if the first answer was
            // lost.
            Ok(found) => return Ok(if found == bytes { Created::Yes } else { Created::Exists }),
            // S3 reports a conflict while another writer is creating the object, which may still fail.
            Err(object_store::Error::NotFound { .. }) if conflicts < MOST_CONFLICTS => {
                conflicts += 1;
                tokio::time::sleep(FIRST_WAIT * conflicts).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns whether the connection broke after the request was sent. The client itself repeats requests that
/// were never sent.
fn is_lost(error: &object_store::Error) -> bool {
    kind_of(error).is_some_and(|kind| !matches!(kind, HttpErrorKind::Connect | HttpErrorKind::Request))
}

/// Returns whether there was no connection, or no answer in time.
pub(super) fn is_unreachable(error: &object_store::Error) -> bool {
    kind_of(error).is_some_and(|kind| matches!(kind, HttpErrorKind::Connect | HttpErrorKind::Timeout))
}

/// Returns the kind of an HTTP failure; `None` if there was an answer, or no request.
fn kind_of(error: &object_store::Error) -> Option<HttpErrorKind> {
    find_cause::<HttpError>(error).map(HttpError::kind)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Sends a request whose first `failures` attempts fail with `kind`. Returns the number of attempts, and
    /// whether one succeeded.
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
        // Attempts follow after about 0, 100, 300 and 700 ms. An attempt after 1.5 s would exceed the budget.
        let (tried, worked) = tries(9, HttpErrorKind::Timeout);
        assert!((2..=4).contains(&tried) && !worked, "{tried}");
        assert_eq!(tries(1, HttpErrorKind::Connect), (1, false));
    }

    /// A stalled request is one failed attempt, and the budget allows several of them.
    #[test]
    fn the_retry_budget_allows_several_stalled_attempts() {
        let timeout = |bytes| Patience::Long.try_timeout(bytes);
        assert!(timeout(LARGEST_REQUEST) * 4 < BUDGET);
        // A store that is busy for a minute gets another attempt afterwards.
        assert!(Duration::from_secs(60) + LONGEST_WAIT < BUDGET);
        assert!(Patience::Short.try_timeout(0) < FIRST_REQUEST_BUDGET);
        assert_eq!(timeout(0), LATENCY);
        assert_eq!(timeout((525 << 20) - 1), LATENCY + Duration::from_secs(525));
    }

    #[test]
    fn refused_requests_are_not_repeated() {
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
