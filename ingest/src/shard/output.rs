//! The folder of the segments. A local directory appears by one rename. In an object store, the file that lists the
//! segments is created last.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use onefold_base::fault::{option, text};
use onefold_storage::commit::{StagedDirectory, write_atomically};
use onefold_storage::{Created, Error, Storage, Upload};

use super::ShardOptions;
use crate::error::Result;
use crate::sources::{SEGMENTS_FILE, segment_name, segment_of};

/// The folder of the segments while they are written. Dropping it before [`commit`](Self::commit) removes what was
/// written.
#[derive(Debug)]
pub(super) struct Output {
    place: Place,
    /// The names of the segments.
    pub(super) names: Vec<String>,
}

#[derive(Debug)]
enum Place {
    Disk(StagedDirectory),
    Store(Box<Objects>),
}

/// The segments in an object store.
#[derive(Debug)]
struct Objects {
    storage: Storage,
    names: Vec<String>,
    overwrite: bool,
    /// Whether there may be segments that are not committed.
    begun: AtomicBool,
}

impl Output {
    /// Prepares the folder `out`, a path or a URL.
    ///
    /// # Errors
    ///
    /// If `out` is occupied by something else, or by segments that `options` does not allow to replace.
    pub(super) fn create(out: &Path, options: &ShardOptions) -> Result<Self> {
        let (count, overwrite) = (options.segments.max(1), options.overwrite);
        let names: Vec<String> = (0..count).map(|number| segment_name(number, count)).collect();
        let storage = Storage::open(out)?;
        let place = if storage.has_latency() {
            Place::Store(Box::new(Objects::new(storage, names.clone(), overwrite)?))
        } else {
            // The components omit a trailing slash.
            let folder: PathBuf = storage.full_path("").components().collect();
            Place::Disk(StagedDirectory::create(&folder, SEGMENTS_FILE, overwrite)?)
        };
        Ok(Self { place, names })
    }

    /// Returns the path or URL of a file.
    pub(super) fn path(&self, name: &str) -> String {
        let path = match &self.place {
            Place::Disk(staged) => staged.path().join(name),
            Place::Store(objects) => objects.storage.shown(name),
        };
        path.to_string_lossy().into_owned()
    }

    /// Creates a file.
    pub(super) fn file(&self, name: &str) -> Result<SegmentWriter> {
        let to = match &self.place {
            Place::Disk(staged) => Destination::File(fs_err::File::create(staged.path().join(name))?),
            Place::Store(objects) => Destination::Object(Box::new(objects.storage.upload(name)?)),
        };
        Ok(SegmentWriter { to, bytes: 0 })
    }

    /// Removes old segments from an object store. No file may be [finished](SegmentWriter::finish) before.
    pub(super) fn make_room(&self) -> Result<()> {
        let Place::Store(objects) = &self.place else { return Ok(()) };
        if objects.overwrite {
            // Without this file, what is left after a failure is not a set of segments.
            objects.storage.delete(vec![SEGMENTS_FILE.to_owned()])?;
            let old = objects.storage.list("", None)?.into_iter().map(|object| object.path);
            objects.storage.delete(old.filter(|path| segment_of(path).is_some()).collect())?;
        }
        objects.begun.store(true, Relaxed);
        Ok(())
    }

    /// Makes the segments visible, with the file that lists them.
    pub(super) fn commit(self, list: Vec<u8>) -> Result<()> {
        match self.place {
            Place::Disk(staged) => {
                write_atomically(&staged.path().join(SEGMENTS_FILE), &list)?;
                Ok(staged.commit()?)
            }
            Place::Store(objects) => {
                let created = objects.storage.create(SEGMENTS_FILE, list)?;
                // If another writer has committed, the segments may be those of that writer.
                objects.begun.store(false, Relaxed);
                match created {
                    Created::Yes => Ok(()),
                    Created::Exists => {
                        let hint =
                            "another process wrote segments there while this ran; choose another folder";
                        Err(Error::exists(objects.storage.location(), hint).into())
                    }
                }
            }
        }
    }
}

impl Objects {
    fn new(storage: Storage, names: Vec<String>, overwrite: bool) -> Result<Self> {
        let objects = storage.list("", None)?;
        let is_marked = objects.iter().any(|object| object.path == SEGMENTS_FILE);
        if !is_marked && objects.iter().any(|object| object.bytes > 0) {
            let hint = format!("it holds no `{SEGMENTS_FILE}`, so it is not replaced; choose another folder");
            return Err(Error::exists(storage.location(), hint).into());
        }
        if is_marked && !overwrite {
            let hint = text!["choose another folder, or replace it with ", option("overwrite")];
            return Err(Error::exists(storage.location(), hint).into());
        }
        Ok(Self { storage, names, overwrite, begun: AtomicBool::new(false) })
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        if *self.begun.get_mut() {
            self.storage.clean_up(std::mem::take(&mut self.names));
        }
    }
}

/// Writes the bytes of a segment.
#[derive(Debug)]
pub(super) struct SegmentWriter {
    to: Destination,
    bytes: u64,
}

#[derive(Debug)]
enum Destination {
    File(fs_err::File),
    Object(Box<Upload>),
}

impl SegmentWriter {
    /// Completes the segment, and returns its size in bytes.
    pub(super) fn finish(self) -> Result<u64> {
        match self.to {
            Destination::File(file) => file.sync_all()?,
            Destination::Object(upload) => upload.finish()?,
        }
        Ok(self.bytes)
    }
}

impl Write for SegmentWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = match &mut self.to {
            Destination::File(file) => file.write(bytes),
            Destination::Object(upload) => upload.write(bytes),
        }?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            Destination::File(file) => file.flush(),
            Destination::Object(upload) => upload.flush(),
        }
    }
}
