//! Reads the bytes of text files: decompresses them, and checks CSV.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::{Buf, Bytes};
use datafusion::datasource::file_format::file_compression_type::FileCompressionType;
use futures::stream::{self, BoxStream};
use futures::{SinkExt, StreamExt};
use object_store::path::Path;
use object_store::{GetResult, GetResultPayload, ObjectStore, ObjectStoreExt, Result};
use onefold_base::sync::locked;
use tokio::runtime::Handle;

use super::csv::{Checker, CsvRules};
use super::stores::{SourceStore, VersionedStore};

/// The number of decompressed bytes that are passed on at once.
const CHUNK: usize = 256 << 10;

/// The numbers of rows that were left out, by the locations of the files; `None` for files that other processes read.
#[derive(Debug, Default)]
pub(super) struct SkippedRows(Mutex<BTreeMap<Path, Option<u64>>>);

impl SkippedRows {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Path, Option<u64>>> {
        locked(&self.0)
    }

    /// Returns the number of rows of all files. A file that was read several times counts once.
    pub(super) fn total(&self) -> u64 {
        self.lock().values().flatten().sum()
    }

    /// Records that reading a file, or its first part, left out `rows` rows.
    pub(super) fn set(&self, location: &Path, rows: u64) {
        let mut files = self.lock();
        let known = files.entry(location.clone()).or_default();
        *known = (*known).max(Some(rows));
    }

    /// Records that another process reads a file, so that its count is not known here.
    pub(super) fn is_read_elsewhere(&self, location: &Path) {
        self.lock().entry(location.clone()).or_default();
    }

    /// Whether other processes read a file, and its count is not known.
    pub(super) fn is_unknown(&self, location: &Path) -> bool {
        self.lock().get(location) == Some(&None)
    }
}

/// Reads the text objects of a store: decompresses them and checks CSV.
#[derive(Debug, Clone)]
pub(super) struct TextStore {
    store: Arc<SourceStore>,
    compression: FileCompressionType,
    csv: Option<(CsvRules, Arc<SkippedRows>)>,
}

impl TextStore {
    pub(super) fn new(store: Arc<SourceStore>, compression: FileCompressionType) -> Self {
        Self { store, compression, csv: None }
    }

    /// Enables the check that all objects follow `rules`.
    pub(super) fn with_csv(self, rules: CsvRules, skipped: Arc<SkippedRows>) -> Self {
        Self { csv: Some((rules, skipped)), ..self }
    }

    /// Returns the same store without the CSV checks.
    pub(super) fn unchecked(&self) -> Self {
        Self { csv: None, ..self.clone() }
    }

    /// Returns the rules that objects must follow, if they are CSV.
    pub(super) fn csv_rules(&self) -> Option<CsvRules> {
        self.csv.as_ref().map(|(rules, _)| *rules)
    }

    /// Returns the store for parts of objects that are neither compressed nor CSV.
    pub(super) fn parts(&self) -> Result<Arc<dyn ObjectStore>> {
        if self.csv.is_some() {
            let source = "a part of a CSV file cannot be checked".into();
            return Err(object_store::Error::NotSupported { source });
        }
        Ok(Arc::new(VersionedStore::of_text(&self.store)))
    }

    /// Opens an object.
    pub(super) async fn get(&self, location: &Path) -> Result<GetResult> {
        let result = VersionedStore::of_text(&self.store).get(location).await?;
        if !self.compression.is_compressed() && self.csv.is_none() {
            return Ok(result);
        }
        let GetResult { payload, meta, range, attributes } = result;
        let input: Box<dyn Read + Send> = match payload {
            GetResultPayload::File(file, _) => Box::new(file),
            GetResultPayload::Stream(chunks) => Box::new(StreamReader::new(chunks)),
        };
        let checking = self.csv.as_ref().map(|(rules, skipped)| Checking {
            checker: Checker::new(*rules),
            skipped: Arc::clone(skipped),
            store: Arc::clone(&self.store),
            location: location.clone(),
        });
        let chunks = unpack(input, self.compression, checking).map(|chunk| chunk.map_err(generic)).boxed();
        Ok(GetResult { payload: GetResultPayload::Stream(chunks), meta, range, attributes })
    }
}

fn generic(error: io::Error) -> object_store::Error {
    object_store::Error::Generic { store: "decompression", source: Box::new(error) }
}

/// The state of a CSV file that is being checked.
struct Checking {
    checker: Checker,
    skipped: Arc<SkippedRows>,
    store: Arc<SourceStore>,
    location: Path,
}

impl Checking {
    /// Returns the rows that end in `chunk`, or the last rows of the file if `chunk` is empty.
    fn check(&mut self, chunk: &[u8]) -> io::Result<Vec<u8>> {
        let mut rows = Vec::with_capacity(chunk.len());
        let checked = match chunk {
            [] => self.checker.finish(&mut rows),
            chunk => self.checker.push(chunk, &mut rows),
        };
        self.skipped.set(&self.location, self.checker.skipped());
        checked.map(|()| rows).map_err(|error| {
            self.store.fail(&self.location, (error.message.clone(), error.hint.clone()));
            io::Error::other(error)
        })
    }
}

/// Decompresses and checks in a separate thread. The thread waits when it is two chunks ahead, and ends when the
/// stream is dropped.
///
/// DataFusion's streaming decoders stop after the first member of a concatenated file (`cat a.zst b.zst`); its
/// blocking readers read all members.
fn unpack(
    input: Box<dyn Read + Send>,
    compression: FileCompressionType,
    mut checking: Option<Checking>,
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
            let ends = chunk.is_empty();
            let checked = match &mut checking {
                // If reading failed, the end of the data is not the end of the file.
                Some(checking) if read.is_ok() || !ends => checking.check(&chunk),
                _ => Ok(chunk),
            };
            let (failed, goes_on) = match checked {
                Ok(rows) => (false, rows.is_empty() || send(Ok(Bytes::from(rows)))),
                Err(error) => (true, send(Err(error))),
            };
            if failed || !goes_on {
                return;
            }
            if let Err(error) = read {
                send(Err(error));
                return;
            }
            if ends {
                return;
            }
        }
    });
    // A panic of the decoder must not look like the end of the file.
    let panicked =
        stream::once(worker).filter_map(|ended| async { ended.err().map(|error| Err(error.into())) });
    receiver.chain(panicked).boxed()
}

/// A blocking reader of a stream of chunks.
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

    use object_store::memory::InMemory;

    use super::*;

    /// Compresses `text` with the engine's writer.
    async fn compressed(text: &[u8], compression: FileCompressionType) -> Vec<u8> {
        let chunks = stream::iter([Ok(Bytes::copy_from_slice(text))]).boxed();
        let chunks: Vec<_> = compression.convert_to_compress_stream(chunks).unwrap().collect().await;
        chunks.into_iter().flat_map(|chunk| chunk.unwrap()).collect()
    }

    /// Reads an object with these bytes from a local store, or from a remote one, which returns streams.
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
        let store = TextStore::new(Arc::new(SourceStore::of_tests(inner)), compression);
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
        // The data needs more than the first two requests.
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
    fn csv_is_checked_in_every_compression() {
        use crate::config::{Quote, Ragged};

        let rules = CsvRules {
            delimiter: b',',
            header: false,
            quote: Quote::Guarded,
            escape: None,
            ragged: Ragged::Skip,
            columns: Some(2),
        };
        // The text has more than one chunk.
        let text: String =
            (0..100_000).map(|row| format!("{row},x{}\n", if row % 10 == 0 { ",y" } else { "" })).collect();
        let kept: String =
            text.lines().filter(|line| !line.ends_with('y')).map(|line| format!("{line}\n")).collect();
        let read = |bytes: Vec<u8>, compression| async move {
            let (memory, path) = (InMemory::new(), Path::from("object"));
            memory.put(&path, bytes.into()).await.unwrap();
            let meta = memory.head(&path).await.unwrap();
            let store = Arc::new(SourceStore::of_tests(Arc::new(memory)));
            store.found(&meta);
            let skipped = Arc::new(SkippedRows::default());
            let text = TextStore::new(Arc::clone(&store), compression).with_csv(rules, Arc::clone(&skipped));
            for _ in 0..2 {
                let _ = text.get(&path).await.unwrap().bytes().await;
            }
            let read = text.get(&path).await.unwrap().bytes().await;
            (read.map(|bytes| bytes.to_vec()), skipped.total(), store.failure(&path))
        };
        runtime().block_on(async {
            for compression in COMPRESSIONS.into_iter().chain([FileCompressionType::UNCOMPRESSED]) {
                let packed = match compression.is_compressed() {
                    true => compressed(text.as_bytes(), compression).await,
                    false => text.clone().into_bytes(),
                };
                let (found, skipped, failure) = read(packed, compression).await;
                assert!(found.unwrap() == kept.as_bytes() && failure.is_none());
                assert_eq!(skipped, 10_000, "rows of a file that is read three times count once");
            }
            let (found, _, failure) = read(b"1,\"x\n".to_vec(), FileCompressionType::UNCOMPRESSED).await;
            assert!(found.is_err() && failure.unwrap().0.starts_with("line 1: a quote opens"));
        });
    }
}
