//! The file of a learned cost model: its weights and their errors.

use std::path::Path;

use onefold_base::versioned::parse_json;
use serde::{Deserialize, Serialize};

use crate::cost::features::ShardFeatures;
use crate::cost::linear::{EXCHANGE_FEATURES, LinearModel};
use crate::cost::network::Network;
use crate::error::{Error, Result};
use crate::files::{self, FileKind};

pub(crate) const KIND: FileKind = FileKind {
    name: files::MODEL,
    version: 8,
    hint: "train a model with `onefold-shard pretrain costs.parquet --out MODEL`",
};

/// The models that are part of the program, by [name](ModelFile::SHIPPED).
pub(crate) const MODELS: [(&str, &str); 1] = [("cpu", include_str!("../../models/cpu.json"))];

/// A model file: linear models, the hardware on which they were measured, and their errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFile {
    /// Version of this format.
    pub format_version: u32,
    /// The measured hardware. The topology of a plan must name the same hardware.
    pub machine: String,
    /// The version of the measured kernels.
    pub kernel_version: String,
    /// The errors of the models on held-out samples.
    pub reports: Vec<ModelReport>,
    pub(crate) compute: LinearModel,
    /// A network that corrects `compute`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<Network>,
    pub(crate) forward: Option<LinearModel>,
    pub(crate) backward: Option<LinearModel>,
    pub(crate) gather: Option<LinearModel>,
}

/// The errors of a model on held-out samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelReport {
    /// The model: `compute`, `forward`, `backward` or `gather`.
    pub model: String,
    /// The number of samples on which the model was fitted.
    pub train_samples: usize,
    /// The number of folds of the cross-validation. Each fold was predicted by a model that was fitted, in the same
    /// way, to the other folds.
    pub folds: usize,
    /// The number of samples that were predicted by models that were not fitted to them.
    pub test_samples: usize,
    /// The errors of the model on the test samples.
    pub test: Fit,
    /// The errors of the model without its network, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear: Option<Fit>,
    /// The errors of the model on the test samples with deduplicated tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deduplicated: Option<Fit>,
    /// The errors of a first measurement as a prediction of a second one, if samples were measured twice. No model
    /// can be more accurate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeated: Option<Repeated>,
}

/// The errors of a repeated measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repeated {
    /// The number of samples.
    pub samples: usize,
    /// The errors of the first measurement as a prediction of the second.
    pub fit: Fit,
}

/// The errors of predictions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Mean squared error, in ms².
    pub mse: f64,
    /// Kendall's tau-b.
    pub kendall_tau: f64,
    /// The mean of |predicted - measured| ÷ measured.
    pub relative_error: f64,
}

impl ModelFile {
    /// Reads and checks a model file.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the file is missing, malformed or of another version, or if its weights do not fit
    /// together.
    pub fn load(path: &Path) -> Result<Self> {
        let file: Self = files::load(path, &KIND)?;
        match file.fault() {
            None => Ok(file),
            Some(message) => Err(Error::file(path, message, KIND.hint)),
        }
    }

    /// Returns a model that is part of this program. The names are [`SHIPPED`](Self::SHIPPED).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no model with this name.
    pub fn shipped(name: &str) -> Result<Self> {
        let Some((_, text)) = MODELS.iter().find(|(other, _)| *other == name) else {
            return Err(Error::invalid(
                format!("no cost model `{name}` comes with this program"),
                format!("there are: {}", Self::SHIPPED.join(", ")),
            ));
        };
        let parsed = parse_json::<Self>(text.as_bytes(), KIND.version);
        let parsed = parsed.and_then(|file| file.fault().map_or(Ok(file), Err));
        parsed.map_err(|message| Error::invalid(format!("the cost model `{name}`: {message}"), KIND.hint))
    }

    /// The names of the models that are part of this program: `cpu`, measured with two threads of an Intel Xeon with
    /// AVX-512.
    pub const SHIPPED: [&str; 1] = ["cpu"];

    /// Returns the problem if the weights do not fit together.
    fn fault(&self) -> Option<String> {
        let models = [
            ("compute", Some(&self.compute), ShardFeatures::names().len()),
            ("forward", self.forward.as_ref(), EXCHANGE_FEATURES),
            ("backward", self.backward.as_ref(), EXCHANGE_FEATURES),
            ("gather", self.gather.as_ref(), EXCHANGE_FEATURES),
        ];
        let of_models = models.into_iter().find_map(|(name, model, features)| {
            model?.fault(features).map(|fault| format!("the model `{name}`: {fault}"))
        });
        of_models.or_else(|| {
            let fault = self.network.as_ref()?.fault(ShardFeatures::names().len())?;
            Some(format!("the network: {fault}"))
        })
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written. An old file remains unchanged.
    pub fn store(&self, path: &Path) -> Result<()> {
        files::store_wide(path, self)
    }
}
