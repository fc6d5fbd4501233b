//! Limits the parts of uploads in memory that are being sent to a store.

use std::sync::Arc;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use crate::retry::LARGEST_REQUEST;

/// Limits the number of parts that uploads send at a time, because each part's bytes are in memory. All
/// uploads that share clones of this share the limit.
///
/// A part waits for a permit in the buffer of its own upload, and each upload has one such buffer. The permit
/// is released when the request with the part ends, fails or is cancelled. An upload therefore waits only for
/// requests, never for writes to another upload: all uploads complete even with a single permit, and even if
/// one thread writes to several uploads alternately.
#[derive(Debug, Clone)]
pub struct UploadParts {
    places: Arc<Semaphore>,
    most: u32,
}

/// The smallest default number of parts that may be sent at a time: the number that one upload sends.
const LEAST_PARTS: usize = 4;

impl UploadParts {
    /// Allows up to `most` parts of 8 MiB at a time, at least one. A larger part counts as several parts, but
    /// at most as `most`.
    pub fn new(most: usize) -> Self {
        let most = u32::try_from(most.max(1)).unwrap_or(u32::MAX);
        Self { places: Arc::new(Semaphore::new(most as usize)), most }
    }

    /// Allows two parts for each of `writers` objects that are written at a time, and at least four.
    pub fn of_writers(writers: usize) -> Self {
        Self::new(writers.saturating_mul(2).max(LEAST_PARTS))
    }

    /// Waits for a permit for a part of `bytes` bytes, which lasts until it is dropped. There is no error,
    /// because the semaphore is never closed.
    pub(crate) async fn place(self, bytes: usize) -> Result<OwnedSemaphorePermit, AcquireError> {
        let wanted = bytes.div_ceil(LARGEST_REQUEST as usize).clamp(1, self.most as usize);
        self.places.acquire_many_owned(wanted as u32).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime;

    #[test]
    fn larger_parts_take_more_permits_up_to_all_of_them() {
        let parts = UploadParts::new(3);
        for (bytes, free) in [(0, 2), (8 << 20, 2), ((8 << 20) + 1, 1), (525 << 20, 0)] {
            let place = runtime::wait(parts.clone().place(bytes)).unwrap().unwrap();
            assert_eq!(parts.places.available_permits(), free, "{bytes}");
            drop(place);
            assert_eq!(parts.places.available_permits(), 3, "{bytes}");
        }
        assert_eq!((UploadParts::new(0).most, UploadParts::of_writers(0).most), (1, 4));
        assert_eq!(UploadParts::of_writers(10).most, 20);
    }
}
