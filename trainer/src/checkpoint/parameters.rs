//! A model's parameters in safetensors files: by which names, and back.

use std::path::Path;

use safetensors::Dtype;
use tch::Tensor;

use super::tensor_file::{Entry, Source, TensorFile};
use super::touched::Touched;
use crate::embedding::Table;
use crate::model::Model;
use crate::{Result, tensors};

use super::damaged;

/// The dense part: `dense.NAME`.
pub(super) fn dense(model: &Model) -> Vec<Entry<'_>> {
    let parameters = model.named_dense_parameters().into_iter();
    parameters.map(|(name, parameter)| Entry::tensor(dense_name(&name), &parameter)).collect()
}

fn dense_name(name: &str) -> String {
    format!("dense.{name}")
}

fn table_name(table: &Table, buffer: &str) -> String {
    format!("tables.{}.{buffer}", table.config().feature)
}

/// All of the tables: `tables.FEATURE.weight`, and the optimizer's state, `tables.FEATURE.accumulator`.
pub(super) fn tables(model: &Model) -> Vec<Entry<'_>> {
    let tables = model.embeddings.tables().iter();
    let entries = tables.flat_map(|table| {
        table.buffers().into_iter().map(|buffer| Entry {
            name: table_name(table, buffer.name),
            dtype: buffer.dtype,
            shape: vec![table.config().rows as usize, buffer.columns],
            source: Source::Bytes(buffer.bytes),
        })
    });
    entries.collect()
}

/// The rows that were touched, by table.
pub(super) fn touched_rows(model: &Model, touched: &Touched) -> Vec<Vec<u32>> {
    (0..model.embeddings.tables().len()).map(|table| touched.rows(table)).collect()
}

/// Those rows of the tables only, and which they are: `tables.FEATURE.rows`.
pub(super) fn table_rows<'a>(model: &'a Model, rows: &'a [Vec<u32>]) -> Vec<Entry<'a>> {
    let tables = model.embeddings.tables().iter().zip(rows);
    let entries = tables.flat_map(|(table, rows)| {
        let numbers = Entry {
            name: table_name(table, "rows"),
            dtype: Dtype::U32,
            shape: vec![rows.len()],
            source: Source::Bytes(bytemuck::cast_slice(rows)),
        };
        let buffers = table.buffers().into_iter().map(|buffer| {
            let row_bytes = buffer.columns * buffer.dtype.size();
            Entry {
                name: table_name(table, buffer.name),
                dtype: buffer.dtype,
                shape: vec![rows.len(), buffer.columns],
                source: Source::Rows { bytes: buffer.bytes, row_bytes, rows },
            }
        });
        std::iter::once(numbers).chain(buffers.collect::<Vec<_>>())
    });
    entries.collect()
}

/// Puts the dense part of a file into a model.
pub(super) fn load_dense(model: &mut Model, path: &Path) -> Result<()> {
    let mut file = open(path)?;
    for (name, mut parameter) in model.named_dense_parameters() {
        let mut values = vec![0.0_f32; parameter.numel()];
        let bytes = bytemuck::cast_slice_mut(&mut values);
        file.read_into(&dense_name(&name), Dtype::F32, bytes).map_err(|message| damaged(path, &message))?;
        copy_into(&mut parameter, &values);
    }
    Ok(())
}

fn copy_into(parameter: &mut Tensor, values: &[f32]) {
    let values = tensors::from_f32(values, &parameter.size());
    tch::no_grad(|| parameter.copy_(&values));
}

/// Puts all of the tables of a file into a model.
pub(super) fn load_tables(model: &mut Model, path: &Path) -> Result<()> {
    let mut file = open(path)?;
    for table in model.embeddings.tables_mut() {
        let feature = table.config().feature.clone();
        for buffer in table.buffers_mut() {
            let name = format!("tables.{feature}.{}", buffer.name);
            file.read_into(&name, buffer.dtype, buffer.bytes).map_err(|message| damaged(path, &message))?;
        }
    }
    Ok(())
}

/// Puts the rows of a file into a model's tables, and adds them to `touched`.
pub(super) fn load_table_rows(model: &mut Model, path: &Path, touched: &mut Touched) -> Result<()> {
    let wrong = |message: String| damaged(path, &message);
    let mut file = open(path)?;
    for (number, table) in model.embeddings.tables_mut().iter_mut().enumerate() {
        let (feature, count) = (table.config().feature.clone(), table.config().rows);
        let rows = file.read::<u32>(&format!("tables.{feature}.rows"), Dtype::U32).map_err(wrong)?;
        if let Some(row) = rows.iter().find(|row| u64::from(**row) >= count) {
            return Err(wrong(format!("`tables.{feature}.rows` has row {row} of {count}")));
        }
        for buffer in table.buffers_mut() {
            let row_bytes = buffer.columns * buffer.dtype.size();
            let mut values = vec![0; rows.len() * row_bytes];
            let name = format!("tables.{feature}.{}", buffer.name);
            file.read_into(&name, buffer.dtype, &mut values).map_err(wrong)?;
            for (row, values) in rows.iter().zip(values.chunks_exact(row_bytes)) {
                buffer.bytes[*row as usize * row_bytes..][..row_bytes].copy_from_slice(values);
            }
        }
        touched.add(number, &rows);
    }
    Ok(())
}

/// Opens a file of a run.
pub(super) fn open(path: &Path) -> Result<TensorFile> {
    TensorFile::open(path).map_err(|message| damaged(path, &message))
}
