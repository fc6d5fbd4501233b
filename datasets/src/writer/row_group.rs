//! Encodes the columns of a row group in parallel; each is first folded or expanded.
//!
//! The content of a column chunk depends only on the lists of the row group. It does not depend on their
//! division into batches, or on whether they were views.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::compute::concat;
use arrow::datatypes::{DataType, FieldRef};
use parquet::arrow::arrow_writer::{ArrowColumnChunk, ArrowColumnWriter, compute_leaves};
use rayon::prelude::*;

use super::columns::{FileColumns, Source};
use super::encodings::{Encoded, Sample};
use crate::folded::Fold;
use crate::lists::{Lists, list_array};
use crate::{Error, Result};

/// The approximate number of ids for which lists are expanded at a time.
const EXPANDED_IDS: usize = 1 << 18;

/// Encodes the rows of a row group, and returns the column chunks in file order.
pub(super) fn encode(
    path: &Path,
    columns: &FileColumns,
    rows: &[RecordBatch],
    writers: Vec<ArrowColumnWriter>,
) -> Result<Vec<ArrowColumnChunk>> {
    let mut writers = writers.into_iter();
    let own = |source: &Source| writers.by_ref().take(source.fields.len()).collect::<Vec<_>>();
    let work: Vec<_> = columns.sources.iter().map(own).zip(&columns.sources).collect();
    // Each thread works on one column at a time, which limits the memory.
    let chunks = work.into_par_iter().with_max_len(1).map(|(writers, source)| {
        let mut writers: Vec<_> = writers
            .into_iter()
            .zip(&source.fields)
            .map(|(writer, field)| Column { path, writer, field })
            .collect();
        let parts = parts(source, rows);
        if is_expanded(source) {
            writers.iter_mut().try_for_each(|writer| writer.write_lists(&parts))?;
        } else {
            let stored = stored(source, &parts)?;
            writers.iter_mut().zip(&stored).try_for_each(|(writer, column)| writer.write(column))?;
        }
        writers.into_iter().map(Column::close).collect::<Result<Vec<_>>>()
    });
    let chunks: Vec<Vec<ArrowColumnChunk>> = chunks.collect::<Result<_>>()?;
    Ok(chunks.into_iter().flatten().collect())
}

/// Chooses the encodings of the file's columns from the rows of its first row group.
pub(super) fn choose_encodings(
    path: &Path,
    columns: &FileColumns,
    rows: &[RecordBatch],
) -> Result<Vec<Encoded>> {
    let chosen = columns.sources.par_iter().with_max_len(1).map(|source| {
        let parts = parts(source, rows);
        let samples = if is_expanded(source) {
            vec![Sample::of_lists(&Lists::all(&parts, &source.name)?)]
        } else {
            let stored = stored(source, &parts)?;
            let sample = |column: &ArrayRef| match Lists::of(column) {
                Some(lists) => Ok(Sample::of_lists(&[lists])),
                None => Sample::of_values(column),
            };
            stored.iter().map(sample).collect::<Result<_>>()?
        };
        let choose = |sample: &Sample| sample.choose().map_err(|error| Error::write_parquet(path, error));
        samples.iter().map(choose).collect::<Result<Vec<_>>>()
    });
    let chosen: Vec<Vec<Encoded>> = chosen.collect::<Result<_>>()?;
    Ok(chosen.into_iter().flatten().collect())
}

/// Returns a column of each batch.
fn parts(source: &Source, rows: &[RecordBatch]) -> Vec<ArrayRef> {
    rows.iter().map(|batch| batch.column(source.index).clone()).collect()
}

/// Returns whether every list is stored. Such a column is expanded in parts instead of as a whole.
fn is_expanded(source: &Source) -> bool {
    let is_list = source.fields.iter().any(|field| matches!(field.data_type(), DataType::List(_)));
    source.fold == Fold::Unchanged && is_list
}

/// Returns the file's columns that store the column with these parts.
fn stored(source: &Source, parts: &[ArrayRef]) -> Result<Vec<ArrayRef>> {
    let mut last = None;
    let folded = parts.iter().map(|part| source.fold.fold(&source.name, part, &mut last));
    let folded = folded.collect::<Result<Vec<_>>>()?;
    let whole = |field: usize| {
        let parts: Vec<&dyn Array> = folded.iter().map(|part| part[field].as_ref()).collect();
        Ok(concat(&parts)?)
    };
    (0..source.fields.len()).map(whole).collect()
}

/// A column of the file while it is encoded.
struct Column<'a> {
    path: &'a Path,
    writer: ArrowColumnWriter,
    field: &'a FieldRef,
}

impl Column<'_> {
    fn write(&mut self, column: &ArrayRef) -> Result<()> {
        let leaves = compute_leaves(self.field, column);
        let written = leaves.and_then(|leaves| leaves.iter().try_for_each(|leaf| self.writer.write(leaf)));
        written.map_err(|error| Error::write_parquet(self.path, error))
    }

    /// Writes all lists of `parts`. The Parquet writer decides where pages end once per call and per 1,024
    /// values, so the calls are divided only by the number of ids.
    fn write_lists(&mut self, parts: &[ArrayRef]) -> Result<()> {
        let (mut ids, mut lengths) = (Vec::with_capacity(EXPANDED_IDS), Vec::new());
        for list in Lists::all(parts, self.field.name())?.into_iter().flat_map(Lists::iter) {
            ids.extend_from_slice(list);
            lengths.push(list.len());
            if ids.len() + lengths.len() >= EXPANDED_IDS {
                self.write_expanded(&mut lengths, &mut ids)?;
            }
        }
        if lengths.is_empty() { Ok(()) } else { self.write_expanded(&mut lengths, &mut ids) }
    }

    fn write_expanded(&mut self, lengths: &mut Vec<usize>, ids: &mut Vec<i64>) -> Result<()> {
        let next = Vec::with_capacity(EXPANDED_IDS);
        let lists = list_array(self.field.name(), lengths.drain(..), std::mem::replace(ids, next), None)?;
        self.write(&(Arc::new(lists) as ArrayRef))
    }

    fn close(self) -> Result<ArrowColumnChunk> {
        self.writer.close().map_err(|error| Error::write_parquet(self.path, error))
    }
}
