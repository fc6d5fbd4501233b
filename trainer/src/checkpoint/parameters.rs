//! A model's parameters in safetensors files: by which names, and back.

use std::io::Read;
use std::path::Path;

use safetensors::Dtype;
use tch::Tensor;

use super::tensor_file::{Entry, Source, TensorFile};
use super::touched::Touched;
use crate::embedding::{Buffer, Embeddings, RowSet, Shard};
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

/// `tables.FEATURE`, or `tables.FEATURE[ROWS, COLUMNS]` for a part of a table.
fn shard_name(embeddings: &dyn Embeddings, shard: &Shard) -> String {
    let config = &embeddings.configs()[shard.table];
    let name = format!("tables.{}", config.feature);
    if shard.is_whole(config) { name } else { format!("{name}[{:?}, {:?}]", shard.rows, shard.columns) }
}

/// The shards that this process holds, by number; of replicas the first one only.
fn stored_shards(embeddings: &dyn Embeddings) -> impl Iterator<Item = (usize, &Shard)> {
    (0..embeddings.configs().len()).flat_map(move |table| embeddings.held_parts(table))
}

/// The rows of a shard in a file, with `rows` of them.
fn shard_entries<'a>(
    embeddings: &'a dyn Embeddings,
    shard: usize,
    name: &str,
    rows: RowSet<'a>,
    count: usize,
) -> Vec<Entry<'a>> {
    let buffers = embeddings.buffers(shard).into_iter().enumerate();
    let entry = |(number, buffer): (usize, Buffer)| Entry {
        name: format!("{name}.{}", buffer.name),
        dtype: buffer.dtype,
        shape: vec![count, buffer.columns],
        source: Source::Shard { embeddings, shard, buffer: number, rows },
    };
    buffers.map(entry).collect()
}

/// All of the tables by shard: `tables.FEATURE.weight`, and the optimizer's state, `tables.FEATURE.accumulator`.
pub(super) fn shards(model: &Model) -> Vec<Entry<'_>> {
    let embeddings = &*model.embeddings;
    let entries = stored_shards(embeddings).flat_map(|(number, shard)| {
        let rows = (shard.rows.end - shard.rows.start) as usize;
        shard_entries(embeddings, number, &shard_name(embeddings, shard), RowSet::All, rows)
    });
    entries.collect()
}

/// All of the tables whole, by the same names. The state of a table that is divided by columns stays with its shards.
pub(super) fn tables(model: &Model) -> Vec<Entry<'_>> {
    let embeddings = &*model.embeddings;
    let entries = (0..embeddings.configs().len()).flat_map(|table| {
        let (config, parts) = (&embeddings.configs()[table], embeddings.held_parts(table));
        let buffers = parts.first().map_or_else(Vec::new, |(shard, _)| embeddings.buffers(*shard));
        let undivided = parts.iter().all(|(_, shard)| shard.columns == (0..config.dim));
        let buffers = buffers.into_iter().enumerate().filter(move |(number, _)| *number == 0 || undivided);
        buffers.map(move |(buffer, info)| Entry {
            name: format!("tables.{}.{}", config.feature, info.name),
            dtype: info.dtype,
            shape: vec![config.rows as usize, if buffer == 0 { config.dim as usize } else { info.columns }],
            source: Source::Table { embeddings, table, buffer },
        })
    });
    entries.collect()
}

/// The rows that were touched, by shard and counted from its first row.
pub(super) fn touched_rows(model: &Model, touched: &Touched) -> Vec<Vec<u32>> {
    let rows = |shard: &Shard| {
        let rows = touched.rows(shard.table).into_iter().filter(|row| shard.rows.contains(&u64::from(*row)));
        rows.map(|row| row - shard.rows.start as u32).collect()
    };
    model.embeddings.shards().iter().map(rows).collect()
}

/// Those rows of the tables only, and which they are: `tables.FEATURE.rows`.
pub(super) fn table_rows<'a>(model: &'a Model, rows: &'a [Vec<u32>]) -> Vec<Entry<'a>> {
    let embeddings = &*model.embeddings;
    let entries = stored_shards(embeddings).flat_map(|(number, shard)| {
        let (name, rows) = (shard_name(embeddings, shard), &rows[number]);
        let numbers = Entry {
            name: format!("{name}.rows"),
            dtype: Dtype::U32,
            shape: vec![rows.len()],
            source: Source::Bytes(bytemuck::cast_slice(rows)),
        };
        let buffers = shard_entries(embeddings, number, &name, RowSet::Chosen(rows), rows.len());
        std::iter::once(numbers).chain(buffers)
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

/// Puts all of the tables' shards of a file into a model.
pub(super) fn load_shards(model: &mut Model, path: &Path) -> Result<()> {
    load_buffers(model, path, |_| true)
}

/// Puts the weights of a file into a model whose tables are whole.
pub(super) fn load_weights(model: &mut Model, path: &Path) -> Result<()> {
    load_buffers(model, path, |buffer| buffer == 0)
}

fn load_buffers(model: &mut Model, path: &Path, chosen: impl Fn(usize) -> bool) -> Result<()> {
    let mut file = open(path)?;
    for (number, shard) in held_shards(&*model.embeddings) {
        let name = shard_name(&*model.embeddings, &shard);
        let buffers = model.embeddings.buffers(number).into_iter().enumerate();
        for (buffer, info) in buffers.filter(|(number, _)| chosen(*number)) {
            let name = format!("{name}.{}", info.name);
            let rows = (shard.rows.end - shard.rows.start) as usize;
            let mut reading = file
                .begin(&name, info.dtype, rows * info.row_bytes())
                .map_err(|message| damaged(path, &message))?;
            let mut source = |bytes: &mut [u8]| reading.read_exact(bytes);
            let written = model.embeddings.write(number, buffer, RowSet::All, &mut source);
            written.map_err(|error| damaged(path, &format!("`{name}`: {error}")))?;
        }
    }
    Ok(())
}

/// All shards that this process holds, by number.
fn held_shards(embeddings: &dyn Embeddings) -> Vec<(usize, Shard)> {
    let shards = embeddings.shards().iter().cloned().enumerate();
    shards.filter(|(number, _)| embeddings.holds(*number)).collect()
}

/// Puts the rows of a file into a model's tables, and adds them to `touched`.
pub(super) fn load_table_rows(model: &mut Model, path: &Path, touched: &mut Touched) -> Result<()> {
    let wrong = |message: String| damaged(path, &message);
    let mut file = open(path)?;
    for (number, shard) in held_shards(&*model.embeddings) {
        let name = shard_name(&*model.embeddings, &shard);
        let count = shard.rows.end - shard.rows.start;
        let rows = file.read::<u32>(&format!("{name}.rows"), Dtype::U32).map_err(wrong)?;
        if let Some(row) = rows.iter().find(|row| u64::from(**row) >= count) {
            return Err(wrong(format!("`{name}.rows` has row {row} of {count}")));
        }
        for (buffer, info) in model.embeddings.buffers(number).into_iter().enumerate() {
            let mut values = vec![0; rows.len() * info.row_bytes()];
            file.read_into(&format!("{name}.{}", info.name), info.dtype, &mut values).map_err(wrong)?;
            let mut rest = values.as_slice();
            let mut source = |bytes: &mut [u8]| rest.read_exact(bytes);
            let written = model.embeddings.write(number, buffer, RowSet::Chosen(&rows), &mut source);
            written.map_err(|error| wrong(error.to_string()))?;
        }
        let of_table: Vec<u32> = rows.iter().map(|row| row + shard.rows.start as u32).collect();
        touched.add(shard.table, &of_table);
    }
    Ok(())
}

/// Opens a file of a run.
pub(super) fn open(path: &Path) -> Result<TensorFile> {
    TensorFile::open(path).map_err(|message| damaged(path, &message))
}
