//! How many parts of uploads are in memory on their way to a store.

use std::sync::Arc;

use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use crate::remote::LARGEST_REQUEST;

/// The parts that uploads may send at a time, each with its bytes in memory. All uploads that share a clone of it
/// together keep to the limit.
///
/// A part waits for its place in the buffer of its own upload, which has one such buffer. The place is free again when
/// the request with the part ends, fails or is given up. So an upload waits for requests only, never for what is
/// written to another one: all of them end also with one place, and if one thread writes to several of them in turns.
#[derive(Debug, Clone)]
pub struct UploadParts {
    places: Arc<Semaphore>,
    most: u32,
}

/// Parts that may be sent at a time at least: as many as one upload sends.
const LEAST_PARTS: usize = 4;

impl UploadParts {
    /// Up to `most` parts of 8 MiB at a time, at least one. A larger part counts as several, and as `most` at the
    /// highest.
    pub fn new(most: usize) -> Self {
        let most = u32::try_from(most.max(1)).unwrap_or(u32::MAX);
        Self { places: Arc::new(Semaphore::new(most as usize)), most }
    }

    /// Two parts for each of `writers`, the objects that are written at a time, and at least four.
    pub fn of_writers(writers: usize) -> Self {
        Self::new(writers.saturating_mul(2).max(LEAST_PARTS))
    }

    /// As many as the threads of this machine call for.
    pub(crate) fn of_machine() -> Self {
        Self::of_writers(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Waits for the place of a part of `bytes` bytes, which is free again when the permit is dropped. There is no
    /// error: nothing closes the semaphore.
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
    fn larger_parts_take_more_places_but_never_more_than_there_are() {
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
