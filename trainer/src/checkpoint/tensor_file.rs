//! Reads and writes safetensors files tensor by tensor, so that no copy of a table is needed, on local disks
//! and in object stores.
//!
//! The format is that of the `safetensors` crate: eight bytes with the length of the header, a JSON header with
//! names, types, shapes and offsets, then the values, little-endian. A test reads these files with that crate.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use onefold_storage::{Object, Storage, Upload};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::Fault;
use crate::{Result, tensors};

/// The maximum length of a header in bytes, more than any model needs.
const MAX_HEADER: u64 = 100 << 20;
/// A file of at most this many bytes is read completely when it is opened; of a larger file, this many bytes
/// are read first.
const SMALL_FILE: u64 = 256 << 10;

/// A tensor to be written.
pub(crate) struct Entry<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) source: Source<'a>,
}

/// The source of the values of an [`Entry`]. Values are little-endian, like all platforms of libtorch's wheels.
pub(crate) enum Source<'a> {
    Owned(Vec<u8>),
    /// A contiguous `f32` tensor.
    Tensor(Tensor),
    /// A function that produces all bytes in order, in pieces of any size.
    Stream(Box<Stream<'a>>),
}

/// Passes bytes to a sink, and returns the sink's first error.
pub(crate) type Stream<'a> = dyn Fn(&mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> + 'a;

impl<'a> Entry<'a> {
    /// Creates an entry with a copy of `values`.
    pub(crate) fn owned<T: bytemuck::NoUninit>(
        name: impl Into<String>,
        dtype: Dtype,
        shape: Vec<usize>,
        values: &[T],
    ) -> Self {
        let source = Source::Owned(bytemuck::cast_slice(values).to_vec());
        Self { name: name.into(), dtype, shape, source }
    }

    /// Creates an entry for a parameter of the dense part.
    pub(crate) fn tensor(name: impl Into<String>, tensor: &Tensor) -> Self {
        let tensor = tensor.detach().contiguous();
        let shape = tensor.size().iter().map(|&side| side as usize).collect();
        Self { name: name.into(), dtype: Dtype::F32, shape, source: Source::Tensor(tensor) }
    }

    fn len(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.size()) as u64
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        match &self.source {
            Source::Owned(bytes) => out.write_all(bytes),
            Source::Tensor(tensor) => out.write_all(bytemuck::cast_slice(&tensors::to_vec(tensor))),
            Source::Stream(stream) => stream(&mut |bytes| out.write_all(bytes)),
        }
    }
}

/// The size and CRC-32C of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileFigures {
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

impl FileFigures {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.crc32c = crc32c::crc32c_append(self.crc32c, bytes);
    }
}

/// The header's description of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Info {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data_offsets: (u64, u64),
}

/// Writes the file `name`, atomically and durably.
///
/// # Errors
///
/// [`Error::Dataset`](crate::Error::Dataset) if the storage fails, or if an entry produces a different number
/// of bytes than its shape needs.
pub(crate) fn write(storage: &Storage, name: &str, mut entries: Vec<Entry<'_>>) -> Result<FileFigures> {
    // Larger types come first, so that all values are aligned.
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.dtype.size()));
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for entry in &entries {
        let data_offsets = (end, end + entry.len());
        end = data_offsets.1;
        let info = Info { dtype: entry.dtype, shape: entry.shape.clone(), data_offsets };
        header.insert(entry.name.clone(), serde_json::to_value(info).map_err(io::Error::other)?);
    }
    let mut header = serde_json::to_string(&header).map_err(io::Error::other)?;
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    upload(storage, name, 8 + header.len() as u64 + end, |out| write_entries(out, &header, &entries))
}

/// Uploads `bytes` bytes, which `write` writes, to the file `name`.
fn upload(
    storage: &Storage,
    name: &str,
    bytes: u64,
    write: impl FnOnce(&mut Counted<Upload>) -> io::Result<()>,
) -> Result<FileFigures> {
    let figures = FileFigures { bytes: 0, crc32c: 0 };
    let mut out = Counted { inner: storage.upload_of(name, bytes)?, figures };
    write(&mut out).map_err(|error| onefold_storage::Error::write(storage.shown(name), error))?;
    out.inner.finish()?;
    Ok(out.figures)
}

fn write_entries(out: &mut Counted<impl Write>, header: &str, entries: &[Entry<'_>]) -> io::Result<()> {
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for entry in entries {
        let start = out.figures.bytes;
        entry.write(out)?;
        let written = out.figures.bytes - start;
        if written != entry.len() {
            let (name, length) = (&entry.name, entry.len());
            return Err(io::Error::other(format!(
                "`{name}` has {written} bytes, and its shape takes {length}"
            )));
        }
    }
    Ok(())
}

/// Copies a local file to the storage.
pub(crate) fn copy_from(storage: &Storage, name: &str, path: &Path) -> Result<FileFigures> {
    let mut file = fs_err::File::open(path)?;
    let bytes = file.metadata()?.len();
    upload(storage, name, bytes, |out| io::copy(&mut file, out).map(drop))
}

/// Copies the file `name` to a local file.
pub(crate) fn copy_to(storage: &Storage, name: &str, path: &Path) -> Result<(), Fault> {
    let object = find(storage, name)?;
    let mut file = fs_err::File::create(path).map_err(onefold_storage::Error::from)?;
    storage.read_through(name, &object, |ranges| {
        ranges.parts().try_for_each(|(_, bytes)| file.write_all(bytes))
    })?;
    Ok(file.sync_all().map_err(onefold_storage::Error::from)?)
}

/// A writer, and the size and checksum of the written bytes.
struct Counted<W> {
    inner: W,
    figures: FileFigures,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.figures.add(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Computes the size and checksum of an object, reading it once, a few megabytes at a time.
pub(crate) fn figures(storage: &Storage, object: &Object) -> Result<FileFigures, onefold_storage::Error> {
    let mut figures = FileFigures { bytes: 0, crc32c: 0 };
    storage.read_through(&object.path, object, |ranges| {
        for (_, bytes) in ranges.parts() {
            figures.add(bytes);
        }
        Ok(())
    })?;
    Ok(figures)
}

/// Returns the object `name`; a missing object is an error.
pub(crate) fn find(storage: &Storage, name: &str) -> Result<Object, Fault> {
    Ok(storage.head(name)?.ok_or("it is missing")?)
}

/// An open safetensors file.
#[derive(Debug)]
pub(crate) struct TensorFile {
    storage: Storage,
    object: Object,
    header: BTreeMap<String, Info>,
    data: u64,
    /// The whole file, if it is small.
    content: Option<Vec<u8>>,
}

impl TensorFile {
    /// Opens a file and checks its header against its size.
    pub(crate) fn open(storage: &Storage, name: &str) -> Result<Self, Fault> {
        let object = find(storage, name)?;
        let bytes = object.bytes;
        let mut begin = vec![0; bytes.min(SMALL_FILE) as usize];
        storage.read_at(name, &object, 0, &mut begin)?;
        let length = begin.first_chunk().ok_or_else(|| format!("{bytes} bytes are no safetensors file"))?;
        let length = u64::from_le_bytes(*length);
        if length > MAX_HEADER || length > bytes - 8 {
            return Err(format!("its header has {length} bytes, the file {bytes}").into());
        }
        let data = 8 + length;
        if begin.len() < data as usize {
            let read = begin.len();
            begin.resize(data as usize, 0);
            storage.read_at(name, &object, read as u64, &mut begin[read..])?;
        }
        let header = parse_header(&begin[8..data as usize], bytes - data)?;
        let content = (begin.len() as u64 == bytes).then_some(begin);
        Ok(Self { storage: storage.clone(), object, header, data, content })
    }

    /// Returns the header's description of a tensor.
    pub(crate) fn info(&self, name: &str) -> Result<&Info, Fault> {
        self.header.get(name).ok_or_else(|| format!("it has no `{name}`").into())
    }

    /// Returns the name and description of every tensor.
    pub(crate) fn infos(&self) -> impl Iterator<Item = (&str, &Info)> {
        self.header.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// Reads a tensor into `values`; its type and size must match.
    pub(crate) fn read_into(&self, name: &str, dtype: Dtype, values: &mut [u8]) -> Result<(), Fault> {
        let info = self.info(name)?;
        let ((start, end), bytes) = (info.data_offsets, values.len());
        if info.dtype != dtype || end - start != bytes as u64 {
            let (found, length) = (info.dtype, end - start);
            let message =
                format!("`{name}` is {length} bytes of {found:?}, and should be {bytes} of {dtype:?}");
            return Err(message.into());
        }
        self.read_at(name, 0, values)
    }

    /// Reads bytes of a tensor, starting at offset `first`.
    pub(crate) fn read_at(&self, name: &str, first: u64, values: &mut [u8]) -> Result<(), Fault> {
        let (start, end) = self.info(name)?.data_offsets;
        if first.checked_add(values.len() as u64).is_none_or(|last| last > end - start) {
            return Err(format!("`{name}` has {} bytes", end - start).into());
        }
        let place = self.data + start + first;
        match &self.content {
            Some(content) => values.copy_from_slice(&content[place as usize..][..values.len()]),
            None => self.storage.read_at(&self.object.path, &self.object, place, values)?,
        }
        Ok(())
    }

    /// Reads a tensor of this type and any length.
    pub(crate) fn read<T: bytemuck::Pod>(&self, name: &str, dtype: Dtype) -> Result<Vec<T>, Fault> {
        assert_eq!(dtype.size(), size_of::<T>());
        let (start, end) = self.info(name)?.data_offsets;
        let mut values = vec![T::zeroed(); (end - start) as usize / size_of::<T>()];
        self.read_into(name, dtype, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

/// Parses a header. `bytes` is the size of the values of all tensors together.
fn parse_header(header: &[u8], bytes: u64) -> Result<BTreeMap<String, Info>, Fault> {
    let mut header: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(header).map_err(|error| format!("its header: {error}"))?;
    header.remove("__metadata__");
    let mut infos = BTreeMap::new();
    for (name, info) in header {
        let info: Info =
            serde_json::from_value(info).map_err(|error| format!("its header, `{name}`: {error}"))?;
        let values = info.shape.iter().try_fold(info.dtype.size(), |n, side| n.checked_mul(*side));
        let (start, end) = info.data_offsets;
        if end.checked_sub(start) != values.map(|n| n as u64) || end > bytes {
            return Err(format!("`{name}` is at {start}..{end} of {bytes} bytes").into());
        }
        infos.insert(name, info);
    }
    Ok(infos)
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    const NAME: &str = "x.safetensors";

    fn storage() -> (tempfile::TempDir, Storage) {
        let folder = tempfile::tempdir().unwrap();
        let storage = Storage::open(folder.path()).unwrap();
        (folder, storage)
    }

    fn found(storage: &Storage) -> FileFigures {
        figures(storage, &find(storage, NAME).unwrap()).unwrap()
    }

    fn written(storage: &Storage) -> FileFigures {
        let weights = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let rows = Source::Stream(Box::new(|sink| {
            [2, 0].iter().try_for_each(|row| sink(bytemuck::cast_slice(&weights[2 * row..][..2])))
        }));
        let entries = vec![
            Entry::owned("all", Dtype::F32, vec![3, 2], &weights),
            Entry { name: "some".into(), dtype: Dtype::F32, shape: vec![2, 2], source: rows },
            Entry::owned("doubles", Dtype::F64, vec![1], &[0.1_f64]),
            Entry::tensor("tensor", &Tensor::from_slice(&[1.5_f32, 2.5]).reshape([1, 2])),
        ];
        write(storage, NAME, entries).unwrap()
    }

    #[test]
    fn the_safetensors_crate_reads_what_is_written() {
        let (folder, storage) = storage();
        assert_eq!(written(&storage), found(&storage));
        let bytes = fs_err::read(folder.path().join(NAME)).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(stored.len(), 4);
        let some = stored.tensor("some").unwrap();
        assert_eq!((some.shape(), some.dtype()), (&[2, 2][..], Dtype::F32));
        assert_eq!(some.data(), bytemuck::cast_slice::<f32, u8>(&[5.0, 6.0, 1.0, 2.0]));
        assert_eq!(stored.tensor("doubles").unwrap().data(), 0.1_f64.to_le_bytes());
        assert_eq!(stored.tensor("tensor").unwrap().shape(), [1, 2]);
    }

    #[test]
    fn values_that_do_not_fit_their_shape_are_an_error() {
        let (folder, storage) = storage();
        let entries = vec![
            Entry::owned("all", Dtype::F32, vec![3, 2], &[1.0_f32; 6]),
            Entry::owned("few", Dtype::F32, vec![3], &[1.0_f32]),
        ];
        let error = write(&storage, NAME, entries).unwrap_err().to_string();
        assert!(error.contains("x.safetensors` cannot be written"), "{error}");
        assert!(error.contains("`few` has 4 bytes, and its shape takes 12"), "{error}");
        assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 0, "a part of the file is left");
    }

    #[test]
    fn reading_restores_written_tensors() {
        let (_folder, storage) = storage();
        written(&storage);
        let file = TensorFile::open(&storage, NAME).unwrap();
        assert_eq!(file.read::<f32>("some", Dtype::F32).unwrap(), [5.0, 6.0, 1.0, 2.0]);
        assert_eq!(file.read::<f64>("doubles", Dtype::F64).unwrap(), [0.1]);
        assert_eq!(file.read::<f64>("x", Dtype::F64).unwrap_err().to_string(), "it has no `x`");
        assert!(file.read::<f32>("doubles", Dtype::F32).unwrap_err().to_string().contains("8 bytes of F64"));
        let mut two = [0; 8];
        assert!(
            file.read_into("all", Dtype::F32, &mut two).unwrap_err().to_string().contains("24 bytes of F32")
        );
    }

    #[test]
    fn every_truncation_is_found() {
        let (folder, storage) = storage();
        let (whole, path) = (written(&storage), folder.path().join(NAME));
        let bytes = fs_err::read(&path).unwrap();
        for length in 0..bytes.len() {
            fs_err::write(&path, &bytes[..length]).unwrap();
            assert!(TensorFile::open(&storage, NAME).is_err(), "{length} of {} bytes", bytes.len());
        }
        for i in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[i] ^= 4;
            fs_err::write(&path, &damaged).unwrap();
            assert_ne!(found(&storage), whole);
            // The damaged header may describe anything; reading must not panic.
            let _ = TensorFile::open(&storage, NAME).map(|file| file.read::<f32>("all", Dtype::F32));
        }
    }

    /// Files that are not kept in memory are read by ranges.
    #[test]
    fn large_files_are_read_where_they_are_asked_for() {
        let (_folder, storage) = storage();
        let values: Vec<u32> = (0..3 << 20).collect();
        write(&storage, NAME, vec![Entry::owned("all", Dtype::U32, vec![values.len()], &values)]).unwrap();
        let file = TensorFile::open(&storage, NAME).unwrap();
        assert!(file.content.is_none());
        assert!(file.read::<u32>("all", Dtype::U32).unwrap() == values);
        let mut some = [0_u32; 3];
        file.read_at("all", 4 * 2_000_000, bytemuck::cast_slice_mut(&mut some)).unwrap();
        assert_eq!(some, [2_000_000, 2_000_001, 2_000_002]);
    }
}
