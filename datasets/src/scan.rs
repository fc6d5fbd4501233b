//! Data files as verifying and reporting read them: one column of a row group at a time, lists of either layout as
//! views. Whatever is wrong with a file is a [`Problem`] with its place, in an
//! [`Error::Damaged`](crate::Error::Damaged); any other error says why the storage does not give the file, and nothing
//! of the file itself.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrow::array::{
    Array, ArrayRef, ArrowPrimitiveType, AsArray, Int64Array, ListArray, ListViewArray, RecordBatch,
    RecordBatchReader,
};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Int64Type, SchemaRef};
use onefold_base::process::catch_panic;
use onefold_storage::{Object, Ranges, Storage};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};

use crate::folded::{UnfoldedGroup, unfold_group};
use crate::footer::{check_counts, read_footer};
use crate::{DataFile, FeatureGroup, KeptColumn, Layout, Problem, Result, SparseFeature, schema};

/// The problem of a file that is not there.
pub(crate) const MISSING: &str = "it is missing, the snapshot names it";

/// A data file whose footer was read.
#[derive(Debug)]
pub struct OpenFile {
    /// Relative to the dataset's directory.
    pub path: String,
    storage: Storage,
    bytes: u64,
    e_tag: Option<String>,
    metadata: ArrowReaderMetadata,
    /// The bytes of all columns of the row groups that were fetched.
    fetched: Mutex<HashMap<usize, Ranges>>,
}

/// Keeps a row group that was fetched in memory.
#[derive(Debug)]
pub struct FetchedRowGroup<'a> {
    file: &'a OpenFile,
    row_group: usize,
}

impl Drop for FetchedRowGroup<'_> {
    fn drop(&mut self) {
        self.file.fetched().remove(&self.row_group);
    }
}

impl OpenFile {
    /// Reads the footer of a data file and compares its rows and row groups with what the snapshot says.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`](crate::Error::Damaged) if it is not what the snapshot says, and as [`Storage::read_ranges`].
    pub fn open(storage: &Storage, file: &DataFile) -> Result<Self> {
        let found = storage.head(&file.path)?;
        let found = found.ok_or_else(|| Problem::new(&file.path, MISSING))?;
        Self::open_object(storage, file, found)
    }

    /// The same, of an object that was found before: one that took its place since is an error.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub(crate) fn open_object(storage: &Storage, file: &DataFile, found: Object) -> Result<Self> {
        let wrong = |message: String| Problem::new(&file.path, message);
        let footer = read_footer(storage, &file.path, found.bytes, found.e_tag.clone())?;
        let metadata = footer.map_err(|error| wrong(format!("its footer cannot be read: {error}")))?;
        let (path, storage) = (file.path.clone(), storage.clone());
        let (bytes, e_tag, fetched) = (found.bytes, found.e_tag, Mutex::default());
        let open = Self { path, storage, bytes, e_tag, metadata, fetched };
        check_counts(open.metadata.metadata(), file).map_err(wrong)?;
        let sum =
            (0..open.row_groups()).try_fold(0_u64, |sum, group| sum.checked_add(open.rows(group)? as u64));
        if sum != Some(file.samples) {
            let message =
                format!("its row groups do not have the {} rows that its footer says", file.samples);
            return Err(wrong(message).into());
        }
        Ok(open)
    }

    /// Row groups in the file.
    pub fn row_groups(&self) -> usize {
        self.metadata.metadata().num_row_groups()
    }

    /// Rows of a row group; `None` if the footer gives a number that no row group has.
    pub fn rows(&self, row_group: usize) -> Option<usize> {
        usize::try_from(self.metadata.metadata().row_group(row_group).num_rows()).ok()
    }

    /// Fetches all columns of a row group at once, where each column would be a request of its own to an object store.
    /// They stay in memory until what this gives is dropped. Nothing is fetched if the footer is wrong about a column:
    /// reading the columns one by one tells which.
    ///
    /// # Errors
    ///
    /// As [`Storage::read_ranges`].
    pub fn fetch(&self, row_group: usize) -> Result<Option<FetchedRowGroup<'_>>> {
        if self.storage.local().is_some() {
            return Ok(None);
        }
        let Ok(ranges) = self.read(row_group, &ProjectionMask::all())? else { return Ok(None) };
        self.fetched().insert(row_group, ranges);
        Ok(Some(FetchedRowGroup { file: self, row_group }))
    }

    fn fetched(&self) -> MutexGuard<'_, HashMap<usize, Ranges>> {
        self.fetched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compressed bytes of each column in all row groups, by the column's name, in the file's order.
    pub fn column_bytes(&self) -> Vec<(String, u64)> {
        let fields = self.metadata.schema().fields();
        let mut bytes: Vec<(String, u64)> = fields.iter().map(|field| (field.name().clone(), 0)).collect();
        for row_group in self.metadata.metadata().row_groups() {
            for (leaf, column) in row_group.columns().iter().enumerate() {
                let root = self.metadata.parquet_schema().get_column_root_idx(leaf);
                if let Some((_, bytes)) = bytes.get_mut(root) {
                    *bytes += u64::try_from(column.compressed_size()).unwrap_or(0);
                }
            }
        }
        bytes
    }

    /// Checks that the file has the columns of `expected`, in any order, and no others.
    pub fn check_columns(&self, expected: &SchemaRef) -> Result<(), Problem> {
        let found = self.metadata.schema();
        let wrong = |column: &str, message: String| Err(Problem::new(&self.path, message).in_column(column));
        for field in expected.fields() {
            match found.field_with_name(field.name()) {
                Err(_) => return wrong(field.name(), "it is missing".to_owned()),
                Ok(found) if !same_field(found, field) => {
                    let message = format!("it should be {}, but is {}", describe(field), describe(found));
                    return wrong(field.name(), message);
                }
                Ok(_) => {}
            }
        }
        let strange = found.fields().iter().find(|field| expected.field_with_name(field.name()).is_err());
        strange.map_or(Ok(()), |field| wrong(field.name(), "the schema has no such column".to_owned()))
    }

    /// The bytes of some columns of a row group; the inner error says why they cannot be where the footer says.
    fn read(&self, row_group: usize, columns: &ProjectionMask) -> Result<Result<Ranges, String>> {
        if let Some(ranges) = self.fetched().get(&row_group) {
            return Ok(Ok(ranges.clone()));
        }
        let chunks = self.metadata.metadata().row_group(row_group).columns().iter().enumerate();
        let wanted = chunks.filter(|(leaf, _)| columns.leaf_included(*leaf)).map(|(_, chunk)| {
            let (start, length) = chunk.byte_range();
            let end = start.checked_add(length).filter(|end| *end <= self.bytes);
            end.map(|end| start..end)
                .ok_or_else(|| format!("a column of {length} bytes at {start} ends after the file"))
        });
        // A footer of damaged bytes may have negative sizes, about which the library panics.
        match catch_panic(|| wanted.collect::<Result<Vec<_>, _>>()) {
            Ok(wanted) => {
                Ok(Ok(self.storage.read_ranges(&self.path, self.bytes, wanted, self.e_tag.clone())?))
            }
            Err(message) => Ok(Err(message)),
        }
    }

    /// Decodes the columns `names` of a row group; they may come in another order.
    fn columns(&self, row_group: usize, names: &[&str]) -> Result<RecordBatch> {
        let wrong = |message: String| {
            let problem = Problem::new(&self.path, message).in_row_group(row_group);
            names.iter().take(1).fold(problem, |problem, name| problem.in_column(*name))
        };
        let fields = self.metadata.schema().fields();
        let roots = names.iter().map(|name| fields.iter().position(|field| field.name() == name));
        let roots: Option<Vec<usize>> = roots.collect();
        let roots = roots.ok_or_else(|| wrong("it is missing".to_owned()))?;
        let rows = self.rows(row_group).filter(|rows| i32::try_from(*rows).is_ok());
        let rows = rows.ok_or_else(|| wrong("its row group has an impossible number of rows".to_owned()))?;
        let mask = ProjectionMask::roots(self.metadata.parquet_schema(), roots);
        let ranges = self.read(row_group, &mask)?.map_err(wrong)?;
        let decode = || {
            let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(ranges, self.metadata.clone());
            let reader = builder
                .with_projection(mask)
                .with_row_groups(vec![row_group])
                .with_batch_size(rows.max(1))
                .build()
                .map_err(|error| error.to_string())?;
            let schema = reader.schema();
            let batches = reader.collect::<Result<Vec<_>, _>>().map_err(|error| error.to_string())?;
            let whole = concat_batches(&schema, &batches).map_err(|error| error.to_string())?;
            match whole.num_rows() == rows {
                true => Ok(whole),
                false => Err(format!("{} rows decode of {rows}", whole.num_rows())),
            }
        };
        Ok(catch_panic(decode).map_err(|error| wrong(format!("it cannot be decoded: {error}")))?)
    }

    /// A column of numbers without nulls.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`](crate::Error::Damaged) if the column is not of this type, does not decode or has a null, and
    /// as [`Storage::read_ranges`].
    pub fn numbers<T: ArrowPrimitiveType>(
        &self,
        row_group: usize,
        name: &str,
    ) -> Result<ScalarBuffer<T::Native>> {
        let batch = self.columns(row_group, &[name])?;
        let wrong =
            |message: String| Problem::new(&self.path, message).in_row_group(row_group).in_column(name);
        let column = batch.column(0);
        if let Some(row) = first_null(column) {
            return Err(wrong("a null where none may be".to_owned()).in_row(row).into());
        }
        let numbers = column.as_primitive_opt::<T>();
        let numbers = numbers.ok_or_else(|| wrong(format!("it is decoded as {}", column.data_type())))?;
        Ok(numbers.values().clone())
    }

    /// A kept column: `Int64` or `Utf8`, with nulls.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`](crate::Error::Damaged) if the column is not of this type or does not decode, and as
    /// [`Storage::read_ranges`].
    pub fn kept(&self, row_group: usize, column: &KeptColumn) -> Result<ArrayRef> {
        let batch = self.columns(row_group, &[&column.name])?;
        let values = batch.column(0);
        if *values.data_type() != column.kind.data_type() {
            let message = format!("it is decoded as {}", values.data_type());
            let problem = Problem::new(&self.path, message).in_row_group(row_group);
            return Err(problem.in_column(&column.name).into());
        }
        Ok(Arc::clone(values))
    }

    /// The lists of `feature`, one of `group`, in a row group of a file in `layout`.
    ///
    /// # Errors
    ///
    /// As [`numbers`](Self::numbers).
    pub fn lists(
        &self,
        row_group: usize,
        layout: Layout,
        group: &FeatureGroup,
        feature: &SparseFeature,
    ) -> Result<SampleLists> {
        let wrong = |column: &str, message: String| {
            Problem::new(&self.path, message).in_row_group(row_group).in_column(column)
        };
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
        let batch = self.columns(row_group, &[&feature.name])?;
        let column = batch.column(0);
        if let Some(row) = first_null(column) {
            return Err(wrong(&feature.name, "a null where none may be".to_owned()).in_row(row).into());
        }
        let lists = column.as_list_opt::<i32>().and_then(SampleLists::new);
        Ok(lists.ok_or_else(|| wrong(&feature.name, "it does not hold lists of ids".to_owned()))?)
    }

    /// The ids that a feature's column stores in a row group: in the `folded` layout not those of the samples.
    ///
    /// # Errors
    ///
    /// As [`numbers`](Self::numbers).
    pub fn stored_ids(&self, row_group: usize, name: &str) -> Result<ScalarBuffer<i64>> {
        let batch = self.columns(row_group, &[name])?;
        let lists = batch.column(0).as_list_opt::<i32>();
        let ids = lists.and_then(|lists| lists.values().as_primitive_opt::<Int64Type>().cloned());
        let wrong = || Problem::new(&self.path, "it does not hold lists of ids").in_column(name);
        Ok(ids.ok_or_else(wrong)?.values().clone())
    }
}

/// The list of every sample of a row group, as views of shared ids. Samples with equal offset and size have the same
/// list.
#[derive(Debug)]
pub struct SampleLists {
    values: ScalarBuffer<i64>,
    offsets: Vec<i32>,
    sizes: Vec<i32>,
}

impl SampleLists {
    /// The rows of `lists`; `None` if they hold nulls or no ids.
    pub fn new(lists: &ListArray) -> Option<Self> {
        let ids = lists.values().as_primitive_opt::<Int64Type>().filter(|ids| ids.null_count() == 0)?;
        let bounds = lists.offsets();
        Some(Self {
            values: ids.values().clone(),
            offsets: bounds[..lists.len()].to_vec(),
            sizes: bounds.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        })
    }

    /// The only feature of an unfolded group.
    fn unfolded(mut group: UnfoldedGroup) -> Self {
        let feature = group.features.remove(0);
        let of_samples = |of_rows: &[i32]| group.inverse.iter().map(|row| of_rows[*row as usize]).collect();
        let (offsets, sizes) = (of_samples(&feature.offsets), of_samples(&feature.sizes));
        Self { values: feature.values, offsets, sizes }
    }

    /// Samples.
    pub fn len(&self) -> usize {
        self.offsets.len()
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.offsets.is_empty()
    }

    /// The list of a sample.
    pub fn list(&self, sample: usize) -> &[i64] {
        &self.values[self.offsets[sample] as usize..][..self.sizes[sample] as usize]
    }

    /// Ids in the list of each sample.
    pub fn sizes(&self) -> &[i32] {
        &self.sizes
    }

    /// Whether a sample has the list of the one before, as far as that shows without comparing ids.
    pub fn repeats(&self, sample: usize) -> bool {
        sample > 0
            && self.offsets[sample] == self.offsets[sample - 1]
            && self.sizes[sample] == self.sizes[sample - 1]
    }

    /// The lists of `samples` written out, as a column of [`Schema::to_arrow`](crate::Schema::to_arrow).
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

    /// The lists of `samples`, as a column of views of the ids that these share.
    pub fn to_views(&self, samples: Range<usize>) -> ArrayRef {
        let ids = Arc::new(Int64Array::new(self.values.clone(), None));
        let [offsets, sizes] = [&self.offsets, &self.sizes].map(|of| of[samples.clone()].to_vec().into());
        Arc::new(ListViewArray::new(schema::item_field(), offsets, sizes, ids, None))
    }
}

fn first_null(column: &ArrayRef) -> Option<usize> {
    (column.null_count() > 0).then(|| (0..column.len()).find(|row| column.is_null(*row)))?
}

/// Equal but for the name of a list's items, which other writers choose differently.
fn same_field(found: &Field, expected: &Field) -> bool {
    let same_type = match (found.data_type(), expected.data_type()) {
        (DataType::List(found), DataType::List(expected)) => {
            found.data_type() == expected.data_type() && found.is_nullable() == expected.is_nullable()
        }
        (found, expected) => found == expected,
    };
    same_type && found.is_nullable() == expected.is_nullable()
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
            let snapshot = writer.finish().unwrap().snapshot;
            let storage = Storage::open(directory.path()).unwrap();
            let file = OpenFile::open(&storage, &snapshot.partitions[0].files[0]).unwrap();
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
