//! Streaming uploads: written bytes are sent to the store in parts, several at a time, and the complete
//! object appears when the upload is finished. An object smaller than a part is sent to a store in one
//! request.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::mpsc::{Receiver, sync_channel};

use bytes::Bytes;
use futures::FutureExt;
use futures::future::{self, AbortHandle};
use object_store::MultipartUpload;
use onefold_base::units;
use sha2::{Digest, Sha256};

use crate::retry::LARGEST_REQUEST;
use crate::{Error, Result, Storage, runtime};

/// The smallest size of a part in bytes. With S3's 10,000 parts an object may have 78 GiB, unless it is known
/// to be larger.
const PART_BYTES: u64 = LARGEST_REQUEST;
/// The largest number of parts of an object, as in S3.
const MOST_PARTS: u64 = 10_000;
/// The largest number of parts of one upload in flight. Their bytes are in memory.
const PARTS_IN_FLIGHT: usize = 3;

/// An object that is being written. If it is dropped before [`finish`](Self::finish), the object does not
/// appear.
pub struct Upload {
    storage: Storage,
    path: String,
    /// `None` until there is a part to send, and after completion.
    multipart: Option<Box<dyn MultipartUpload>>,
    buffer: Vec<u8>,
    part_bytes: usize,
    /// The number of bytes written so far, including those in the buffer.
    bytes: u64,
    in_flight: VecDeque<PartInFlight>,
}

/// The request that sends a part.
struct PartInFlight {
    answer: Receiver<object_store::Result<()>>,
    abort: AbortHandle,
}

impl std::fmt::Debug for Upload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upload").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Returns the size in bytes of each part of an object of up to `expected` bytes.
fn part_bytes(expected: u64) -> u64 {
    expected.div_ceil(MOST_PARTS).next_multiple_of(1 << 20).max(PART_BYTES)
}

impl Upload {
    /// Creates an upload of an object that is expected to have up to `expected` bytes.
    pub(super) fn new(
        storage: Storage,
        path: String,
        multipart: Option<Box<dyn MultipartUpload>>,
        expected: u64,
    ) -> Self {
        let part_bytes = part_bytes(expected) as usize;
        let (buffer, in_flight) = (Vec::new(), VecDeque::new());
        Self { storage, path, multipart, buffer, part_bytes, bytes: 0, in_flight }
    }

    /// Sends the remaining bytes and makes the object appear. On a local disk, the file is synced before this
    /// returns.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the store refuses a part or the whole object. In this case the object does not
    /// appear.
    pub fn finish(mut self) -> Result<()> {
        if self.multipart.is_none() {
            return self.storage.replace(&self.path, std::mem::take(&mut self.buffer));
        }
        let path = self.storage.shown(&self.path);
        let wrong = |error| Error::write(path, error);
        self.send_part().and_then(|()| self.wait_for_parts(0)).map_err(wrong.clone())?;
        let Some(mut multipart) = self.multipart.take() else { return Ok(()) };
        let complete = async move { multipart.complete().await };
        let done = self.storage.threads().wait(complete).map_err(wrong.clone())?;
        if let Err(error) = done
            && !self.is_complete()
        {
            return Err(wrong(self.storage.service.io_error(&error)));
        }
        self.storage.sync(&self.path).map_err(wrong)
    }

    /// Returns whether the object exists although the request that completes it failed. If the first answer
    /// was lost, the client repeats the request, and the store no longer knows the upload. No other writer
    /// uses the object's name.
    fn is_complete(&self) -> bool {
        let found = || self.storage.head(&self.path).ok().flatten();
        self.storage.has_latency() && found().is_some_and(|object| object.bytes == self.bytes)
    }

    /// Starts sending the buffered bytes.
    fn send_part(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let multipart = match &mut self.multipart {
            Some(multipart) => multipart,
            None => self.multipart.insert(self.storage.start_multipart(&self.path, self.part_bytes as u64)?),
        };
        let parts = self.storage.upload_parts.clone().map_or_else(runtime::upload_parts, Ok)?;
        let place = runtime::wait(parts.place(self.buffer.len()))?.map_err(io::Error::other)?;
        let part = std::mem::take(&mut self.buffer);
        let request = multipart.put_part(Bytes::from(part).into());
        let (sender, answer) = sync_channel(1);
        let (sent, abort) = future::abortable(async move {
            let sent = request.await;
            drop(place);
            // There is no receiver if the upload was dropped.
            let _ = sender.send(sent);
        });
        self.storage.threads().start(sent.map(drop))?;
        self.in_flight.push_back(PartInFlight { answer, abort });
        self.wait_for_parts(PARTS_IN_FLIGHT)
    }

    /// Waits until at most `left` parts are in flight.
    fn wait_for_parts(&mut self, left: usize) -> io::Result<()> {
        while self.in_flight.len() > left {
            let Some(part) = self.in_flight.pop_front() else { break };
            let sent = part.answer.recv();
            let sent = sent.map_err(|_| io::Error::other("the request of a part ended without a result"))?;
            sent.map_err(|error| self.storage.service.io_error(&error))?;
        }
        Ok(())
    }
}

impl Write for Upload {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.buffer.capacity() == 0 {
            self.buffer.reserve_exact(self.part_bytes);
        }
        let taken = bytes.len().min(self.part_bytes - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        self.bytes += taken as u64;
        if self.buffer.len() == self.part_bytes {
            self.send_part()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An upload that computes a digest of the written bytes.
#[derive(Debug)]
pub struct HashingWriter {
    upload: Upload,
    digest: Sha256,
}

impl HashingWriter {
    /// Creates a writer that computes the digest of all bytes of `upload`, to which nothing was written yet.
    pub fn new(upload: Upload) -> Self {
        Self { upload, digest: Sha256::new() }
    }

    /// Completes the upload; returns its size in bytes and its SHA-256 in hexadecimal.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Upload::finish`].
    pub fn finish(self) -> Result<(u64, String)> {
        let bytes = self.upload.bytes;
        self.upload.finish()?;
        Ok((bytes, units::format_hex(&self.digest.finalize())))
    }
}

impl Write for HashingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.upload.write(bytes)?;
        self.digest.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.upload.flush()
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(mut multipart) = self.multipart.take() else { return };
        for part in self.in_flight.drain(..) {
            part.abort.abort();
        }
        // The store's lifecycle rules remove parts that are left.
        self.storage.threads().clean_up(async move { multipart.abort().await.is_ok() });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use async_trait::async_trait;
    use object_store::memory::InMemory;
    use object_store::{PutPayload, PutResult, UploadPart};

    use super::*;
    use crate::UploadParts;

    #[test]
    fn large_objects_have_no_more_parts_than_a_store_allows() {
        for (expected, bytes) in
            [(0, 8 << 20), (78 << 30, 8 << 20), (79 << 30, 9 << 20), (5 << 40, 525 << 20)]
        {
            assert_eq!(part_bytes(expected), bytes, "{expected}");
            assert!(expected.div_ceil(bytes) <= MOST_PARTS, "{expected}");
        }
    }

    /// The number of parts that a store has received but not answered: the current and the largest number.
    #[derive(Debug, Default)]
    struct Unanswered {
        now: AtomicUsize,
        most: AtomicUsize,
    }

    /// The way in which a store answers requests with parts.
    #[derive(Debug, Clone, Copy)]
    enum Answer {
        Slow,
        Never,
        Failure,
    }

    /// An upload to a store in memory that answers in this way.
    #[derive(Debug)]
    struct FakeUpload {
        inner: Box<dyn MultipartUpload>,
        answer: Answer,
        unanswered: Arc<Unanswered>,
    }

    #[async_trait]
    impl MultipartUpload for FakeUpload {
        fn put_part(&mut self, data: PutPayload) -> UploadPart {
            let (request, answer) = (self.inner.put_part(data), self.answer);
            let unanswered = Arc::clone(&self.unanswered);
            let now = unanswered.now.fetch_add(1, Ordering::SeqCst) + 1;
            unanswered.most.fetch_max(now, Ordering::SeqCst);
            Box::pin(async move {
                let answered = match answer {
                    Answer::Slow => {
                        tokio::time::sleep(Duration::from_millis(2)).await;
                        request.await
                    }
                    Answer::Never => std::future::pending().await,
                    Answer::Failure => {
                        Err(object_store::Error::Generic { store: "fake", source: "broken".into() })
                    }
                };
                unanswered.now.fetch_sub(1, Ordering::SeqCst);
                answered
            })
        }

        async fn complete(&mut self) -> object_store::Result<PutResult> {
            self.inner.complete().await
        }

        async fn abort(&mut self) -> object_store::Result<()> {
            self.inner.abort().await
        }
    }

    const PART: usize = 1000;

    /// Creates a store whose uploads send up to `most` parts at a time.
    fn store(most: usize) -> Storage {
        Storage::over(Arc::new(InMemory::new()), "folder").with_upload_parts(UploadParts::new(most))
    }

    /// Creates an upload in parts of [`PART`] bytes.
    fn upload(storage: &Storage, path: &str, answer: Answer, unanswered: &Arc<Unanswered>) -> Upload {
        let inner = storage.start_multipart(path, 0).unwrap();
        let multipart = FakeUpload { inner, answer, unanswered: Arc::clone(unanswered) };
        let mut upload = Upload::new(storage.clone(), path.to_owned(), Some(Box::new(multipart)), 0);
        upload.part_bytes = PART;
        upload
    }

    #[test]
    fn many_uploads_keep_to_one_limit_of_parts() {
        for most in [1, 3] {
            let (storage, unanswered) = (store(most), Arc::default());
            // The objects are empty or have up to several parts; every second one ends in the middle of a part.
            let write = |number: usize| {
                let path = number.to_string();
                let mut upload = upload(&storage, &path, Answer::Slow, &unanswered);
                upload.write_all(&vec![number as u8; number * PART / 2]).unwrap();
                upload.finish().unwrap();
            };
            let write = &write;
            std::thread::scope(|scope| (0..16).for_each(|number| drop(scope.spawn(move || write(number)))));
            for number in 0..16 {
                let written = storage.read(&number.to_string()).unwrap().unwrap();
                assert!(written == vec![number as u8; number * PART / 2], "{number}");
            }
            assert_eq!(unanswered.now.load(Ordering::SeqCst), 0);
            let seen = unanswered.most.load(Ordering::SeqCst);
            assert!((1..=most).contains(&seen), "{seen} parts at a time");
        }
    }

    /// An upload that waits for more bytes takes no permit.
    #[test]
    fn one_thread_writes_several_uploads_in_turns() {
        let (storage, unanswered) = (store(1), Arc::default());
        let path = |number: u8| number.to_string();
        let open = |number: u8| upload(&storage, &path(number), Answer::Slow, &unanswered);
        let mut uploads: Vec<_> = (0..8).map(open).collect();
        for _ in 0..5 {
            for (number, upload) in (0..).zip(&mut uploads) {
                upload.write_all(&[number; PART * 3 / 4]).unwrap();
            }
        }
        // This upload is smaller than a part and has sent no request yet.
        storage.upload("small").unwrap().finish().unwrap();
        uploads.into_iter().rev().for_each(|upload| upload.finish().unwrap());
        for number in 0..8 {
            let written = storage.read(&path(number)).unwrap().unwrap();
            assert!(written == vec![number; PART * 3 / 4 * 5], "{number}");
        }
    }

    #[test]
    fn failed_and_dropped_uploads_release_their_permits() {
        let (storage, unanswered) = (store(1), Arc::default());
        let mut failing = upload(&storage, "failing", Answer::Failure, &unanswered);
        failing.write_all(&[1; PART]).unwrap();
        failing.finish().unwrap_err();
        let mut stuck = upload(&storage, "stuck", Answer::Never, &unanswered);
        stuck.write_all(&[1; PART]).unwrap();
        drop(stuck);
        let mut last = upload(&storage, "last", Answer::Slow, &unanswered);
        last.write_all(&[1; 3 * PART]).unwrap();
        last.finish().unwrap();
        assert_eq!(storage.list("", None).unwrap().len(), 1);
    }
}
