//! Decodes one row group, and converts it to a [`Batch`] of all its samples.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{
    Array, ArrayRef, ArrowPrimitiveType, AsArray, RecordBatch, RecordBatchOptions, RecordBatchReader,
};
use arrow::buffer::ScalarBuffer;
use arrow::compute::concat_batches;
use arrow::datatypes::{FieldRef, Float32Type, Int64Type, Schema as ArrowSchema, TimestampMicrosecondType};
use onefold_datasets::folded::{UnfoldedFeature, unfold_group};
use onefold_datasets::{
    FeatureGroup, KeptColumn, Layout, SESSION_COLUMN, TIME_COLUMN, missing_column, with_name,
};
use onefold_storage::Ranges;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::reader::ChunkReader;

use super::budget::Reservation;
use super::columns::{Encoded, Gathered};
use super::file::{OpenFile, OpenFiles, guarded};
use super::known_labels::KnownLabels;
use super::lists::read_lists;
use super::recipe::{Epoch, Recipe};
use super::row_group::RowGroup;
use super::stages::Stages;
use crate::batch::{Batch, BatchParts, Feature, Group, KeptValues};
use crate::error::{Error, Result};

/// A decoded column and its field.
type Column = (FieldRef, ArrayRef);

/// A decoded row group.
#[derive(Debug)]
pub(super) struct Decoded {
    /// All samples that sampling keeps. Groups have inverse indices and windows if the layout is `folded`, and are
    /// plain if it is `rows`.
    pub(super) batch: Batch,
    /// The row group that the samples come from.
    pub(super) origin: RowGroup,
    /// The row of each sample in the row group, if sampling dropped some.
    sampled: Option<Vec<u32>>,
    sessions: Option<ScalarBuffer<i64>>,
    ids: Vec<Ids>,
    /// The reservation of its memory.
    _reservation: Reservation,
}

/// Numbers of ids of some samples. Running sums store them for all samples before a sample of a row group.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Ids {
    /// The ids if every sample stores its own lists.
    pub(super) expanded: u64,
    /// The ids if every distinct row is stored once.
    pub(super) distinct: u64,
    /// The ids if every distinct row is stored once, without the ids that it shares with the previous row.
    pub(super) stored: u64,
}

impl RowGroup {
    /// Decodes the row group from its gathered columns.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if the bytes do not decode to the columns of the schema. The error names the column and, if it
    /// is known, the row.
    pub(super) fn decode(
        self,
        gathered: Gathered,
        epoch: &Epoch,
        mut reservation: Reservation,
        stages: &Stages,
    ) -> Result<Decoded> {
        let recipe = &*epoch.recipe;
        if recipe.checks.verify {
            self.verify(&gathered.encoded, stages)?;
        }
        let started = Instant::now();
        let columns = match self.decode_gathered(gathered, epoch, stages) {
            Ok(columns) => self.in_schema(columns)?,
            Err(error @ Error::Corrupt { column: None, .. }) => {
                return Err(self.find_damage().unwrap_or(error));
            }
            Err(error) => return Err(error),
        };
        stages.add(|figures| &mut figures.decode_seconds, started);
        let started = Instant::now();
        let mut batch = self.to_batch(&columns, recipe)?;
        let mut sessions = recipe.options.shuffle.is_some().then(|| session_ids(&columns));
        drop(columns);
        let sampled = recipe.sampler().map(|sampler| {
            let (rows, left) = sampler.run(&batch, epoch.number, self.first);
            batch = left;
            sessions = sessions.take().map(|all| rows.iter().map(|row| all[*row as usize]).collect());
            rows
        });
        let ids = count_ids(&batch);
        let beside = ids.len() * size_of::<Ids>() + sessions.as_ref().map_or(0, |s| 8 * s.len());
        reservation.resize(batch.bytes() + beside as u64);
        stages.add(|figures| &mut figures.arrange_seconds, started);
        Ok(Decoded { batch, origin: self, sampled, sessions, ids, _reservation: reservation })
    }

    /// Compares the bytes of columns with their checksums. `encoded` has an entry per file.
    fn verify(&self, encoded: &[Encoded], stages: &Stages) -> Result<()> {
        let (started, mut bytes) = (Instant::now(), 0);
        for (file, Encoded { ranges, mask }) in self.files.files.iter().zip(encoded) {
            let chunks = file.leaves(mask).zip(file.byte_ranges(self.index, mask)?);
            for ((leaf, column), Range { start, end }) in chunks {
                let chunk = ranges.get_bytes(start, (end - start) as usize);
                let chunk = chunk.map_err(|error| self.corrupt(column, None, error.to_string()))?;
                let checked = file.footer.check_chunk(self.index, leaf, &chunk);
                checked.map_err(|message| self.corrupt(column, None, message))?;
                bytes += end - start;
            }
        }
        stages.verified(started, bytes);
        Ok(())
    }

    /// Returns all columns: decodes the encoded ones, and adds those that were decoded by others or are cached.
    fn decode_gathered(&self, gathered: Gathered, epoch: &Epoch, stages: &Stages) -> Result<Vec<Column>> {
        let Gathered { encoded, claims, decoded, missing } = gathered;
        let started = Instant::now();
        let mut columns = self.decode_files(encoded)?;
        let took = started.elapsed() / u32::try_from(claims.len().max(1)).unwrap_or(u32::MAX);
        for claim in claims {
            if let Some((_, column)) = columns.iter().find(|(field, _)| *field.name() == *claim.chunk.column)
            {
                claim.fulfil(column, took);
            }
        }
        let missing = missing.into_iter().map(|chunk| {
            let cached = epoch.cached.as_ref().and_then(|cached| cached.cache.column(&chunk));
            let column = cached
                .map_or_else(|| self.read_column(&chunk.column, epoch.recipe.checks.verify, stages), Ok)?;
            Ok((chunk.column, column))
        });
        for (name, column) in decoded.into_iter().chain(missing.collect::<Result<Vec<_>>>()?) {
            let field = self.files.field(&name);
            let missing = || self.corrupt(&name, None, "it is missing".to_owned());
            columns.push((Arc::clone(field.ok_or_else(missing)?), column));
        }
        Ok(columns)
    }

    /// Renames the columns to their names in the schema, and adds the wanted columns that the files lack.
    fn in_schema(&self, columns: Vec<Column>) -> Result<RecordBatch> {
        let OpenFiles { files, lacking, changes, .. } = &*self.files;
        // Decoding has checked that every column has this number of rows.
        let rows = files.first().map_or(0, |file| file.row_group(self.index).num_rows() as usize);
        let named = |field: FieldRef| with_name(&field, changes.in_schema(field.name()).unwrap_or_default());
        let columns = columns.into_iter().map(|(field, column)| (named(field), column));
        let lacking = lacking.iter().map(|field| (Arc::clone(field), missing_column(field, rows)));
        let (fields, arrays): (Vec<FieldRef>, Vec<ArrayRef>) = columns.chain(lacking).unzip();
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        RecordBatch::try_new_with_options(Arc::new(ArrowSchema::new(fields)), arrays, &options)
            .map_err(|error| Error::invariant("decoded columns", error.to_string()))
    }

    /// Reads and decodes one column on this thread.
    fn read_column(&self, name: &str, verify: bool, stages: &Stages) -> Result<ArrayRef> {
        let columns = self.read_files(|file| file.mask(&[name]), verify, stages)?;
        let column = columns.into_iter().next().map(|(_, column)| column);
        column.ok_or_else(|| self.corrupt(name, None, "it was not decoded".to_owned()))
    }

    /// Reads and decodes columns of all files on this thread.
    fn read_files(
        &self,
        columns: impl Fn(&OpenFile) -> ProjectionMask,
        verify: bool,
        stages: &Stages,
    ) -> Result<Vec<Column>> {
        let read = |file: &OpenFile| {
            let mask = columns(file);
            Ok(Encoded { ranges: file.read(&self.files.storage, self.index, &mask)?, mask })
        };
        let encoded = self.files.files.iter().map(read).collect::<Result<Vec<_>>>()?;
        if verify {
            self.verify(&encoded, stages)?;
        }
        self.decode_files(encoded)
    }

    /// Reads and decodes only the labels `names`, on this thread: all labels of the schema, `[samples, labels]`, with
    /// `known` those of an earlier time.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if they cannot be decoded or, with `verify`, do not match their checksums.
    pub(super) fn read_labels(
        &self,
        names: &[String],
        known: Option<&KnownLabels>,
        verify: bool,
    ) -> Result<ScalarBuffer<f32>> {
        let changes = &self.files.changes;
        let mut stored: Vec<&str> = names.iter().map(|name| changes.in_files(name)).collect();
        stored.extend(known.map(|_| TIME_COLUMN));
        let columns = self.read_files(|file| file.mask(&stored), verify, &Stages::default())?;
        let columns = self.in_schema(columns)?;
        let times = known.map(|_| self.times(&columns)).transpose()?;
        self.labels(&columns, names, known.zip(times.as_deref()))
    }

    /// Decodes the columns of all files. `encoded` has an entry per file.
    fn decode_files(&self, encoded: Vec<Encoded>) -> Result<Vec<Column>> {
        let mut columns = Vec::new();
        for (file, encoded) in self.files.files.iter().zip(encoded) {
            columns.extend(self.decode_columns(file, encoded)?);
        }
        Ok(columns)
    }

    fn decode_columns(&self, file: &OpenFile, encoded: Encoded) -> Result<Vec<Column>> {
        guarded(&file.path, Some(self.index), || {
            let Encoded { ranges, mask } = encoded;
            let metadata = &file.footer.metadata;
            let parquet = metadata.parquet_schema();
            let wanted = (0..parquet.num_columns()).filter(|leaf| mask.leaf_included(*leaf));
            let (lists, flat): (Vec<_>, Vec<_>) =
                wanted.partition(|leaf| parquet.column(*leaf).max_rep_level() > 0);
            let flat = self.decode_flat(file, ranges.clone(), ProjectionMask::leaves(parquet, flat))?;
            let mut columns: Vec<Column> =
                flat.schema_ref().fields().iter().cloned().zip(flat.columns().iter().cloned()).collect();
            let ranges = Arc::new(ranges);
            for leaf in lists {
                let field = &file.fields()[parquet.get_column_root_idx(leaf)];
                let column = read_lists(&ranges, file.row_group(self.index), leaf, field)?;
                columns.push((Arc::clone(field), Arc::new(column)));
            }
            Ok(columns)
        })
    }

    /// Decodes columns that are not lists.
    fn decode_flat(
        &self,
        file: &OpenFile,
        ranges: Ranges,
        columns: ProjectionMask,
    ) -> Result<RecordBatch, String> {
        let rows = file.row_group(self.index).num_rows();
        let rows = usize::try_from(rows).map_err(|_| format!("{rows} rows"))?;
        let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(ranges, file.footer.metadata.clone())
            .with_projection(columns)
            .with_row_groups(vec![self.index])
            .with_batch_size(rows.max(1))
            .build()
            .map_err(|error| error.to_string())?;
        let schema = reader.schema();
        let mut batches = reader.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
        let whole = match batches.len() {
            1 => batches.remove(0),
            _ => concat_batches(&schema, &batches).map_err(|error| error.to_string())?,
        };
        if whole.num_rows() == rows {
            Ok(whole)
        } else {
            Err(format!("{} rows decoded of {rows}", whole.num_rows()))
        }
    }

    /// Decodes the columns one by one to find the damaged one, and returns its error.
    fn find_damage(&self) -> Option<Error> {
        let columns = self.files.files.iter().flat_map(|file| file.leaves(&file.columns));
        columns.map(|(_, name)| name).find_map(|name| {
            let error = self.read_files(|file| file.mask(&[name]), false, &Stages::default()).err()?;
            Some(match error {
                Error::Corrupt { path, row_group, row, message, .. } => {
                    Error::Corrupt { path, row_group, column: Some(name.to_owned()), row, message }
                }
                other => other,
            })
        })
    }

    fn to_batch(&self, columns: &RecordBatch, recipe: &Recipe) -> Result<Batch> {
        let schema = &recipe.schema;
        let groups = schema.groups.iter().map(|group| match recipe.layout {
            Layout::Folded if group.deduplicated => self.unfold(columns, group),
            Layout::Rows | Layout::Folded => self.plain_group(columns, group),
        });
        let groups = groups.collect::<Result<_>>()?;
        let timestamps = recipe.options.timestamps.then(|| self.times(columns)).transpose()?;
        let known = recipe.known_labels.as_ref().zip(timestamps.as_deref());
        let weights = schema.weight.as_slice();
        Batch::try_new(BatchParts {
            size: columns.num_rows(),
            dense: self.row_major(columns, &schema.dense)?,
            labels: self.labels(columns, &schema.labels, known)?,
            weights: if weights.is_empty() { None } else { Some(self.row_major(columns, weights)?) },
            timestamps,
            kept: recipe.kept.iter().map(|column| self.kept(columns, column)).collect::<Result<_>>()?,
            groups,
        })
    }

    /// Converts a column without nulls, or returns an error that names the column.
    fn column<T>(
        &self,
        columns: &RecordBatch,
        name: &str,
        convert: impl FnOnce(&ArrayRef) -> Option<T>,
    ) -> Result<T> {
        let wrong = |row: Option<usize>, message: String| self.corrupt(name, row, message);
        let column =
            columns.column_by_name(name).ok_or_else(|| wrong(None, "it was not decoded".to_owned()))?;
        if column.null_count() > 0 {
            let row = (0..column.len()).find(|row| column.is_null(*row));
            return Err(wrong(row, "a null where none may be".to_owned()));
        }
        convert(column).ok_or_else(|| wrong(None, format!("it was decoded as {}", column.data_type())))
    }

    /// Returns a kept column, which may contain nulls.
    fn kept(&self, columns: &RecordBatch, column: &KeptColumn) -> Result<KeptValues> {
        let wrong = |message: String| self.corrupt(&column.name, None, message);
        let values = columns.column_by_name(&column.name);
        let values = values.ok_or_else(|| wrong("it was not decoded".to_owned()))?;
        match *values.data_type() == column.kind.data_type() {
            true => Ok(KeptValues::new(column.name.as_str(), Arc::clone(values))),
            false => Err(wrong(format!("it was decoded as {}", values.data_type()))),
        }
    }

    /// Returns the values of a column without nulls.
    fn values<T: ArrowPrimitiveType>(
        &self,
        columns: &RecordBatch,
        name: &str,
    ) -> Result<ScalarBuffer<T::Native>> {
        self.column(columns, name, |column| {
            column.as_primitive_opt::<T>().map(|array| array.values().clone())
        })
    }

    fn times(&self, columns: &RecordBatch) -> Result<ScalarBuffer<i64>> {
        self.values::<TimestampMicrosecondType>(columns, TIME_COLUMN)
    }

    /// Returns the labels, `[samples, labels]`; with `known` those of an earlier time, for samples of these times.
    fn labels(
        &self,
        columns: &RecordBatch,
        names: &[String],
        known: Option<(&KnownLabels, &[i64])>,
    ) -> Result<ScalarBuffer<f32>> {
        let labels = self.row_major(columns, names)?;
        let Some((known, times)) = known else { return Ok(labels) };
        let mut labels = labels.to_vec();
        known.apply(&mut labels, times);
        Ok(labels.into())
    }

    /// Returns float columns interleaved to `[rows, columns]`.
    fn row_major(&self, columns: &RecordBatch, names: &[String]) -> Result<ScalarBuffer<f32>> {
        let sources = names.iter().map(|name| self.values::<Float32Type>(columns, name));
        let sources = sources.collect::<Result<Vec<_>>>()?;
        if let [only] = sources.as_slice() {
            return Ok(only.clone());
        }
        Ok(interleave(&sources, columns.num_rows()).into())
    }

    fn plain_group(&self, columns: &RecordBatch, group: &FeatureGroup) -> Result<Group> {
        let features = group.features.iter().map(|feature| self.plain_feature(columns, &feature.name));
        Group::try_new(group.name.as_str(), None, features.collect::<Result<_>>()?)
    }

    /// Returns a list column as a feature, without copying its ids.
    fn plain_feature(&self, columns: &RecordBatch, name: &str) -> Result<Feature> {
        let lists = self.column(columns, name, |column| column.as_list_opt::<i32>().cloned())?;
        let ids = lists.values().as_primitive_opt::<Int64Type>().filter(|ids| ids.null_count() == 0);
        let ids = ids.ok_or_else(|| self.corrupt(name, None, "its lists hold nulls or no ids".to_owned()))?;
        let offsets = lists.offsets();
        let sizes: Vec<i32> = offsets.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let feature =
            Feature::try_new(name, ids.values().clone(), offsets.inner().slice(0, lists.len()), sizes);
        feature.map_err(|error| self.corrupt(name, None, error.to_string()))
    }

    fn unfold(&self, columns: &RecordBatch, group: &FeatureGroup) -> Result<Group> {
        let unfolded = unfold_group(columns, group)
            .map_err(|error| self.corrupt(&error.column, error.row, error.message.clone()))?;
        let feature = |UnfoldedFeature { name, values, offsets, sizes }| {
            let feature = Feature::try_new(name.as_str(), values, offsets, sizes);
            feature.map_err(|error| self.corrupt(&name, None, error.to_string()))
        };
        let features = unfolded.features.into_iter().map(feature).collect::<Result<_>>()?;
        Group::try_new(group.name.as_str(), Some(unfolded.inverse.into()), features)
            .map_err(|error| self.corrupt(&group.name, None, error.to_string()))
    }

    fn corrupt(&self, column: &str, row: Option<usize>, message: String) -> Error {
        let has_column = |file: &&OpenFile| file.fields().iter().any(|field| field.name() == column);
        let file = self.files.files.iter().find(has_column);
        Error::Corrupt {
            path: file.map_or(&self.files.path, |file| &file.path).to_path_buf(),
            row_group: Some(self.index),
            column: Some(column.to_owned()),
            row,
            message,
        }
    }
}

impl Decoded {
    /// Counts the ids of a range of samples.
    pub(super) fn ids_in(&self, rows: &Range<usize>) -> Ids {
        let (start, end) = (self.ids[rows.start], self.ids[rows.end]);
        // A batch that begins with this range stores the whole row of the first sample, including ids that the sample
        // before it has too.
        let first = self.ids.get(rows.start + 1).copied().unwrap_or(start);
        let whole = first.expanded - start.expanded;
        Ids {
            expanded: end.expanded - start.expanded,
            distinct: end.distinct - start.distinct + whole - (first.distinct - start.distinct),
            stored: end.stored - start.stored + whole - (first.stored - start.stored),
        }
    }

    /// Returns the row of a sample in its row group.
    pub(super) fn row_of(&self, sample: usize) -> usize {
        self.sampled.as_ref().map_or(sample, |rows| rows[sample] as usize)
    }

    /// Returns the range of samples that come from a range of rows of the row group.
    pub(super) fn samples_in(&self, rows: Range<u64>) -> Range<usize> {
        let before = |row: u64| match &self.sampled {
            Some(sampled) => sampled.partition_point(|sample| u64::from(*sample) < row),
            None => usize::try_from(row).unwrap_or(usize::MAX).min(self.batch.size()),
        };
        before(rows.start)..before(rows.end)
    }

    /// Splits a range of samples into ranges that belong to one session each.
    pub(super) fn blocks(&self, samples: Range<usize>) -> Vec<Range<usize>> {
        let mut end = samples.start;
        let ids = self.sessions.as_deref().and_then(|ids| ids.get(samples)).unwrap_or_default();
        let blocks = ids.chunk_by(|a, b| a == b).map(|session| {
            end += session.len();
            end - session.len()..end
        });
        blocks.collect()
    }
}

fn session_ids(columns: &RecordBatch) -> ScalarBuffer<i64> {
    let ids =
        columns.column_by_name(SESSION_COLUMN).and_then(|column| column.as_primitive_opt::<Int64Type>());
    ids.map_or_else(|| vec![0; columns.num_rows()].into(), |ids| ids.values().clone())
}

/// Interleaves columns of `rows` floats each to `[rows, columns]`.
fn interleave(columns: &[ScalarBuffer<f32>], rows: usize) -> Vec<f32> {
    let mut matrix = vec![0.0; rows * columns.len()];
    for (i, column) in columns.iter().enumerate() {
        for (cell, value) in matrix.iter_mut().skip(i).step_by(columns.len()).zip(column.iter()) {
            *cell = *value;
        }
    }
    matrix
}

/// Returns running sums, `[samples + 1]`: the ids before every sample, and the total.
fn count_ids(batch: &Batch) -> Vec<Ids> {
    let mut ids = vec![Ids::default(); batch.size() + 1];
    for group in batch.groups() {
        // For each row: the number of its ids, and the number of its ids that it does not share with the previous
        // row.
        let mut of_rows = vec![(0_u64, 0_u64); group.rows()];
        for feature in group.features() {
            let (mut start, mut end) = (0, 0);
            let rows = feature.offsets().iter().zip(feature.sizes().iter());
            for ((all, fresh), (&offset, &size)) in of_rows.iter_mut().zip(rows) {
                let shared = if start <= offset && offset <= end { (end - offset).min(size) } else { 0 };
                *all += size as u64;
                *fresh += (size - shared) as u64;
                (start, end) = (offset, offset + size);
            }
        }
        let mut before = usize::MAX;
        for (sample, ids) in ids.iter_mut().skip(1).enumerate() {
            let row = group.row_of(sample);
            let (all, fresh) = of_rows[row];
            ids.expanded += all;
            if row != before {
                ids.distinct += all;
                ids.stored += if before.wrapping_add(1) == row && row > 0 { fresh } else { all };
            }
            before = row;
        }
    }
    for sample in 1..ids.len() {
        let before = ids[sample - 1];
        let ids = &mut ids[sample];
        ids.expanded += before.expanded;
        ids.distinct += before.distinct;
        ids.stored += before.stored;
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_interleaved_by_sample() {
        let columns = [vec![1.0, 2.0].into(), vec![10.0, 20.0].into(), vec![100.0, 200.0].into()];
        assert_eq!(interleave(&columns, 2), [1.0, 10.0, 100.0, 2.0, 20.0, 200.0]);
    }

    #[test]
    fn ids_are_counted_by_sample() {
        let a = Group::try_new(
            "a",
            Some(vec![0, 0, 1].into()),
            vec![Feature::try_new("a", vec![1_i64, 2, 3, 4], vec![0, 1], vec![3, 3]).unwrap()],
        );
        let b = Group::try_new("b", None, vec![Feature::from_rows("b", &[[1], [2], [3]]).unwrap()]);
        let batch = Batch::try_new(BatchParts {
            size: 3,
            dense: vec![].into(),
            labels: vec![0.0; 3].into(),
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups: vec![a.unwrap(), b.unwrap()],
        });
        let ids = count_ids(&batch.unwrap());
        assert_eq!(ids.iter().map(|ids| ids.expanded).collect::<Vec<_>>(), [0, 4, 8, 12]);
        assert_eq!(ids.iter().map(|ids| ids.distinct).collect::<Vec<_>>(), [0, 4, 5, 9]);
        assert_eq!(ids.iter().map(|ids| ids.stored).collect::<Vec<_>>(), [0, 4, 5, 7]);
    }
}
