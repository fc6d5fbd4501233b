//! safetensors files, written and read tensor by tensor, so that no copy of a table is made on the way.
//!
//! The format is that of the `safetensors` crate, which a test reads these files with: eight bytes of header length, a JSON
//! header of names, types, shapes and places, then the values, little-endian.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::tensors;

/// More bytes than a header of any model has.
const MAX_HEADER: u64 = 100 << 20;
/// Bytes that a checksum takes at a time.
const BLOCK: usize = 1 << 20;

/// A tensor to be written.
pub(crate) struct Entry<'a> {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) source: Source<'a>,
}

/// Where the values of an [`Entry`] are, little-endian as all machines are that libtorch's wheels run on.
pub(crate) enum Source<'a> {
    Owned(Vec<u8>),
    /// A contiguous `f32` tensor.
    Tensor(Tensor),
    /// What gives all bytes in order, as many at a time as it likes.
    Stream(Box<Stream<'a>>),
}

/// Gives bytes to a sink, whose first error it returns.
pub(crate) type Stream<'a> = dyn Fn(&mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> + 'a;

impl<'a> Entry<'a> {
    /// A copy of numbers.
    pub(crate) fn owned<T: bytemuck::NoUninit>(
        name: impl Into<String>,
        dtype: Dtype,
        shape: Vec<usize>,
        values: &[T],
    ) -> Self {
        let source = Source::Owned(bytemuck::cast_slice(values).to_vec());
        Self { name: name.into(), dtype, shape, source }
    }

    /// A parameter of the dense part.
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
            Source::Tensor(tensor) => {
                let tensor = tensor.to_device(tch::Device::Cpu);
                out.write_all(bytemuck::cast_slice(tensors::as_slice(&tensor)))
            }
            Source::Stream(stream) => stream(&mut |bytes| out.write_all(bytes)),
        }
    }
}

/// Size and CRC-32C of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileFigures {
    pub(crate) bytes: u64,
    pub(crate) crc32c: u32,
}

/// What the header says of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Info {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data_offsets: (u64, u64),
}

/// Writes the file at `path`, which is on the disk afterwards.
pub(crate) fn write(path: &Path, entries: Vec<Entry<'_>>) -> io::Result<FileFigures> {
    let mut entries = entries;
    // Types of more bytes come first, so that all values are aligned.
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.dtype.size()));
    let mut end = 0;
    let mut header = serde_json::Map::new();
    for entry in &entries {
        let data_offsets = (end, end + entry.len());
        end = data_offsets.1;
        let info = Info { dtype: entry.dtype, shape: entry.shape.clone(), data_offsets };
        header.insert(entry.name.clone(), serde_json::to_value(info)?);
    }
    let mut header = serde_json::to_string(&header)?;
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let file = fs_err::File::create(path)?;
    let mut out = Counted { inner: BufWriter::with_capacity(BLOCK, file), bytes: 0, crc32c: 0 };
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    for entry in &entries {
        let start = out.bytes;
        entry.write(&mut out)?;
        let written = out.bytes - start;
        if written != entry.len() {
            let (path, name, length) = (path.display(), &entry.name, entry.len());
            let message = format!("`{path}`: `{name}` has {written} bytes, and its shape takes {length}");
            return Err(io::Error::other(message));
        }
    }
    out.inner.flush()?;
    out.inner.get_ref().sync_all()?;
    Ok(FileFigures { bytes: out.bytes, crc32c: out.crc32c })
}

struct Counted<W> {
    inner: W,
    bytes: u64,
    crc32c: u32,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.bytes += written as u64;
        self.crc32c = crc32c::crc32c_append(self.crc32c, &bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The size and checksum of a file as it is.
pub(crate) fn figures(path: &Path) -> io::Result<FileFigures> {
    let mut file = fs_err::File::open(path)?;
    let (mut figures, mut block) = (FileFigures { bytes: 0, crc32c: 0 }, vec![0; BLOCK]);
    loop {
        let read = file.read(&mut block)?;
        if read == 0 {
            return Ok(figures);
        }
        figures.bytes += read as u64;
        figures.crc32c = crc32c::crc32c_append(figures.crc32c, &block[..read]);
    }
}

/// An open safetensors file. Errors are texts that say what is wrong with it.
#[derive(Debug)]
pub(crate) struct TensorFile {
    file: fs_err::File,
    header: BTreeMap<String, Info>,
    data: u64,
}

impl TensorFile {
    /// Opens a file and checks that its header fits its size.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let text = |error: io::Error| error.to_string();
        let mut file = fs_err::File::open(path).map_err(text)?;
        let bytes = file.metadata().map_err(text)?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|_| format!("{bytes} bytes are no safetensors file"))?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > bytes - 8 {
            return Err(format!("its header has {length} bytes, the file {bytes}"));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(text)?;
        let mut header: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| format!("its header: {error}"))?;
        header.remove("__metadata__");
        let data = 8 + length;
        let mut infos = BTreeMap::new();
        for (name, info) in header {
            let info: Info =
                serde_json::from_value(info).map_err(|error| format!("its header, `{name}`: {error}"))?;
            let values = info.shape.iter().try_fold(info.dtype.size(), |n, side| n.checked_mul(*side));
            let (start, end) = info.data_offsets;
            if end.checked_sub(start) != values.map(|n| n as u64) || end > bytes - data {
                return Err(format!("`{name}` stands at {start}..{end} of {} bytes", bytes - data));
            }
            infos.insert(name, info);
        }
        Ok(Self { file, header: infos, data })
    }

    /// What the header says of a tensor.
    pub(crate) fn info(&self, name: &str) -> Result<&Info, String> {
        self.header.get(name).ok_or_else(|| format!("it has no `{name}`"))
    }

    /// The tensors' names and what the header says of each.
    pub(crate) fn infos(&self) -> impl Iterator<Item = (&str, &Info)> {
        self.header.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// Reads a tensor of this type and so many bytes into `values`.
    pub(crate) fn read_into(&mut self, name: &str, dtype: Dtype, values: &mut [u8]) -> Result<(), String> {
        let info = self.info(name)?;
        let ((start, end), bytes) = (info.data_offsets, values.len());
        if info.dtype != dtype || end - start != bytes as u64 {
            let (found, length) = (info.dtype, end - start);
            return Err(format!(
                "`{name}` is {length} bytes of {found:?}, and should be {bytes} of {dtype:?}"
            ));
        }
        self.read_at(name, 0, values)
    }

    /// Reads the bytes of a tensor from number `first` on.
    pub(crate) fn read_at(&mut self, name: &str, first: u64, values: &mut [u8]) -> Result<(), String> {
        let (start, end) = self.info(name)?.data_offsets;
        if first.checked_add(values.len() as u64).is_none_or(|last| last > end - start) {
            return Err(format!("`{name}` has {} bytes", end - start));
        }
        let place = SeekFrom::Start(self.data + start + first);
        let read = self.file.seek(place).and_then(|_| self.file.read_exact(values));
        read.map_err(|error| format!("`{name}`: {error}"))
    }

    /// Reads a tensor of this type, however long it is.
    pub(crate) fn read<T: bytemuck::Pod>(&mut self, name: &str, dtype: Dtype) -> Result<Vec<T>, String> {
        assert_eq!(dtype.size(), size_of::<T>());
        let (start, end) = self.info(name)?.data_offsets;
        let mut values = vec![T::zeroed(); (end - start) as usize / size_of::<T>()];
        self.read_into(name, dtype, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    fn written(path: &Path) -> FileFigures {
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
        write(path, entries).unwrap()
    }

    #[test]
    fn the_safetensors_crate_reads_what_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        assert_eq!(written(&path), figures(&path).unwrap());
        let bytes = fs_err::read(&path).unwrap();
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
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let entries = vec![
            Entry::owned("all", Dtype::F32, vec![3, 2], &[1.0_f32; 6]),
            Entry::owned("few", Dtype::F32, vec![3], &[1.0_f32]),
        ];
        let error = write(&path, entries).unwrap_err().to_string();
        assert!(error.ends_with("x.safetensors`: `few` has 4 bytes, and its shape takes 12"), "{error}");
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        written(&path);
        let mut file = TensorFile::open(&path).unwrap();
        assert_eq!(file.read::<f32>("some", Dtype::F32).unwrap(), [5.0, 6.0, 1.0, 2.0]);
        assert_eq!(file.read::<f64>("doubles", Dtype::F64).unwrap(), [0.1]);
        assert_eq!(file.read::<f64>("x", Dtype::F64).unwrap_err(), "it has no `x`");
        assert!(file.read::<f32>("doubles", Dtype::F32).unwrap_err().contains("8 bytes of F64"));
        let mut two = [0; 8];
        assert!(file.read_into("all", Dtype::F32, &mut two).unwrap_err().contains("24 bytes of F32"));
    }

    #[test]
    fn every_truncation_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let whole = written(&path);
        let bytes = fs_err::read(&path).unwrap();
        for length in 0..bytes.len() {
            fs_err::write(&path, &bytes[..length]).unwrap();
            assert!(TensorFile::open(&path).is_err(), "{length} of {} bytes", bytes.len());
        }
        for i in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[i] ^= 4;
            fs_err::write(&path, &damaged).unwrap();
            assert_ne!(figures(&path).unwrap(), whole);
            // Whatever the header says then, reading it does not panic.
            let _ = TensorFile::open(&path).map(|mut file| file.read::<f32>("all", Dtype::F32));
        }
    }
}
