//! Decodes folded columns with arbitrary content: the result is an error, or the lists that the layout's definition
//! gives.
#![no_main]

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int32Array, Int64Array, ListArray, RecordBatch};
use arrow::buffer::{NullBuffer, OffsetBuffer};
use arrow::datatypes::{DataType, Field, Int32Type, Int64Type};
use libfuzzer_sys::fuzz_target;
use onefold_datasets::folded::unfold_group;
use onefold_datasets::{FeatureGroup, SparseFeature, SparseKind};
use onefold_ikjt::{Feature, Group};

/// Numbers taken from the fuzzer's bytes, and zeros after their end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a small number in most cases, and sometimes an extreme one.
    fn length(&mut self) -> i32 {
        match self.next() {
            255 => i32::MAX,
            254 => i32::MIN,
            253 => -1,
            small => i32::from(small % 16),
        }
    }
}

/// Returns a list column with nulls, null ids and an offset, all determined by the bytes.
fn lists(bytes: &mut Bytes, rows: usize) -> ArrayRef {
    let lengths: Vec<usize> = (0..rows).map(|_| usize::from(bytes.next() % 5)).collect();
    let total = lengths.iter().sum();
    let ids: Vec<i64> = (0..total).map(|_| i64::from(bytes.next() % 4)).collect();
    let null_ids = bytes.next() == 7;
    let id_nulls = null_ids.then(|| NullBuffer::from_iter((0..total).map(|_| bytes.next() % 8 != 0)));
    let nulls = (bytes.next() % 4 != 0).then(|| {
        NullBuffer::from_iter((0..rows).map(|row| bytes.next() % 2 == 0 || row == 0 && bytes.next() != 3))
    });
    let item = Arc::new(Field::new("element", DataType::Int64, id_nulls.is_some()));
    let ids = Arc::new(Int64Array::new(ids.into(), id_nulls));
    Arc::new(ListArray::new(item, OffsetBuffer::from_lengths(lengths), ids, nulls))
}

fn lengths(bytes: &mut Bytes, rows: usize) -> ArrayRef {
    let nulls =
        NullBuffer::from_iter((0..rows).map(|row| bytes.next() % 2 == 0 || row == 0 && bytes.next() != 3));
    let lengths: Vec<i32> = (0..rows).map(|_| bytes.length()).collect();
    Arc::new(Int32Array::new(lengths.into(), Some(nulls)))
}

/// Returns the lists of a feature, row by row from the layout's definition, or `None` if the columns violate it.
fn by_definition(columns: &RecordBatch, feature: &SparseFeature) -> Option<Vec<Vec<i64>>> {
    let lists = columns.column_by_name(&feature.name)?.as_list_opt::<i32>()?;
    let offsets = lists.offsets();
    let (start, end) = (offsets[0] as usize, offsets[lists.len()] as usize);
    // The layout does not allow null ids, even outside the lists.
    if lists.values().slice(start, end - start).null_count() > 0 {
        return None;
    }
    let ids = |row: usize| Some(lists.value(row).as_primitive_opt::<Int64Type>()?.values().to_vec());
    let mut appended = Vec::new();
    let mut rows: Vec<Vec<i64>> = Vec::new();
    for row in 0..columns.num_rows() {
        let list = match feature.kind {
            SparseKind::Sparse if lists.is_null(row) => rows.last().cloned()?,
            SparseKind::Sparse => ids(row)?,
            SparseKind::Sequence => {
                let lengths = columns.column_by_name(&format!("{}.length", feature.name))?;
                let lengths = lengths.as_primitive_opt::<Int32Type>()?;
                let new = if lists.is_null(row) { return None } else { ids(row)? };
                if lengths.is_null(row) {
                    if !new.is_empty() {
                        return None;
                    }
                    rows.last().cloned()?
                } else {
                    appended.extend(new);
                    let start = appended.len().checked_sub(usize::try_from(lengths.value(row)).ok()?)?;
                    appended[start..].to_vec()
                }
            }
        };
        rows.push(list);
    }
    Some(rows)
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = Bytes(data);
    let rows = usize::from(bytes.next() % 32);
    let mut columns: Vec<(String, ArrayRef)> = Vec::new();
    let mut features = Vec::new();
    for i in 0..1 + bytes.next() % 3 {
        let kind = if bytes.next() % 2 == 0 { SparseKind::Sparse } else { SparseKind::Sequence };
        let name = format!("f{i}");
        columns.push((name.clone(), lists(&mut bytes, rows)));
        if kind == SparseKind::Sequence {
            columns.push((format!("{name}.length"), lengths(&mut bytes, rows)));
        }
        features.push(SparseFeature::new(name, kind));
    }
    let columns = RecordBatch::try_from_iter(columns).expect("columns of equal length");
    let start = usize::from(bytes.next()) % (rows + 1);
    let columns = columns.slice(start, rows - start);
    let group = FeatureGroup { name: "g".to_owned(), deduplicated: true, features };
    let expected: Option<Vec<_>> = group.features.iter().map(|f| by_definition(&columns, f)).collect();
    match (unfold_group(&columns, &group), expected) {
        (Err(_), None) => {}
        (Ok(unfolded), Some(expected)) => {
            let features = unfolded.features.into_iter().map(|f| {
                Feature::try_new(f.name.as_str(), f.values, f.offsets, f.sizes).expect("valid buffers")
            });
            let group = Group::try_new("g", Some(unfolded.inverse.into()), features.collect());
            let plain = group.expect("a valid inverse index").expand();
            for (feature, lists) in plain.features().iter().zip(expected) {
                let found: Vec<_> = (0..feature.rows()).map(|row| feature.row(row).to_vec()).collect();
                assert_eq!(found, lists);
            }
        }
        (Ok(_), None) => panic!("columns that break the layout were accepted"),
        (Err(error), Some(_)) => panic!("columns of the layout were refused: {error}"),
    }
});
