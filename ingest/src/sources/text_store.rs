//! The bytes of text files: decompressed, and from remote stores in requests of a few MiB.
//!
//! An object of many GiB that arrives in one response needs a response that may last for hours, since rows are taken
//! from it only as fast as the query goes on. Requests of a few MiB each end within their time limit, can be repeated,
//! and are refused by the store if the object has changed since the first.

use std::fmt;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Buf, Bytes};
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use futures::stream::{self, BoxStream};
use futures::{SinkExt, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::runtime::Handle;

/// Bytes of the first request for an object: enough for the rows of which columns are inferred.
const FIRST_REQUEST: u64 = 256 << 10;
/// Bytes of every further request; one is ahead of the rows that are decoded.
const REQUEST: u64 = 4 << 20;
/// Decompressed bytes that are handed on at once.
const CHUNK: usize = 256 << 10;

/// A store whose objects read as what they are compressed of.
#[derive(Debug)]
pub(super) struct TextStore {
    inner: Arc<dyn ObjectStore>,
    compression: FileCompressionType,
}

impl TextStore {
    pub(super) fn new(inner: Arc<dyn ObjectStore>, compression: FileCompressionType) -> Self {
        Self { inner, compression }
    }

    /// The object, of which remote stores send the rest when it is asked for.
    async fn open(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (start, end) = match &options.range {
            None => (0, u64::MAX),
            Some(GetRange::Bounded(range)) => (range.start, range.end),
            Some(GetRange::Offset(start)) => (*start, u64::MAX),
            Some(GetRange::Suffix(_)) => return self.inner.get_opts(location, options).await,
        };
        let some = GetRange::Bounded(start..end.min(start.saturating_add(FIRST_REQUEST)));
        let first =
            self.inner.get_opts(location, GetOptions { range: Some(some), ..options.clone() }).await?;
        if matches!(first.payload, GetResultPayload::File(..)) {
            return self.inner.get_opts(location, options).await;
        }
        let (meta, attributes) = (first.meta.clone(), first.attributes.clone());
        let end = end.min(meta.size);
        let options = GetOptions { if_match: meta.e_tag.clone(), ..options };
        let rest = requests(first.range.end..end).map(move |range| {
            let (inner, location) = (self.inner.clone(), location.clone());
            let options = GetOptions { range: Some(GetRange::Bounded(range)), ..options.clone() };
            async move { inner.get_opts(&location, options).await?.bytes().await }
        });
        let rest: Vec<_> = rest.collect();
        let payload = stream::once(first.bytes()).chain(stream::iter(rest).buffered(2));
        Ok(GetResult {
            payload: GetResultPayload::Stream(payload.boxed()),
            meta,
            range: start..end,
            attributes,
        })
    }
}

/// `range`, cut into requests.
fn requests(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = (range.start..range.end).step_by(REQUEST as usize);
    starts.map(move |start| start..range.end.min(start + REQUEST))
}

#[async_trait]
impl ObjectStore for TextStore {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if options.head {
            return self.inner.get_opts(location, options).await;
        }
        let result = self.open(location, options).await?;
        if !self.compression.is_compressed() {
            return Ok(result);
        }
        let GetResult { payload, meta, range, attributes } = result;
        let input: Box<dyn Read + Send> = match payload {
            GetResultPayload::File(file, _) => Box::new(file),
            GetResultPayload::Stream(chunks) => Box::new(StreamReader::new(chunks)),
        };
        let chunks = decompress(input, self.compression).map(|chunk| chunk.map_err(generic)).boxed();
        Ok(GetResult { payload: GetResultPayload::Stream(chunks), meta, range, attributes })
    }

    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

impl fmt::Display for TextStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "text of {}", self.inner)
    }
}

fn generic(error: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "decompression", source: Box::new(error) }
}

/// Decompresses on a thread of its own, which waits when it is two chunks ahead and ends when the stream is dropped.
///
/// DataFusion's own streams stop after the first member of a concatenated file (`cat a.zst b.zst`); its readers, which
/// block, take all of them.
fn decompress(
    input: Box<dyn Read + Send>,
    compression: FileCompressionType,
) -> BoxStream<'static, io::Result<Bytes>> {
    let (mut sender, receiver) = futures::channel::mpsc::channel(1);
    let worker = tokio::task::spawn_blocking(move || {
        let mut send = |chunk| futures::executor::block_on(sender.send(chunk)).is_ok();
        let mut reader = match compression.convert_read(input) {
            Ok(reader) => reader,
            Err(error) => {
                send(Err(io::Error::other(error)));
                return;
            }
        };
        loop {
            let mut chunk = Vec::with_capacity(CHUNK);
            let read = reader.by_ref().take(CHUNK as u64).read_to_end(&mut chunk);
            let ends = chunk.is_empty() || read.is_err();
            if (!chunk.is_empty() && !send(Ok(Bytes::from(chunk)))) || ends {
                if let Err(error) = read {
                    send(Err(error));
                }
                return;
            }
        }
    });
    // A decoder that panics must not look like the end of the file.
    let panicked =
        stream::once(worker).filter_map(|ended| async { ended.err().map(|error| Err(error.into())) });
    receiver.chain(panicked).boxed()
}

/// A stream of chunks, read by a thread that may block.
struct StreamReader {
    chunks: BoxStream<'static, Result<Bytes>>,
    chunk: Bytes,
    runtime: Handle,
}

impl StreamReader {
    fn new(chunks: BoxStream<'static, Result<Bytes>>) -> Self {
        Self { chunks, chunk: Bytes::new(), runtime: Handle::current() }
    }
}

impl Read for StreamReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match self.runtime.block_on(self.chunks.next()) {
                None => return Ok(0),
                Some(chunk) => self.chunk = chunk.map_err(io::Error::other)?,
            }
        }
        let length = buffer.len().min(self.chunk.len());
        self.chunk.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;

    use super::*;

    /// What `compression` makes of `text`, by the engine's own writer.
    async fn compressed(text: &[u8], compression: FileCompressionType) -> Vec<u8> {
        let chunks = stream::iter([Ok(Bytes::copy_from_slice(text))]).boxed();
        let chunks: Vec<_> = compression.convert_to_compress_stream(chunks).unwrap().collect().await;
        chunks.into_iter().flat_map(|chunk| chunk.unwrap()).collect()
    }

    /// What a remote store (one that sends streams) or a local one gives for an object of these bytes.
    async fn read(bytes: &[u8], compression: FileCompressionType, local: bool) -> Result<Vec<u8>> {
        let path = Path::from("object");
        let directory = tempfile::tempdir().unwrap();
        let inner: Arc<dyn ObjectStore> = if local {
            let mut file = fs_err::File::create(directory.path().join("object")).unwrap();
            file.write_all(bytes).unwrap();
            Arc::new(object_store::local::LocalFileSystem::new_with_prefix(directory.path()).unwrap())
        } else {
            let store = InMemory::new();
            store.put(&path, bytes.to_vec().into()).await.unwrap();
            Arc::new(store)
        };
        let store = TextStore::new(inner, compression);
        Ok(store.get(&path).await?.bytes().await?.to_vec())
    }

    const COMPRESSIONS: [FileCompressionType; 4] = [
        FileCompressionType::GZIP,
        FileCompressionType::BZIP2,
        FileCompressionType::XZ,
        FileCompressionType::ZSTD,
    ];

    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        std::iter::repeat_with(next).take(bytes).collect()
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap()
    }

    #[test]
    fn every_compression_reads_all_members_local_and_remote() {
        // More than the first request and one other take.
        let (first, second) = (noise(5 << 20), noise(1000));
        let plain = [&first[..], &second].concat();
        runtime().block_on(async {
            for compression in COMPRESSIONS {
                let members = [compressed(&first, compression).await, compressed(&second, compression).await];
                for local in [true, false] {
                    let found = read(&members.concat(), compression, local).await.unwrap();
                    assert!(found == plain, "{compression:?} local {local}: {} bytes", found.len());
                }
            }
            for local in [true, false] {
                assert!(read(&plain, FileCompressionType::UNCOMPRESSED, local).await.unwrap() == plain);
            }
        });
    }

    #[test]
    fn a_cut_file_is_an_error() {
        let text = noise(100_000);
        runtime().block_on(async {
            for compression in COMPRESSIONS {
                let whole = compressed(&text, compression).await;
                for local in [true, false] {
                    for cut in [whole.len() / 2, whole.len() - 1] {
                        let cut = read(&whole[..cut], compression, local).await;
                        assert!(cut.is_err(), "{compression:?} local {local}: {} bytes", cut.unwrap().len());
                    }
                }
            }
        });
    }

    #[test]
    fn a_remote_object_is_not_read_whole_for_its_first_rows() {
        let path = Path::from("object");
        let lengths: Vec<usize> = runtime().block_on(async {
            let inner = InMemory::new();
            inner.put(&path, noise(5 << 20).into()).await.unwrap();
            let store = TextStore::new(Arc::new(inner), FileCompressionType::UNCOMPRESSED);
            let chunks = store.get(&path).await.unwrap().into_stream();
            chunks.map(|chunk| chunk.unwrap().len()).collect().await
        });
        assert_eq!(lengths, [FIRST_REQUEST as usize, REQUEST as usize, (1 << 20) - FIRST_REQUEST as usize]);
    }

    #[test]
    fn requests_cover_the_range() {
        let cut: Vec<_> = requests(5..(2 * REQUEST + 6)).collect();
        assert_eq!(cut, [5..REQUEST + 5, REQUEST + 5..2 * REQUEST + 5, 2 * REQUEST + 5..2 * REQUEST + 6]);
        assert_eq!(requests(7..7).count(), 0);
    }
}
