//! The dense part of a model in safetensors files.

use std::path::PathBuf;

use onefold_storage::Storage;
use safetensors::Dtype;
use tch::Tensor;

use super::tensor_file::{Entry, TensorFile};
use super::{damaged, tables};
use crate::model::Model;
use crate::{Result, tensors};

/// The prefix of the names of the dense part's parameters.
const DENSE: &str = "dense.";

/// The file of the dense part, with parameters named `dense.NAME`.
#[derive(Debug)]
pub(crate) struct DenseFile {
    path: PathBuf,
    file: TensorFile,
}

/// Returns the dense parameters of a model as entries of a file.
pub(crate) fn dense_entries(model: &Model) -> Vec<Entry<'static>> {
    let parameters = model.named_dense_parameters().into_iter();
    parameters.map(|(name, parameter)| Entry::tensor(format!("{DENSE}{name}"), &parameter)).collect()
}

impl DenseFile {
    /// Opens a file.
    pub(crate) fn open(storage: &Storage, name: &str) -> Result<Self> {
        Ok(Self { path: storage.shown(name), file: tables::open(storage, name)? })
    }

    /// Reads an `f32` tensor of the file, such as a parameter or its optimizer state.
    ///
    /// # Errors
    ///
    /// [`Error::Run`](crate::Error::Run) if the tensor is missing or has another length.
    pub(crate) fn read_into(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let read = self.file.read_into(name, Dtype::F32, bytemuck::cast_slice_mut(values));
        read.map_err(|fault| damaged(&self.path, fault))
    }

    /// Copies the parameters into a model.
    ///
    /// # Errors
    ///
    /// [`Error::Run`](crate::Error::Run) if the file's parameters do not fit the model.
    pub(crate) fn restore(&self, model: &Model) -> Result<()> {
        for (name, mut parameter) in model.named_dense_parameters() {
            let mut values = vec![0.0_f32; parameter.numel()];
            self.read_into(&format!("{DENSE}{name}"), &mut values)?;
            let values = tensors::from_f32(&values, &parameter.size());
            tch::no_grad(|| parameter.copy_(&values));
        }
        Ok(())
    }

    /// Returns all parameters by name.
    pub(crate) fn parameters(&self) -> Result<Vec<(String, Tensor)>> {
        let infos = self.file.infos().filter_map(|(name, info)| Some((name.strip_prefix(DENSE)?, info)));
        let shapes: Vec<(String, Vec<i64>)> = infos
            .map(|(name, info)| (name.to_owned(), info.shape.iter().map(|side| *side as i64).collect()))
            .collect();
        let parameters = shapes.into_iter().map(|(name, shape)| {
            let mut values = vec![0.0_f32; shape.iter().product::<i64>() as usize];
            self.read_into(&format!("{DENSE}{name}"), &mut values)?;
            Ok((name, tensors::from_f32(&values, &shape)))
        });
        parameters.collect()
    }
}
