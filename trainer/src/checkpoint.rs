//! A run on disk: `run.json` (configuration, schema, figures) and `model.safetensors` (all parameters).

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use onefold_datasets::{FeatureGroup, Schema, commit};
use onefold_sharding::TableConfig;
use safetensors::tensor::{Dtype, View};
use safetensors::{SafeTensors, serialize_to_file};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::embedding::{Embeddings, Table};
use crate::model::Model;
use crate::{Error, Result, TrainConfig, tensors};

/// The file that makes a directory a run.
pub const RUN_FILE: &str = "run.json";
/// The parameters.
pub const MODEL_FILE: &str = "model.safetensors";
/// The version this code writes.
const FORMAT_VERSION: u32 = 1;

/// `run.json`: what is needed to use the parameters.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Version of this format.
    pub format_version: u32,
    /// The configuration that was trained.
    pub config: TrainConfig,
    /// The schema of the dataset that it was trained on.
    pub schema: Schema,
    /// The tables, in the schema's order of features.
    pub tables: Vec<TableConfig>,
    /// Steps that were taken.
    pub steps: u64,
}

impl Run {
    /// The description of a run.
    pub fn new(config: &TrainConfig, schema: &Schema, tables: &[TableConfig], steps: u64) -> Self {
        let (config, schema, tables) = (config.clone(), schema.clone(), tables.to_vec());
        Self { format_version: FORMAT_VERSION, config, schema, tables, steps }
    }

    /// Writes the run and its model into `directory`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Run`] if a file cannot be written.
    pub fn store(&self, model: &Model, directory: &Path) -> Result<()> {
        store_model(model, &directory.join(MODEL_FILE))?;
        let mut text = serde_json::to_string_pretty(self).map_err(std::io::Error::other)?;
        text.push('\n');
        Ok(commit::write_atomically(&directory.join(RUN_FILE), text.as_bytes())?)
    }

    /// Reads a run's description.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if `directory` holds no run, or one of another version.
    pub fn load(directory: &Path) -> Result<Self> {
        let path = directory.join(RUN_FILE);
        let wrong =
            |message: String, hint: &str| Error::Run { path: path.clone(), message, hint: hint.to_owned() };
        let text = fs_err::read_to_string(&path).map_err(|error| {
            wrong(format!("not a run: {error}"), "give the directory that `onefold-train run --out` wrote")
        })?;
        let again = "train again, or use the program that wrote it";
        let run: Self = serde_json::from_str(&text).map_err(|error| wrong(error.to_string(), again))?;
        if run.format_version != FORMAT_VERSION {
            return Err(wrong(
                format!("format version {}, this program reads {FORMAT_VERSION}", run.format_version),
                again,
            ));
        }
        Ok(run)
    }

    /// Reads the run's model.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] if the parameters are missing, damaged, or of other shapes than the configuration's.
    pub fn load_model(&self, directory: &Path, threads: usize) -> Result<Model> {
        let path = directory.join(MODEL_FILE);
        let bytes = fs_err::read(&path)?;
        let stored = SafeTensors::deserialize(&bytes).map_err(|error| damaged(&path, &error.to_string()))?;
        let floats = |name: &str| {
            let view = stored.tensor(name).map_err(|error| damaged(&path, &format!("`{name}`: {error}")))?;
            if view.dtype() != Dtype::F32 {
                return Err(damaged(&path, &format!("`{name}` is {:?}", view.dtype())));
            }
            Ok(view
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect::<Vec<_>>())
        };
        let mut tables = Vec::with_capacity(self.tables.len());
        for config in &self.tables {
            let (weight, accumulator) = table_names(&config.feature);
            let table = Table::from_parts(config, floats(&weight)?, floats(&accumulator)?);
            tables.push(
                table.ok_or_else(|| {
                    damaged(&path, &format!("`{weight}` has another size than the run says"))
                })?,
            );
        }
        let embeddings = Embeddings::from_tables(tables, threads)?;
        let model = Model::with_embeddings(&self.config, &self.schema, &self.tables, embeddings)?;
        for (name, mut parameter) in model.named_dense_parameters() {
            let values = floats(&dense_name(&name))?;
            if values.len() != parameter.numel() {
                return Err(damaged(
                    &path,
                    &format!("`{name}` has {} values, not {}", values.len(), parameter.numel()),
                ));
            }
            let values = tensors::from_f32(&values, &parameter.size());
            tch::no_grad(|| parameter.copy_(&values));
        }
        Ok(model)
    }

    /// Checks that a dataset's samples can go through the model.
    ///
    /// # Errors
    ///
    /// [`Error::Run`] naming the first difference between the schemas.
    pub fn check_schema(&self, schema: &Schema, directory: &Path) -> Result<()> {
        let (trained, given) = (&self.schema, schema);
        let groups = |schema: &Schema| schema.groups.iter().map(describe_group).collect::<Vec<_>>();
        let differs = |what: &str, trained: String, given: String| Error::Run {
            path: directory.to_owned(),
            message: format!("the model was trained on other {what}: {trained}, the dataset has {given}"),
            hint: "evaluate on a dataset that was built with the same `[features]`".to_owned(),
        };
        if trained.dense != given.dense {
            return Err(differs(
                "dense features",
                format!("{:?}", trained.dense),
                format!("{:?}", given.dense),
            ));
        }
        if trained.labels != given.labels {
            return Err(differs("labels", format!("{:?}", trained.labels), format!("{:?}", given.labels)));
        }
        if groups(trained) != groups(given) {
            return Err(differs("feature groups", groups(trained).join("; "), groups(given).join("; ")));
        }
        Ok(())
    }
}

fn describe_group(group: &FeatureGroup) -> String {
    let names: Vec<_> = group.features.iter().map(|feature| feature.name.as_str()).collect();
    format!("{} ({})", group.name, names.join(", "))
}

fn damaged(path: &Path, message: &str) -> Error {
    let hint = "the run is damaged; train again, or restore it from a copy".to_owned();
    Error::Run { path: path.to_owned(), message: message.to_owned(), hint }
}

fn table_names(feature: &str) -> (String, String) {
    (format!("tables.{feature}.weight"), format!("tables.{feature}.accumulator"))
}

fn dense_name(name: &str) -> String {
    format!("dense.{name}")
}

fn store_model(model: &Model, path: &Path) -> Result<()> {
    let dense = model.named_dense_parameters().into_iter().map(|(name, parameter)| {
        let parameter = parameter.detach().contiguous();
        let shape = parameter.size().iter().map(|&side| side as usize).collect();
        (dense_name(&name), Values { shape, source: Source::Tensor(parameter) })
    });
    let tables = model.embeddings.tables().iter().flat_map(|table| {
        let (weight, accumulator) = table_names(&table.config().feature);
        let (rows, dim) = (table.config().rows as usize, table.config().dim as usize);
        let state = match table.accumulators().len() / rows {
            1 => vec![rows],
            width => vec![rows, width],
        };
        [
            (weight, Values { shape: vec![rows, dim], source: Source::Slice(table.weights()) }),
            (accumulator, Values { shape: state, source: Source::Slice(table.accumulators()) }),
        ]
    });
    serialize_to_file(dense.chain(tables), &None, path).map_err(|error| Error::Run {
        path: PathBuf::from(path),
        message: format!("the parameters could not be written: {error}"),
        hint: "check the disk's free space and permissions".to_owned(),
    })?;
    Ok(fs_err::File::open(path)?.sync_all()?)
}

/// Parameters on their way to a file, not copied.
struct Values<'a> {
    shape: Vec<usize>,
    source: Source<'a>,
}

enum Source<'a> {
    Slice(&'a [f32]),
    Tensor(Tensor),
}

impl View for Values<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // The format is little-endian, and so is every machine that libtorch's wheels run on.
        Cow::Borrowed(bytemuck::cast_slice(match &self.source {
            Source::Slice(values) => values,
            Source::Tensor(tensor) => tensors::as_slice(tensor),
        }))
    }

    fn data_len(&self) -> usize {
        4 * self.shape.iter().product::<usize>()
    }
}
