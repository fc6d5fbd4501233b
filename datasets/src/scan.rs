//! Reads data files for verification and reports: one column of a row group at a time, with the lists of both
//! layouts as views. It verifies the checksum of each column. A problem in a file is a [`Problem`] with its
//! location, inside an [`Error::Damaged`](crate::Error::Damaged). Any other error means that the storage
//! could not deliver the file, and says nothing about its contents.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use arrow::array::{
    Array, ArrayRef, ArrowPrimitiveType, AsArray, Float32Array, Int64Array, ListArray, ListViewArray,
    RecordBatch, RecordBatchReader, TimestampMicrosecondArray,
};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::compute::concat_batches;
use arrow::datatypes::{
    DataType, Field, FieldRef, Float32Type, Int64Type, Schema as ArrowSchema, SchemaRef,
    TimestampMicrosecondType,
};
use onefold_base::process::catch_panic;
use onefold_base::sync::locked;
use onefold_storage::{Object, Ranges, Storage};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::reader::ChunkReader;
use rayon::prelude::*;

use crate::folded::{UnfoldedGroup, unfold_group};
use crate::footer::{Footer, check_counts, decoding_bytes, find, same_field};
use crate::lists::Lists;
use crate::{
    ColumnChanges, DataFile, FeatureGroup, FileSet, KeptColumn, Layout, Problem, Result, Schema, Snapshot,
    SparseFeature, missing_column, schema, with_name,
};

/// The files of a file set, with their footers.
#[derive(Debug)]
pub struct OpenFiles {
    /// The path of the first file, relative to the dataset's directory.
    pub path: String,
    storage: Storage,
    files: Vec<OpenFile>,
    /// The number of rows of each row group.
    rows: Vec<usize>,
    /// Columns of the dataset that the files do not have.
    lacking: Vec<FieldRef>,
    changes: ColumnChanges,
    /// The fetched bytes of all columns, one element per file, by row group.
    fetched: Mutex<HashMap<usize, Vec<Ranges>>>,
}

/// A data file with its footer.
#[derive(Debug)]
struct OpenFile {
    object: Object,
    footer: Footer,
}

/// Keeps a fetched row group in memory until it is dropped.
#[derive(Debug)]
pub struct FetchedRowGroup<'a> {
    files: &'a OpenFiles,
    row_group: usize,
}

impl Drop for FetchedRowGroup<'_> {
    fn drop(&mut self) {
        self.files.fetched().remove(&self.row_group);
    }
}

impl OpenFile {
    /// Reads the footer of file number `number` of a set and compares it with the snapshot.
    fn open(storage: &Storage, set: &FileSet, number: usize, file: &DataFile) -> Result<Self> {
        let wrong = |message: String| Problem::new(&file.path, message);
        let object = find(storage, file)?.map_err(wrong)?;
        // The ETag makes the read fail if another object replaces this one later.
        let footer = Footer::read(storage, file, object.e_tag.clone())?;
        let footer = footer.map_err(|error| wrong(format!("its footer cannot be read: {error}")))?;
        check_counts(footer.metadata.metadata(), set, number).map_err(wrong)?;
        Ok(Self { object, footer })
    }

    fn fields(&self) -> &[FieldRef] {
        self.footer.metadata.schema().fields()
    }

    /// Reads the bytes of some columns of a row group. The inner error says why the ranges in the footer are
    /// invalid.
    fn read(
        &self,
        storage: &Storage,
        row_group: usize,
        columns: &ProjectionMask,
    ) -> Result<Result<Ranges, String>> {
        let Object { path, bytes, e_tag, .. } = &self.object;
        Ok(match self.footer.byte_ranges(row_group, columns, *bytes) {
            Ok(wanted) => Ok(storage.read_ranges(path, *bytes, wanted, e_tag.clone())?),
            Err(message) => Err(message),
        })
    }

    /// Verifies the checksums of some columns of a row group.
    fn check(&self, row_group: usize, columns: &ProjectionMask, ranges: &Ranges) -> Result<(), String> {
        let chunks = self.footer.metadata.metadata().row_group(row_group).columns().iter().enumerate();
        for (leaf, chunk) in chunks.filter(|(leaf, _)| columns.leaf_included(*leaf)) {
            let (start, length) = chunk.byte_range();
            let bytes = ranges.get_bytes(start, length as usize).map_err(|error| error.to_string())?;
            self.footer.check_chunk(row_group, leaf, &bytes)?;
        }
        Ok(())
    }

    /// Decodes column number `root` of a row group of `rows` rows.
    fn decode(&self, row_group: usize, root: usize, rows: usize, ranges: Ranges) -> Result<ArrayRef, String> {
        let metadata = &self.footer.metadata;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), [root]);
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(ranges, metadata.clone());
        let reader = builder
            .with_projection(mask)
            .with_row_groups(vec![row_group])
            .with_batch_size(rows.max(1))
            .build()
            .map_err(|error| error.to_string())?;
        let schema = reader.schema();
        let batches = reader.collect::<Result<Vec<_>, _>>();
        let whole = concat_batches(&schema, &batches.map_err(|error| error.to_string())?);
        let whole = whole.map_err(|error| error.to_string())?;
        match whole.num_rows() == rows {
            true => Ok(Arc::clone(whole.column(0))),
            false => Err(format!("{} rows decode of {rows}", whole.num_rows())),
        }
    }
}

impl OpenFiles {
    /// Reads the footers of the files of `set`, which belongs to `snapshot`, and compares them with the
    /// snapshot. A column of a feature that was added after these files were written has the missing value in
    /// all rows.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`](crate::Error::Damaged) if the files differ from the snapshot; otherwise the errors
    /// of [`Storage::read_ranges`].
    pub fn open(storage: &Storage, snapshot: &Snapshot, set: &FileSet) -> Result<Self> {
        let files = set.files.iter().enumerate();
        let files = files.map(|(number, file)| OpenFile::open(storage, set, number, file));
        Ok(Self {
            path: set.path().to_owned(),
            storage: storage.clone(),
            files: files.collect::<Result<_>>()?,
            // `check_counts` has checked that the footers have the same numbers of rows, which fit into 31
            // bits.
            rows: set.row_groups.iter().map(|row_group| row_group.samples as usize).collect(),
            lacking: snapshot.lacking(set),
            changes: set.changes.clone(),
            fetched: Mutex::default(),
        })
    }

    /// Returns the number of row groups.
    pub fn row_groups(&self) -> usize {
        self.rows.len()
    }

    /// Estimates the bytes of memory to [fetch](Self::fetch) a row group and to check it column by column:
    /// the largest column, compressed and decoded, and the other data per sample.
    pub(crate) fn checking_bytes(&self, row_group: usize) -> u64 {
        // The offset and size of a list, and the session, time and digest of a sample.
        const SAMPLE_BYTES: u64 = 64;
        let of_files = self.files.iter().map(|file| file.footer.metadata.metadata().row_group(row_group));
        let (mut largest, mut all_compressed) = (0_u64, 0_u64);
        for column in of_files.flat_map(|row_group| row_group.columns()) {
            let compressed = u64::try_from(column.compressed_size()).unwrap_or(0);
            all_compressed = all_compressed.saturating_add(compressed);
            largest = largest.max(compressed.saturating_add(decoding_bytes(column)));
        }
        let fetched = if self.storage.has_latency() { all_compressed } else { 0 };
        let samples = (self.rows[row_group] as u64).saturating_mul(SAMPLE_BYTES);
        largest.saturating_add(fetched).saturating_add(samples)
    }

    /// Fetches all columns of a row group of an object store at once, instead of with one request per column.
    /// They stay in memory until the returned value is dropped. Returns `None` for local files, and if a
    /// footer has an invalid range: reading the columns one by one finds the damaged one.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Storage::read_ranges`].
    pub fn fetch(&self, row_group: usize) -> Result<Option<FetchedRowGroup<'_>>> {
        if !self.storage.has_latency() {
            return Ok(None);
        }
        let mut fetched = Vec::with_capacity(self.files.len());
        for file in &self.files {
            let Ok(ranges) = file.read(&self.storage, row_group, &ProjectionMask::all())? else {
                return Ok(None);
            };
            fetched.push(ranges);
        }
        self.fetched().insert(row_group, fetched);
        Ok(Some(FetchedRowGroup { files: self, row_group }))
    }

    fn fetched(&self) -> MutexGuard<'_, HashMap<usize, Vec<Ranges>>> {
        locked(&self.fetched)
    }

    /// Returns the compressed bytes of each column over all row groups, with the column's name, in the order
    /// of the files.
    pub fn column_bytes(&self) -> Vec<(String, u64)> {
        let mut all = Vec::new();
        for file in &self.files {
            let first = all.len();
            all.extend(file.fields().iter().map(|field| (field.name().clone(), 0)));
            let metadata = &file.footer.metadata;
            for row_group in metadata.metadata().row_groups() {
                for (leaf, column) in row_group.columns().iter().enumerate() {
                    let root = metadata.parquet_schema().get_column_root_idx(leaf);
                    if let Some((_, bytes)) = all.get_mut(first + root) {
                        *bytes += u64::try_from(column.compressed_size()).unwrap_or(0);
                    }
                }
            }
        }
        all
    }

    /// Checks that each column of `expected` is in exactly one of the files, in any order, and that all other
    /// columns belong to dropped features.
    ///
    /// # Errors
    ///
    /// Returns the first column that is missing, present twice, unexpected or of another type.
    pub fn check_columns(&self, expected: &SchemaRef) -> Result<(), Problem> {
        let wrong =
            |path: &str, column: &str, message: String| Err(Problem::new(path, message).in_column(column));
        for field in expected.fields() {
            let found: Vec<_> = self.places(field.name()).collect();
            let [(file, root)] = found[..] else {
                let message = if found.is_empty() { "it is missing" } else { "it is there twice" };
                return wrong(&self.path, field.name(), message.to_owned());
            };
            let found = with_name(&file.fields()[root], field.name());
            if !same_field(&found, field) {
                let message = format!("it should be {}, but is {}", describe(field), describe(&found));
                return wrong(&file.object.path, field.name(), message);
            }
        }
        for file in &self.files {
            let is_strange = |field: &&FieldRef| {
                let name = self.changes.in_schema(field.name());
                name.is_some_and(|name| expected.field_with_name(name).is_err())
            };
            if let Some(strange) = file.fields().iter().find(is_strange) {
                let message = "the schema has no such column".to_owned();
                return wrong(&file.object.path, strange.name(), message);
            }
        }
        Ok(())
    }

    /// Returns whether the recorded digest and number of ids of a row group still apply to its columns.
    pub(crate) fn are_as_digested(&self) -> bool {
        self.changes.are_digested()
    }

    /// Returns whether the files do not have this column of the dataset.
    pub(crate) fn lacks(&self, name: &str) -> bool {
        self.lacking.iter().any(|field| field.name() == name)
    }

    /// Returns the files that have a column, and the index of the column in each.
    fn places<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a OpenFile, usize)> {
        let name = self.changes.in_files(name);
        self.files.iter().filter_map(move |file| {
            let root = file.fields().iter().position(|field| field.name() == name)?;
            Some((file, root))
        })
    }

    /// Creates a problem of a column of a row group, in the file that has the column.
    fn problem(&self, row_group: usize, column: &str, message: String) -> Problem {
        let path = self.places(column).next().map_or(&self.path, |(file, _)| &file.object.path);
        Problem::new(path, message).in_row_group(row_group).in_column(column)
    }

    /// Decodes a column of a row group.
    fn column(&self, row_group: usize, name: &str) -> Result<(FieldRef, ArrayRef)> {
        if let Some(field) = self.lacking.iter().find(|field| field.name() == name) {
            return Ok((Arc::clone(field), missing_column(field, self.rows[row_group])));
        }
        let wrong = |message: String| self.problem(row_group, name, message);
        let (file, root) = self.places(name).next().ok_or_else(|| wrong("it is missing".to_owned()))?;
        let number = self.files.iter().position(|other| std::ptr::eq(other, file)).unwrap_or(0);
        let kept = self.fetched().get(&row_group).and_then(|ranges| ranges.get(number).cloned());
        let mask = ProjectionMask::roots(file.footer.metadata.parquet_schema(), [root]);
        let ranges = match kept {
            Some(ranges) => ranges,
            None => file.read(&self.storage, row_group, &mask)?.map_err(wrong)?,
        };
        catch_panic(|| file.check(row_group, &mask, &ranges)).map_err(wrong)?;
        let rows = self.rows[row_group];
        let column = catch_panic(|| file.decode(row_group, root, rows, ranges));
        let column = column.map_err(|error| wrong(format!("it cannot be decoded: {error}")))?;
        Ok((with_name(&file.fields()[root], name), column))
    }

    /// Decodes the columns `names` of a row group.
    fn columns(&self, row_group: usize, names: &[&str]) -> Result<RecordBatch> {
        let columns = names.iter().map(|name| self.column(row_group, name)).collect::<Result<Vec<_>>>()?;
        let (fields, columns): (Vec<_>, Vec<_>) = columns.into_iter().unzip();
        Ok(RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), columns)?)
    }

    /// Reads a column of numbers without nulls.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`](crate::Error::Damaged) if the column has another type, cannot be decoded or
    /// contains a null; otherwise the errors of [`Storage::read_ranges`].
    pub fn numbers<T: ArrowPrimitiveType>(
        &self,
        row_group: usize,
        name: &str,
    ) -> Result<ScalarBuffer<T::Native>> {
        let (_, column) = self.column(row_group, name)?;
        let wrong = |message: String| self.problem(row_group, name, message);
        if let Some(row) = first_null(&column) {
            return Err(wrong("a null where none may be".to_owned()).in_row(row).into());
        }
        let numbers = column.as_primitive_opt::<T>();
        let numbers = numbers.ok_or_else(|| wrong(format!("it is decoded as {}", column.data_type())))?;
        Ok(numbers.values().clone())
    }

    /// Reads a kept column: `Int64` or `Utf8`, with nulls.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`](crate::Error::Damaged) if the column has another type or cannot be decoded;
    /// otherwise the errors of [`Storage::read_ranges`].
    pub fn kept(&self, row_group: usize, column: &KeptColumn) -> Result<ArrayRef> {
        let (_, values) = self.column(row_group, &column.name)?;
        if *values.data_type() != column.kind.data_type() {
            let message = format!("it is decoded as {}", values.data_type());
            return Err(self.problem(row_group, &column.name, message).into());
        }
        Ok(values)
    }

    /// Reads the lists of `feature`, which belongs to `group`, in a row group of a file in `layout`.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`numbers`](Self::numbers).
    pub fn lists(
        &self,
        row_group: usize,
        layout: Layout,
        group: &FeatureGroup,
        feature: &SparseFeature,
    ) -> Result<SampleLists> {
        let wrong = |column: &str, message: String| self.problem(row_group, column, message);
        if layout == Layout::Folded && group.deduplicated {
            let length = feature.length_column();
            let mut names = vec![feature.name.as_str()];
            names.extend(group.folds_to_window(feature).then_some(length.as_str()));
            let batch = self.columns(row_group, &names)?;
            let alone = FeatureGroup { features: vec![feature.clone()], ..group.clone() };
            let unfolded = unfold_group(&batch, &alone);
            let unfolded = unfolded.map_err(|e| wrong(&e.column, e.message).in_row(e.row))?;
            return Ok(SampleLists::unfolded(unfolded));
        }
        let (_, column) = self.column(row_group, &feature.name)?;
        if let Some(row) = first_null(&column) {
            return Err(wrong(&feature.name, "a null where none may be".to_owned()).in_row(row).into());
        }
        let lists = column.as_list_opt::<i32>().and_then(SampleLists::new);
        Ok(lists.ok_or_else(|| wrong(&feature.name, "it does not hold lists of ids".to_owned()))?)
    }

    /// Returns the samples of a row group with the columns that a writer with this schema takes. Columns of
    /// `given` are used instead of being read. The others are decoded on the threads of the current pool.
    pub(crate) fn samples(
        &self,
        row_group: usize,
        (schema, layout, sample_keys): (&Schema, Layout, bool),
        given: Option<&RecordBatch>,
    ) -> Result<RecordBatch> {
        let _fetched = self.fetch(row_group)?;
        let columns = schema::with_sample_keys(schema.to_arrow(), sample_keys);
        let fields: Vec<&FieldRef> = columns.fields().iter().collect();
        let columns = fields.into_par_iter().map(|field| -> Result<(String, ArrayRef, bool)> {
            let column = match given.and_then(|given| given.column_by_name(field.name())) {
                Some(given) => Arc::clone(given),
                None => self.of_samples(row_group, (schema, layout), field)?,
            };
            let is_nullable = field.is_nullable() || column.null_count() > 0;
            Ok((field.name().clone(), column, is_nullable))
        });
        let columns: Vec<_> = columns.collect::<Result<_>>()?;
        Ok(RecordBatch::try_from_iter_with_nullable(columns)?)
    }

    /// Returns a column of a row group in the form that a writer takes. Lists are views of shared ids.
    fn of_samples(
        &self,
        row_group: usize,
        (schema, layout): (&Schema, Layout),
        field: &Field,
    ) -> Result<ArrayRef> {
        let name = field.name();
        if let Some(kept) = schema.kept.iter().find(|kept| kept.name == *name) {
            return self.kept(row_group, kept);
        }
        let feature = schema.grouped_features().find(|(_, feature)| feature.name == *name);
        if let Some((group, feature)) = feature {
            let lists = self.lists(row_group, layout, group, feature)?;
            return Ok(lists.to_views(0..lists.len()));
        }
        Ok(match field.data_type() {
            DataType::Float32 => {
                Arc::new(Float32Array::new(self.numbers::<Float32Type>(row_group, name)?, None))
            }
            DataType::Int64 => Arc::new(Int64Array::new(self.numbers::<Int64Type>(row_group, name)?, None)),
            _ => {
                let times = self.numbers::<TimestampMicrosecondType>(row_group, name)?;
                Arc::new(TimestampMicrosecondArray::new(times, None))
            }
        })
    }

    /// Returns the ids that a feature's column stores in a row group. In the `folded` layout, they are not
    /// the ids of every sample.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`numbers`](Self::numbers).
    pub fn stored_ids(&self, row_group: usize, name: &str) -> Result<ScalarBuffer<i64>> {
        let (_, column) = self.column(row_group, name)?;
        let lists = column.as_list_opt::<i32>();
        let ids = lists.and_then(|lists| lists.values().as_primitive_opt::<Int64Type>().cloned());
        let wrong = || self.problem(row_group, name, "it does not hold lists of ids".to_owned());
        Ok(ids.ok_or_else(wrong)?.values().clone())
    }
}

/// The lists of all samples of a row group, as views of shared ids. Samples with equal offset and size have
/// the same list.
#[derive(Debug)]
pub struct SampleLists {
    values: ScalarBuffer<i64>,
    offsets: Vec<i32>,
    sizes: Vec<i32>,
}

impl SampleLists {
    /// Creates views of `lists`; `None` if the lists contain a null or other values than `Int64`.
    pub fn new(lists: &ListArray) -> Option<Self> {
        let ids = lists.values().as_primitive_opt::<Int64Type>().filter(|ids| ids.null_count() == 0)?;
        let bounds = lists.offsets();
        Some(Self {
            values: ids.values().clone(),
            offsets: bounds[..lists.len()].to_vec(),
            sizes: bounds.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        })
    }

    /// Converts an unfolded group with one feature.
    fn unfolded(mut group: UnfoldedGroup) -> Self {
        let feature = group.features.remove(0);
        let of_samples = |of_rows: &[i32]| group.inverse.iter().map(|row| of_rows[*row as usize]).collect();
        let (offsets, sizes) = (of_samples(&feature.offsets), of_samples(&feature.sizes));
        Self { values: feature.values, offsets, sizes }
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// Returns the list of a sample.
    pub fn list(&self, sample: usize) -> &[i64] {
        self.views().get(sample)
    }

    /// Returns the number of ids in the list of each sample.
    pub fn sizes(&self) -> &[i32] {
        &self.sizes
    }

    /// Returns the lists in the form of a `ListView` column.
    pub(crate) fn views(&self) -> Lists<'_> {
        Lists::View(&self.values, &self.offsets, &self.sizes)
    }

    /// Returns whether a sample and the previous one have the same view. Two equal lists in different places
    /// are not recognised.
    pub fn repeats(&self, sample: usize) -> bool {
        sample > 0
            && self.offsets[sample] == self.offsets[sample - 1]
            && self.sizes[sample] == self.sizes[sample - 1]
    }

    /// Copies the lists of `samples` into a column of [`Schema::to_arrow`](crate::Schema::to_arrow).
    pub fn to_array(&self, samples: impl Iterator<Item = usize> + Clone) -> ArrayRef {
        let mut ids = Vec::with_capacity(samples.clone().map(|sample| self.sizes[sample] as usize).sum());
        for sample in samples.clone() {
            ids.extend_from_slice(self.list(sample));
        }
        let lengths = samples.map(|sample| self.sizes[sample] as usize);
        let offsets = OffsetBuffer::from_lengths(lengths);
        let ids = Int64Array::new(ids.into(), None);
        Arc::new(ListArray::new(schema::item_field(), offsets, Arc::new(ids), None))
    }

    /// Returns the lists of `samples` as a column of views of shared ids.
    pub fn to_views(&self, samples: Range<usize>) -> ArrayRef {
        let ids = Arc::new(Int64Array::new(self.values.clone(), None));
        let [offsets, sizes] = [&self.offsets, &self.sizes].map(|of| of[samples.clone()].to_vec().into());
        Arc::new(ListViewArray::new(schema::item_field(), offsets, sizes, ids, None))
    }
}

fn first_null(column: &ArrayRef) -> Option<usize> {
    (column.null_count() > 0).then(|| (0..column.len()).find(|row| column.is_null(*row)))?
}

fn describe(field: &Field) -> String {
    format!("{}{}", field.data_type(), if field.is_nullable() { " or null" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folded::samples::{Sample, rows, schema};
    use crate::{DatasetWriter, Order, PartitionKey, WriterOptions};

    #[test]
    fn lists_of_both_layouts_are_those_that_were_written() {
        let samples: Vec<Sample> =
            (0..20).map(|i| [vec![i / 3], vec![7; 2], (i / 2..i / 2 + 4).collect(), vec![i; 3]]).collect();
        for layout in [Layout::Rows, Layout::Folded] {
            let directory = tempfile::tempdir().unwrap();
            let options = WriterOptions { layout, ..WriterOptions::new(Order::Session) };
            let mut writer = DatasetWriter::create(directory.path(), schema(), options).unwrap();
            writer.write(&PartitionKey::default(), &rows(&samples)).unwrap();
            writer.finish().unwrap();
            let snapshot = Snapshot::load(directory.path()).unwrap();
            let storage = Storage::open(directory.path()).unwrap();
            let file = OpenFiles::open(&storage, &snapshot, &snapshot.partitions[0].files[0]).unwrap();
            file.check_columns(&layout.to_arrow(&schema())).unwrap();
            let features = schema().groups.into_iter().flat_map(|group| {
                let features = group.features.clone();
                features.into_iter().map(move |feature| (group.clone(), feature))
            });
            for (i, (group, feature)) in features.enumerate() {
                let lists = file.lists(0, layout, &group, &feature).unwrap();
                let found: Vec<_> = (0..lists.len()).map(|sample| lists.list(sample).to_vec()).collect();
                let expected: Vec<_> = samples.iter().map(|sample| sample[i].clone()).collect();
                assert_eq!(found, expected, "{}", feature.name);
                let again = SampleLists::new(lists.to_array([3, 4, 19].into_iter()).as_list()).unwrap();
                assert_eq!((again.list(0), again.list(2)), (&samples[3][i][..], &samples[19][i][..]));
            }
            let bytes = file.column_bytes();
            assert_eq!(bytes.len(), layout.to_arrow(&schema()).fields().len());
            assert!(bytes.iter().all(|(_, bytes)| *bytes > 0));
        }
    }
}
