//! The file of a learned cost model: its networks, and how well they do.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cost::features::ShardFeatures;
use crate::cost::set_model::{EXCHANGE_FEATURES, SetModel};
use crate::files::{self, FileKind};
use crate::{Error, Result};

pub(crate) const KIND: FileKind =
    FileKind { version: 7, hint: "train a model with `onefold-shard pretrain costs.parquet --out MODEL`" };

/// Models that come with the program, by [name](ModelFile::SHIPPED).
pub(crate) const MODELS: [(&str, &str); 1] = [("cpu", include_str!("../../models/cpu.json"))];

/// A model file: networks, what they were trained on, and how well they do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFile {
    /// Version of this format.
    pub format_version: u32,
    /// The hardware that was measured; a plan's topology must name the same.
    pub machine: String,
    /// The kernels that were measured.
    pub kernel_version: String,
    /// How well the networks do on held-out samples.
    pub reports: Vec<ModelReport>,
    pub(crate) compute: SetModel,
    pub(crate) forward: Option<SetModel>,
    pub(crate) backward: Option<SetModel>,
    pub(crate) gather: Option<SetModel>,
}

/// How well a network predicts held-out samples, beside a line through the same features.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelReport {
    /// `compute`, `forward`, `backward` or `gather`.
    pub model: String,
    /// Samples that it was trained on.
    pub train_samples: usize,
    /// Parts of the cross-validation: each was predicted by networks that were trained, in the same way, on the others.
    pub folds: usize,
    /// Samples that were predicted by networks that had not seen them.
    pub test_samples: usize,
    /// On the test samples.
    pub test: Fit,
    /// Of the linear baseline.
    pub linear: Fit,
    /// Of the test samples with tables that are deduplicated: the network and the line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deduplicated: Option<[Fit; 2]>,
    /// How well samples predict themselves when they are measured again, if they were: no model can do better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeated: Option<Repeated>,
}

/// Samples that were measured twice.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repeated {
    /// Samples.
    pub samples: usize,
    /// The first measurement as a prediction of the second.
    pub fit: Fit,
}

/// How predictions fit measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Mean squared error, in ms².
    pub mse: f64,
    /// Kendall's tau-b.
    pub kendall_tau: f64,
    /// Mean of |predicted - measured| ÷ measured.
    pub relative_error: f64,
}

impl ModelFile {
    /// Reads and checks a model.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if it is missing, malformed, of another version, or its networks do not fit together.
    pub fn load(path: &Path) -> Result<Self> {
        let file: Self = files::load(path, &KIND)?;
        match file.fault() {
            None => Ok(file),
            Some(message) => Err(Error::file(path, message, KIND.hint)),
        }
    }

    /// A model that comes with this program, by its name; the names are [`SHIPPED`](Self::SHIPPED).
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there is no model of that name.
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

    /// The names of the models that come with this program: `cpu`, of two threads of an Intel Xeon with AVX-512.
    pub const SHIPPED: [&str; 1] = ["cpu"];

    /// What is wrong with networks that do not fit together.
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

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if it cannot be written; an old file is then untouched.
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
