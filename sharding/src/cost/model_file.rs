//! The file of a learned cost model: its networks and their errors.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cost::features::ShardFeatures;
use crate::cost::set_model::{EXCHANGE_FEATURES, SetModel};
use crate::files::{self, FileKind};
use crate::{Error, Result};

pub(crate) const KIND: FileKind =
    FileKind { version: 7, hint: "train a model with `onefold-shard pretrain costs.parquet --out MODEL`" };

/// The models that are part of the program, by [name](ModelFile::SHIPPED).
pub(crate) const MODELS: [(&str, &str); 1] = [("cpu", include_str!("../../models/cpu.json"))];

/// A model file: networks, the hardware on which they were trained, and their errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFile {
    /// Version of this format.
    pub format_version: u32,
    /// The measured hardware. The topology of a plan must name the same hardware.
    pub machine: String,
    /// The version of the measured kernels.
    pub kernel_version: String,
    /// The errors of the networks on held-out samples.
    pub reports: Vec<ModelReport>,
    pub(crate) compute: SetModel,
    pub(crate) forward: Option<SetModel>,
    pub(crate) backward: Option<SetModel>,
    pub(crate) gather: Option<SetModel>,
}

/// The errors of a network on held-out samples, compared with a linear regression on the same features.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelReport {
    /// The network: `compute`, `forward`, `backward` or `gather`.
    pub model: String,
    /// The number of samples on which the network was trained.
    pub train_samples: usize,
    /// The number of folds of the cross-validation. Each fold was predicted by networks that were trained, in the
    /// same way, on the other folds.
    pub folds: usize,
    /// The number of samples that were predicted by networks that were not trained on them.
    pub test_samples: usize,
    /// The errors of the network on the test samples.
    pub test: Fit,
    /// The errors of the linear regression.
    pub linear: Fit,
    /// The errors of the network and of the linear regression on the test samples with deduplicated tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deduplicated: Option<[Fit; 2]>,
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
    /// [`Error::Fault`] if the file is missing, malformed or of another version, or if its networks do not fit
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
        let parsed = files::parse::<Self>(text.as_bytes(), &KIND);
        let parsed = parsed.and_then(|file| file.fault().map_or(Ok(file), Err));
        parsed.map_err(|message| Error::invalid(format!("the cost model `{name}`: {message}"), KIND.hint))
    }

    /// The names of the models that are part of this program: `cpu`, measured with two threads of an Intel Xeon with
    /// AVX-512.
    pub const SHIPPED: [&str; 1] = ["cpu"];

    /// Returns the problem if the networks do not fit together.
    fn fault(&self) -> Option<String> {
        let models = [
            ("compute", Some(&self.compute), ShardFeatures::names().len()),
            ("forward", self.forward.as_ref(), EXCHANGE_FEATURES),
            ("backward", self.backward.as_ref(), EXCHANGE_FEATURES),
            ("gather", self.gather.as_ref(), EXCHANGE_FEATURES),
        ];
        models.into_iter().find_map(|(name, model, features)| {
            model?.fault(features).map(|fault| format!("the model `{name}`: {fault}"))
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

    pub(crate) fn new(
        (machine, kernel_version): (String, String),
        reports: Vec<ModelReport>,
        compute: SetModel,
        [forward, backward, gather]: [Option<SetModel>; 3],
    ) -> Self {
        Self {
            format_version: KIND.version,
            machine,
            kernel_version,
            reports,
            compute,
            forward,
            backward,
            gather,
        }
    }
}
