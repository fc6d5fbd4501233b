//! Tables in safetensors files: stored by shard, and restored to the shards of any plan.
//!
//! A shard is stored as `tables.TABLE[ROWS, COLUMNS].weight` and `….accumulator`; the name of a whole table has
//! no brackets. A delta contains only some rows, and their indices as `….rows`. To restore a shard, a rank
//! combines the stored rectangles that overlap it, one range of rows at a time.

use std::ops::Range;
use std::path::{Path, PathBuf};

use onefold_storage::Storage;
use safetensors::Dtype;

use super::tensor_file::{Entry, Source, TensorFile};
use super::{Fault, damaged};
use crate::embedding::{Buffer, EARLIER, Embeddings, RowSet, Shard};
use crate::{Error, Result};

/// The bytes of stored rows that are read at a time. This is enough for several parallel requests to an object
/// store.
const PIECE: usize = 32 << 20;
/// The prefix of the names of tables.
const PREFIX: &str = "tables.";

/// Returns the name of a shard: `tables.TABLE`, or `tables.TABLE[ROWS, COLUMNS]` for a part of a table.
fn shard_name(embeddings: &Embeddings, shard: &Shard) -> String {
    let config = &embeddings.tables()[shard.table];
    let name = format!("{PREFIX}{}", config.name);
    if shard.is_whole(config) { name } else { format!("{name}[{:?}, {:?}]", shard.rows, shard.columns) }
}

/// Returns the shards that this rank stores, with their indices. Only the lowest rank stores a replicated
/// shard.
fn stored_shards(embeddings: &Embeddings) -> impl Iterator<Item = (usize, &Shard)> {
    let shards = embeddings.shards();
    shards.iter().enumerate().filter(|(number, shard)| {
        embeddings.holds(*number) && !shards[..*number].iter().any(|other| shard.is_replica_of(other))
    })
}

/// Returns entries for all shards that this rank stores.
pub(crate) fn entries(embeddings: &Embeddings) -> Vec<Entry<'_>> {
    let entries = stored_shards(embeddings).flat_map(|(number, shard)| {
        let rows = (shard.rows.end - shard.rows.start) as usize;
        shard_entries(embeddings, number, &shard_name(embeddings, shard), None, rows)
    });
    entries.collect()
}

/// Returns entries for the rows that changed since [`Embeddings::clear_touched`], and their indices.
pub(crate) fn delta_entries(embeddings: &Embeddings) -> Vec<Entry<'_>> {
    let entries = stored_shards(embeddings).flat_map(|(number, shard)| {
        let (name, rows) = (shard_name(embeddings, shard), embeddings.touched(number));
        let numbers = Entry::owned(format!("{name}.rows"), Dtype::U32, vec![rows.len()], &rows);
        let count = rows.len();
        std::iter::once(numbers).chain(shard_entries(embeddings, number, &name, Some(rows), count))
    });
    entries.collect()
}

/// Returns entries for the buffers of a shard, or for some rows of them.
fn shard_entries<'a>(
    embeddings: &'a Embeddings,
    shard: usize,
    name: &str,
    rows: Option<Vec<u32>>,
    count: usize,
) -> Vec<Entry<'a>> {
    let entry = |(number, buffer): (usize, Buffer)| {
        let rows = rows.clone();
        let stream = move |sink: &mut dyn FnMut(&[u8]) -> std::io::Result<()>| {
            let rows = rows.as_deref().map_or(RowSet::All, RowSet::Chosen);
            embeddings.read(shard, number, rows, sink)
        };
        Entry {
            name: format!("{name}.{}", buffer.name),
            dtype: buffer.dtype,
            shape: vec![count, buffer.columns],
            source: Source::Stream(Box::new(stream)),
        }
    };
    embeddings.buffers(shard).into_iter().enumerate().map(entry).collect()
}

/// A stored shard.
#[derive(Debug)]
struct StoredShard {
    feature: String,
    name: String,
    rows: Range<u64>,
    columns: Range<u64>,
    /// The index of the file with all rows of the shard.
    file: usize,
    /// The file with newer values of some rows, and the indices of these rows in the shard, ascending.
    delta: Option<(usize, Vec<u32>)>,
}

/// The tables in a set of files.
#[derive(Debug)]
pub(crate) struct StoredTables {
    /// The paths of the files, for messages.
    paths: Vec<PathBuf>,
    files: Vec<TensorFile>,
    shards: Vec<StoredShard>,
}

/// The requested part of a table: some columns of one buffer.
struct Wanted<'a> {
    feature: &'a str,
    buffer: &'a Buffer,
    columns: &'a Range<u64>,
}

impl StoredTables {
    /// Opens `whole`, the files in `storage` with all rows of all tables, and `deltas`, the files with newer
    /// values of some rows of the same shards.
    pub(crate) fn open(storage: &Storage, whole: &[String], deltas: &[String]) -> Result<Self> {
        let mut stored = Self { paths: Vec::new(), files: Vec::new(), shards: Vec::new() };
        for name in whole {
            let (path, file) = (storage.shown(name), open(storage, name)?);
            let number = stored.files.len();
            for (name, info) in file.infos() {
                if let Some(name) = name.strip_suffix(".weight").filter(|name| name.starts_with(PREFIX)) {
                    let shard = StoredShard::of(name, &info.shape, number);
                    stored
                        .shards
                        .push(shard.ok_or_else(|| damaged(&path, format!("`{name}` is malformed")))?);
                }
            }
            stored.add(path, file);
        }
        for name in deltas {
            let (path, file) = (storage.shown(name), open(storage, name)?);
            let number = stored.files.len();
            for shard in &mut stored.shards {
                let name = format!("{}.rows", shard.name);
                if file.info(&name).is_err() {
                    continue;
                }
                let rows = file.read::<u32>(&name, Dtype::U32).map_err(|fault| damaged(&path, fault))?;
                let count = shard.rows.end - shard.rows.start;
                if !rows.is_sorted() || rows.last().is_some_and(|row| u64::from(*row) >= count) {
                    return Err(damaged(&path, format!("`{name}` has rows out of order or beyond {count}")));
                }
                shard.delta = Some((number, rows));
            }
            stored.add(path, file);
        }
        Ok(stored)
    }

    fn add(&mut self, path: PathBuf, file: TensorFile) {
        self.paths.push(path);
        self.files.push(file);
    }

    /// Restores the first `buffers` buffers of each of this rank's shards in `embeddings`; the weights are the
    /// first buffer. Rows from a delta are marked as touched.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if a part of a table is missing, has another type or is damaged.
    pub(crate) fn restore(&self, embeddings: &mut Embeddings, buffers: usize) -> Result<()> {
        self.restore_rows(embeddings, buffers, |_| u64::MAX)
    }

    /// Restores all buffers of tables that may have more rows than were stored; the additional rows keep their
    /// values.
    pub(crate) fn restore_grown(&self, embeddings: &mut Embeddings) -> Result<()> {
        let stored = |table: &str| {
            let own = self.shards.iter().filter(|shard| shard.feature == table);
            own.map(|shard| shard.rows.end).max().unwrap_or(0)
        };
        self.restore_rows(embeddings, usize::MAX, stored)
    }

    /// Restores the rows below `end` of each table.
    fn restore_rows(
        &self,
        embeddings: &mut Embeddings,
        buffers: usize,
        end: impl Fn(&str) -> u64,
    ) -> Result<()> {
        embeddings.clear_touched();
        for (number, shard) in embeddings.shards().to_vec().iter().enumerate() {
            if !embeddings.holds(number) {
                continue;
            }
            let feature = embeddings.tables()[shard.table].name.clone();
            let end = end(&feature).clamp(shard.rows.start, shard.rows.end);
            let rows = RowSet::First((end - shard.rows.start) as usize);
            for (place, buffer) in embeddings.buffers(number).into_iter().enumerate().take(buffers) {
                if buffer.is_usage() && !self.holds(&feature, buffer.name) {
                    // The earlier run had no eviction, so all of its rows may be in use.
                    embeddings.write(number, place, rows, &mut |bytes| {
                        bytes.fill(EARLIER);
                        Ok(())
                    })?;
                    continue;
                }
                let wanted = Wanted { feature: &feature, buffer: &buffer, columns: &shard.columns };
                let (mut next, mut failed) = (shard.rows.start, None);
                let written = embeddings.write(number, place, rows, &mut |bytes| {
                    let rows = (bytes.len() / buffer.row_bytes().max(1)) as u64;
                    let read = self.read(&wanted, next..next + rows, bytes);
                    next += rows;
                    read.map_err(|error| {
                        failed = Some(error);
                        std::io::Error::from(std::io::ErrorKind::InvalidData)
                    })
                });
                if let Some(error) = failed {
                    return Err(error);
                }
                written?;
            }
            embeddings.touch(number, &self.touched(&feature, &shard.rows));
        }
        Ok(())
    }

    /// Returns whether all stored shards of a table have a buffer.
    fn holds(&self, feature: &str, buffer: &str) -> bool {
        let mut own = self.shards.iter().filter(|shard| shard.feature == feature);
        own.all(|shard| self.files[shard.file].info(&format!("{}.{buffer}", shard.name)).is_ok())
    }

    /// Returns the rows of `rows` for which a delta has newer values, relative to `rows.start`.
    fn touched(&self, feature: &str, rows: &Range<u64>) -> Vec<u32> {
        let own = self.shards.iter().filter(|shard| shard.feature == feature);
        let touched =
            own.filter_map(|shard| Some((shard, &shard.delta.as_ref()?.1))).flat_map(|(shard, touched)| {
                let of_table = touched.iter().map(|row| u64::from(*row) + shard.rows.start);
                of_table.filter(|row| rows.contains(row)).map(|row| (row - rows.start) as u32)
            });
        touched.collect()
    }

    /// Returns an entry with a buffer of a whole table.
    pub(crate) fn whole<'a>(
        &'a self,
        name: String,
        feature: &'a str,
        rows: u64,
        dim: u64,
        buffer: Buffer,
    ) -> Entry<'a> {
        let stream = move |sink: &mut dyn FnMut(&[u8]) -> std::io::Result<()>| {
            let wanted = Wanted { feature, buffer: &buffer, columns: &(0..dim) };
            let size = buffer.row_bytes();
            let step = (PIECE / size.max(1)).max(1) as u64;
            let mut bytes = Vec::new();
            for first in (0..rows).step_by(step as usize) {
                let end = (first + step).min(rows);
                bytes.resize((end - first) as usize * size, 0);
                self.read(&wanted, first..end, &mut bytes).map_err(std::io::Error::other)?;
                sink(&bytes)?;
            }
            Ok(())
        };
        let shape = vec![rows as usize, buffer.columns];
        Entry { name, dtype: buffer.dtype, shape, source: Source::Stream(Box::new(stream)) }
    }

    /// Fills `output` with rows of the requested part, from all shards that overlap it. If a buffer has one
    /// value per row for all columns (an accumulator), the result is the mean of the shards' values, weighted
    /// by their numbers of columns.
    fn read(&self, wanted: &Wanted<'_>, rows: Range<u64>, output: &mut [u8]) -> Result<()> {
        if output.is_empty() {
            return Ok(());
        }
        let overlap = |a: &Range<u64>, b: &Range<u64>| a.start.max(b.start)..a.end.min(b.end);
        let mut covered = 0;
        output.fill(0);
        for shard in self.shards.iter().filter(|shard| shard.feature == wanted.feature) {
            let (own_rows, own_columns) =
                (overlap(&shard.rows, &rows), overlap(&shard.columns, wanted.columns));
            if own_rows.is_empty() || own_columns.is_empty() {
                continue;
            }
            covered += (own_rows.end - own_rows.start) * (own_columns.end - own_columns.start);
            let stored = self.width(shard, wanted)?;
            let step = (PIECE / (stored * wanted.buffer.dtype.size()).max(1)).max(1) as u64;
            let mut first = own_rows.start;
            while first < own_rows.end {
                let end = (first + step).min(own_rows.end);
                let piece = self.rows_of(shard, wanted, stored, first..end)?;
                let output = &mut output[(first - rows.start) as usize * wanted.buffer.row_bytes()..];
                place(&piece, (shard, stored), wanted, &own_columns, output);
                first = end;
            }
        }
        let all = (rows.end - rows.start) * (wanted.columns.end - wanted.columns.start);
        if covered == all {
            return Ok(());
        }
        let message = format!(
            "`{PREFIX}{}` has {covered} of the {all} values of rows {rows:?} and columns {:?}",
            wanted.feature, wanted.columns
        );
        Err(damaged(self.paths.first().map_or(Path::new(""), PathBuf::as_path), message))
    }

    /// Returns the number of values per row in a stored shard's buffer.
    fn width(&self, shard: &StoredShard, wanted: &Wanted<'_>) -> Result<usize> {
        let columns = (shard.columns.end - shard.columns.start) as usize;
        let wanted_columns = (wanted.columns.end - wanted.columns.start) as usize;
        let (buffer, name) = (wanted.buffer, format!("{}.{}", shard.name, wanted.buffer.name));
        let expected =
            if buffer.by_column { buffer.columns / wanted_columns * columns } else { buffer.columns };
        let info = self.files[shard.file].info(&name).map_err(|fault| self.damaged(shard.file, fault))?;
        let rows = (shard.rows.end - shard.rows.start) as usize;
        if info.dtype != buffer.dtype || info.shape != [rows, expected] {
            let message = format!(
                "`{name}` is {:?} {:?}, and should be {:?} {:?}",
                info.dtype,
                info.shape,
                buffer.dtype,
                [rows, expected]
            );
            return Err(self.damaged(shard.file, message));
        }
        Ok(expected)
    }

    /// Reads rows of a stored shard's buffer, including newer values from a delta.
    fn rows_of(
        &self,
        shard: &StoredShard,
        wanted: &Wanted<'_>,
        width: usize,
        rows: Range<u64>,
    ) -> Result<Vec<u8>> {
        let name = format!("{}.{}", shard.name, wanted.buffer.name);
        let size = width * wanted.buffer.dtype.size();
        let first = rows.start - shard.rows.start;
        let mut bytes = vec![0; (rows.end - rows.start) as usize * size];
        let read = self.files[shard.file].read_at(&name, first * size as u64, &mut bytes);
        read.map_err(|fault| self.damaged(shard.file, fault))?;
        if let Some((file, touched)) = &shard.delta {
            let last = first + rows.end - rows.start;
            let begin = touched.partition_point(|row| u64::from(*row) < first);
            let end = touched.partition_point(|row| u64::from(*row) < last);
            let mut newer = vec![0; (end - begin) * size];
            let read = self.files[*file].read_at(&name, (begin * size) as u64, &mut newer);
            read.map_err(|fault| self.damaged(*file, fault))?;
            for (row, newer) in touched[begin..end].iter().zip(newer.chunks_exact(size.max(1))) {
                bytes[(u64::from(*row) - first) as usize * size..][..size].copy_from_slice(newer);
            }
        }
        Ok(bytes)
    }

    fn damaged(&self, file: usize, fault: impl Into<Fault>) -> Error {
        damaged(&self.paths[file], fault)
    }
}

impl StoredShard {
    /// Parses the name of a shard, without the suffix of the buffer; `shape` is the shape of its weights.
    /// Returns `None` if the name is malformed.
    fn of(name: &str, shape: &[usize], file: usize) -> Option<Self> {
        let &[rows, columns] = shape else { return None };
        let (mut feature, mut range) = (name.strip_prefix(PREFIX)?, (0..rows as u64, 0..columns as u64));
        if let Some((whole, rest)) = feature.strip_suffix(']').and_then(|rest| rest.rsplit_once('[')) {
            let ranges =
                rest.split_once(", ").and_then(|(rows, columns)| Some((bounds(rows)?, bounds(columns)?)));
            if let Some((of_rows, of_columns)) = ranges {
                let fits = of_rows.end.checked_sub(of_rows.start) == Some(rows as u64)
                    && of_columns.end.checked_sub(of_columns.start) == Some(columns as u64);
                (feature, range) = (whole, (of_rows, of_columns));
                if !fits {
                    return None;
                }
            }
        }
        let (rows, columns) = range;
        Some(Self { feature: feature.to_owned(), name: name.to_owned(), rows, columns, file, delta: None })
    }
}

/// Parses a range such as `3..7`.
fn bounds(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once("..")?;
    Some(start.parse().ok()?..end.parse().ok()?)
}

/// Copies stored rows, with `stored` values each, to their columns in rows of the requested part.
fn place(
    piece: &[u8],
    (shard, stored): (&StoredShard, usize),
    wanted: &Wanted<'_>,
    columns: &Range<u64>,
    output: &mut [u8],
) {
    let (buffer, value) = (wanted.buffer, wanted.buffer.dtype.size());
    let rows =
        piece.chunks_exact((stored * value).max(1)).zip(output.chunks_exact_mut(buffer.row_bytes().max(1)));
    let wanted_columns = (wanted.columns.end - wanted.columns.start) as usize;
    if buffer.is_usage() {
        // All column shards of a table look up the same rows.
        rows.for_each(|(stored, output)| {
            output.iter_mut().zip(stored).for_each(|(out, stored)| *out |= stored)
        });
        return;
    }
    if !buffer.by_column {
        let share = (columns.end - columns.start) as f32 / wanted_columns as f32;
        for (stored, output) in rows {
            for (output, stored) in output.as_chunks_mut().0.iter_mut().zip(stored.as_chunks().0) {
                // With a single part, the sum equals the stored value exactly.
                let sum = f32::from_le_bytes(*output) + share * f32::from_le_bytes(*stored);
                *output = sum.to_le_bytes();
            }
        }
        return;
    }
    let stored_columns = (shard.columns.end - shard.columns.start) as usize;
    let length = (columns.end - columns.start) as usize * value;
    let from = (columns.start - shard.columns.start) as usize;
    let to = (columns.start - wanted.columns.start) as usize;
    for (stored, output) in rows {
        for part in 0..buffer.columns / wanted_columns.max(1) {
            let stored = &stored[(part * stored_columns + from) * value..][..length];
            output[(part * wanted_columns + to) * value..][..length].copy_from_slice(stored);
        }
    }
}

/// Opens a file of a run.
pub(crate) fn open(storage: &Storage, name: &str) -> Result<TensorFile> {
    TensorFile::open(storage, name).map_err(|fault| damaged(&storage.shown(name), fault))
}
