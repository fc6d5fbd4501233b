//! The on-disk part of a cache: one file per item. A separate thread writes the files.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use arrow::array::{Array as _, RecordBatch};
use arrow::buffer::Buffer;
use arrow::datatypes::{Field, Schema};
use arrow::ipc::reader::StreamDecoder;
use arrow::ipc::writer::StreamWriter;
use bytes::Bytes;
use onefold_base::sync::locked;
use onefold_storage::commit::DirectoryLock;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use super::Item;
use crate::error::Result;

/// The maximal number of items in the write queue. If the disk is too slow, further items are not written, which
/// costs only time.
const QUEUE: usize = 1024;

/// The maximal number of processes that share a parent folder. Each process takes one folder below it.
const MOST_PROCESSES: usize = 1024;

/// A callback that receives the number of an item's file after the file is written.
type Written = Box<dyn FnOnce(u64) + Send>;

/// Items in files of a folder that only this process uses.
#[derive(Debug)]
pub(super) struct Disk {
    limit: u64,
    queue: SyncSender<(Item, u64, Written)>,
    most_queued: u64,
    shared: Arc<Shared>,
    _lock: DirectoryLock,
}

/// The state that the thread that writes the files shares.
#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    /// The total size of the queued items in bytes.
    queued: AtomicU64,
    /// Whether the disk part is closed, so that nothing more is written. Locked while a file is written.
    closed: Mutex<bool>,
    /// The error of the last item that could not be written.
    failure: Mutex<Option<io::Error>>,
}

impl Disk {
    /// Takes the first folder below `parent` that no other process uses, and empties it. The write queue accepts up
    /// to `most_queued` bytes, or one item of any size.
    pub(super) fn open(parent: &Path, limit: u64, most_queued: u64) -> Result<Self> {
        let (folder, lock) = take_folder(parent)?;
        remove_items(&folder)?;
        let (queue, items) = sync_channel(QUEUE);
        let (queued, closed, failure) = (AtomicU64::new(0), Mutex::new(false), Mutex::new(None));
        let shared = Arc::new(Shared { folder, queued, closed, failure });
        let of_thread = Arc::clone(&shared);
        let write = move || of_thread.write_all(&items);
        std::thread::Builder::new().name("onefold-cache".to_owned()).spawn(write)?;
        Ok(Self { limit, queue, most_queued, shared, _lock: lock })
    }

    /// Removes all items and stops writing.
    pub(super) fn close(&self) {
        let mut closed = locked(&self.shared.closed);
        *closed = true;
        // The next process removes files that cannot be removed now.
        let _ = remove_items(&self.shared.folder);
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the last write error since the previous call, if there was any.
    pub(super) fn take_failure(&self) -> Option<io::Error> {
        locked(&self.shared.failure).take()
    }

    /// Queues an item of `bytes` bytes for writing, unless it exceeds the limit or the queue is full. Calls `written`
    /// with the number of its file.
    pub(super) fn write(&self, item: Item, bytes: u64, written: impl FnOnce(u64) + Send + 'static) {
        let queued = &self.shared.queued;
        let waiting = queued.load(Ordering::Relaxed);
        if bytes > self.limit || (waiting > 0 && waiting.saturating_add(bytes) > self.most_queued) {
            return;
        }
        queued.fetch_add(bytes, Ordering::Relaxed);
        if self.queue.try_send((item, bytes, Box::new(written))).is_err() {
            queued.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Returns whether all queued items are written and their callbacks have run.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.shared.queued.load(Ordering::Acquire) == 0
    }

    /// Reads the item in a file. Returns `None` if it cannot be read or is damaged.
    pub(super) fn read(&self, file: u64) -> Option<Item> {
        decode(fs_err::read(path(&self.shared.folder, file)).ok()?)
    }

    pub(super) fn remove(&self, file: u64) {
        // The next process removes a file that cannot be removed now.
        let _ = fs_err::remove_file(path(&self.shared.folder, file));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.close();
    }
}

fn remove_items(folder: &Path) -> io::Result<()> {
    for entry in fs_err::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "item") {
            fs_err::remove_file(path)?;
        }
    }
    Ok(())
}

fn take_folder(parent: &Path) -> Result<(PathBuf, DirectoryLock)> {
    // Rejects a path with a `~` that the shell did not expand, because missing folders are created.
    onefold_storage::absolute(parent)?;
    for number in 0..MOST_PROCESSES {
        let folder = parent.join(format!("cache-{number}"));
        fs_err::create_dir_all(&folder)?;
        match DirectoryLock::take(&folder) {
            Ok(lock) => return Ok((folder, lock)),
            Err(onefold_storage::Error::Locked { .. }) => (),
            Err(error) => return Err(error.into()),
        }
    }
    Err(io::Error::other(format!("{MOST_PROCESSES} processes have their caches in `{}`", parent.display()))
        .into())
}

fn path(folder: &Path, file: u64) -> PathBuf {
    folder.join(format!("{file}.item"))
}

impl Shared {
    /// Writes items until the sender is dropped or the disk part is closed.
    fn write_all(&self, items: &Receiver<(Item, u64, Written)>) {
        for (file, (item, bytes, written)) in (0..).zip(items) {
            let closed = locked(&self.closed);
            if *closed {
                return;
            }
            let path = path(&self.folder, file);
            let result = fs_err::File::create(&path).and_then(|file| encode(&item, file));
            drop(closed);
            drop(item);
            match result {
                Ok(()) => written(file),
                // The disk may be full. An incomplete file is not an item.
                Err(error) => {
                    drop(fs_err::remove_file(path));
                    *locked(&self.failure) = Some(error);
                }
            }
            self.queued.fetch_sub(bytes, Ordering::Release);
        }
    }
}

/// A writer that computes the checksum of the written bytes.
struct Summed<W> {
    output: W,
    sum: Xxh3Default,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.output.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

/// Writes the item, a byte that identifies its form, and the XXH3 hash of both. The byte follows the item, so that
/// columns begin at aligned addresses after reading.
fn encode(item: &Item, output: impl Write) -> io::Result<()> {
    let mut output = Summed { output: io::BufWriter::new(output), sum: Xxh3Default::new() };
    match item {
        Item::Bytes(parts) => {
            parts.iter().try_for_each(|part| output.write_all(part))?;
            parts.iter().try_for_each(|part| output.write_all(&(part.len() as u64).to_le_bytes()))?;
            output.write_all(&(parts.len() as u64).to_le_bytes())?;
            output.write_all(&[0])?;
        }
        Item::Column(column) => {
            let field = Field::new("column", column.data_type().clone(), true);
            let schema = Arc::new(Schema::new(vec![field]));
            let batch = RecordBatch::try_new(Arc::clone(&schema), vec![Arc::clone(column)]);
            let mut writer = StreamWriter::try_new(&mut output, &schema).map_err(io::Error::other)?;
            writer.write(&batch.map_err(io::Error::other)?).map_err(io::Error::other)?;
            writer.finish().map_err(io::Error::other)?;
            drop(writer);
            output.write_all(&[1])?;
        }
    }
    let Summed { mut output, sum } = output;
    output.write_all(&sum.digest().to_le_bytes())?;
    output.flush()
}

fn decode(mut bytes: Vec<u8>) -> Option<Item> {
    let checksum = u64::from_le_bytes(*bytes.last_chunk::<8>()?);
    bytes.truncate(bytes.len() - 8);
    if xxh3_64(&bytes) != checksum {
        return None;
    }
    match bytes.pop()? {
        0 => decode_parts(&Bytes::from(bytes)).map(Item::Bytes),
        _ => {
            let mut decoder = StreamDecoder::new();
            let batch = decoder.decode(&mut Buffer::from_vec(bytes)).ok()??;
            batch.columns().first().cloned().map(Item::Column)
        }
    }
}

fn decode_parts(bytes: &Bytes) -> Option<Vec<Bytes>> {
    let number = |end: usize| {
        let start = end.checked_sub(8)?;
        usize::try_from(u64::from_le_bytes(bytes.get(start..end)?.try_into().ok()?)).ok()
    };
    let count = number(bytes.len())?;
    let lengths = bytes.len().checked_sub(8)?.checked_sub(count.checked_mul(8)?)?;
    let mut start = 0;
    let part = |i: usize| {
        let end = number(lengths + 8 * (i + 1))?.checked_add(start)?;
        let part = (end <= lengths).then(|| bytes.slice(start..end))?;
        start = end;
        Some(part)
    };
    (0..count).map(part).collect()
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array, ListArray};
    use arrow::datatypes::Int64Type;

    use super::*;

    #[test]
    fn decoding_restores_items_and_refuses_damaged_ones() {
        let parts: Vec<Bytes> = vec![Bytes::from_static(b"one"), Bytes::new(), Bytes::from_static(b"three")];
        let lists = ListArray::from_iter_primitive::<Int64Type, _, _>([Some(vec![Some(1), Some(2)]), None]);
        let columns: [ArrayRef; 2] = [Arc::new(Int64Array::from(vec![Some(5), None])), Arc::new(lists)];
        let items =
            columns.into_iter().map(Item::Column).chain([Item::Bytes(parts), Item::Bytes(Vec::new())]);
        for item in items {
            let mut bytes = Vec::new();
            encode(&item, &mut bytes).unwrap();
            match (decode(bytes.clone()).unwrap(), &item) {
                (Item::Bytes(found), Item::Bytes(expected)) => assert_eq!(&found, expected),
                (Item::Column(found), Item::Column(expected)) => assert_eq!(&found, expected),
                _ => panic!("another kind of item"),
            }
            for place in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[place] ^= 4;
                assert!(decode(damaged).is_none(), "byte {place}");
                assert!(decode(bytes[..place].to_vec()).is_none());
            }
        }
    }

    #[test]
    fn write_errors_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Disk::open(directory.path(), 100, 100).unwrap();
        // A folder has the name of the first file, so that the write fails.
        fs_err::create_dir(path(&disk.shared.folder, 0)).unwrap();
        disk.write(Item::Bytes(Vec::new()), 1, |_| panic!("it was not written"));
        while !disk.is_idle() {
            std::thread::yield_now();
        }
        assert!(disk.take_failure().unwrap().to_string().contains("0.item"));
        assert!(disk.take_failure().is_none());
        fs_err::remove_dir(path(&disk.shared.folder, 0)).unwrap();
    }

    #[test]
    fn processes_have_folders_of_their_own() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Disk::open(directory.path(), 10, 10).unwrap();
        let (first, second) = (open(), open());
        assert_ne!(first.shared.folder, second.shared.folder);
        fs_err::write(first.shared.folder.join("7.item"), "left behind").unwrap();
        let folder = first.shared.folder.clone();
        drop(first);
        let third = open();
        assert_eq!(third.shared.folder, folder);
        assert!(third.read(7).is_none());
    }
}
