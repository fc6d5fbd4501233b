//! The `[optimizer]` and `[schedule]` sections of `train.toml`.

use serde::{Deserialize, Serialize};

use super::TableOptimizer;

/// The `[optimizer]` section.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// The optimizer of the embedding tables.
    pub tables: TableOptimizerConfig,
    /// The optimizer of the dense part.
    pub dense: DenseOptimizerConfig,
}

/// The `[optimizer.tables]` section. `learning_rate` is required, except for the default algorithm.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "GivenTableOptimizer")]
pub struct TableOptimizerConfig {
    /// The algorithm.
    pub kind: TableOptimizer,
    /// Learning rate.
    pub learning_rate: f32,
    /// The constant that is added to the denominator.
    pub eps: f32,
    /// The decay rate of Adam's first moment.
    pub beta1: f32,
    /// The decay rate of Adam's second moment.
    pub beta2: f32,
    /// The maximum L2 norm of a table row's gradient, summed over the batch; larger gradients are scaled down
    /// to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_row_grad_norm: Option<f32>,
}

/// [`TableOptimizerConfig`] as written in the file, before defaults are filled in.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenTableOptimizer {
    kind: Option<TableOptimizer>,
    learning_rate: Option<f32>,
    eps: Option<f32>,
    beta1: Option<f32>,
    beta2: Option<f32>,
    max_row_grad_norm: Option<f32>,
}

impl TryFrom<GivenTableOptimizer> for TableOptimizerConfig {
    type Error = String;

    fn try_from(given: GivenTableOptimizer) -> Result<Self, String> {
        let default = Self::default();
        let kind = given.kind.unwrap_or(default.kind);
        let rate = given.learning_rate.or((kind == default.kind).then_some(default.learning_rate));
        let all = Self::new(kind, rate.ok_or_else(missing_rate)?);
        Ok(Self {
            eps: given.eps.unwrap_or(all.eps),
            beta1: given.beta1.unwrap_or(all.beta1),
            beta2: given.beta2.unwrap_or(all.beta2),
            max_row_grad_norm: given.max_row_grad_norm,
            ..all
        })
    }
}

fn missing_rate() -> String {
    "`learning_rate` is missing: only the default `kind` has a default".to_owned()
}

impl Default for TableOptimizerConfig {
    /// Returns the values that the hyperparameter search in `docs/src/benchmarks/quality.md` found.
    fn default() -> Self {
        Self::new(TableOptimizer::RowWiseAdagrad, 0.02)
    }
}

impl TableOptimizerConfig {
    /// Returns the configuration of an algorithm with defaults for all other settings.
    pub fn new(kind: TableOptimizer, learning_rate: f32) -> Self {
        Self { kind, learning_rate, eps: 1e-8, beta1: 0.9, beta2: 0.999, max_row_grad_norm: None }
    }

    pub(super) fn check(&self) -> Result<(), (String, &'static str)> {
        if [self.learning_rate, self.eps].iter().any(|value| !value.is_finite() || *value < 0.0) {
            let message = format!(
                "`[optimizer.tables]` has a learning rate of {} and an eps of {}",
                self.learning_rate, self.eps
            );
            return Err((message, "neither may be negative or infinite"));
        }
        let betas = [self.beta1, self.beta2];
        if betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
            let message = format!("`[optimizer.tables]` has beta1 and beta2 {betas:?}");
            return Err((message, "both must be at least 0 and below 1"));
        }
        if let Some(norm) = self.max_row_grad_norm.filter(|norm| !(norm.is_finite() && *norm > 0.0)) {
            let message = format!("`[optimizer.tables].max_row_grad_norm` is {norm}");
            return Err((message, "give a positive norm, or leave it out"));
        }
        Ok(())
    }
}

/// The `[optimizer.dense]` section. Without a learning rate, the default algorithm uses the rate and the
/// gradient clipping of the [default](Self::default); other algorithms require a rate. All other defaults equal
/// PyTorch's, except `eps`, which is 1e-8 for every algorithm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "GivenDenseOptimizer")]
pub struct DenseOptimizerConfig {
    /// The algorithm.
    pub kind: DenseOptimizerKind,
    /// Learning rate.
    pub learning_rate: f64,
    /// The constant that is added to the denominator of Adagrad, Adam and AdamW.
    pub eps: f64,
    /// The momentum of SGD; 0 disables it.
    #[serde(skip_serializing_if = "crate::is_default")]
    pub momentum: f64,
    /// The decay rates of the running means of gradient and squared gradient, for Adam and AdamW.
    #[serde(skip_serializing_if = "is_betas")]
    pub betas: [f64; 2],
    /// The L2 penalty. It is added to the gradient, except with AdamW, which decays the parameter directly.
    #[serde(skip_serializing_if = "crate::is_default")]
    pub weight_decay: f64,
    /// The maximum L2 norm of the gradient of all dense parameters; larger gradients are scaled down to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_grad_norm: Option<f64>,
}

/// [`DenseOptimizerConfig`] as written in the file, before defaults are filled in.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GivenDenseOptimizer {
    kind: Option<DenseOptimizerKind>,
    learning_rate: Option<f64>,
    eps: Option<f64>,
    momentum: Option<f64>,
    betas: Option<[f64; 2]>,
    weight_decay: Option<f64>,
    max_grad_norm: Option<f64>,
}

impl TryFrom<GivenDenseOptimizer> for DenseOptimizerConfig {
    type Error = String;

    fn try_from(given: GivenDenseOptimizer) -> Result<Self, String> {
        let default = Self::default();
        let kind = given.kind.unwrap_or(default.kind);
        let all = match given.learning_rate {
            Some(rate) => Self::new(kind, rate),
            // The search tuned the default rate and clipping together.
            None if kind == default.kind => default,
            None => return Err(missing_rate()),
        };
        Ok(Self {
            eps: given.eps.unwrap_or(all.eps),
            momentum: given.momentum.unwrap_or(all.momentum),
            betas: given.betas.unwrap_or(all.betas),
            weight_decay: given.weight_decay.unwrap_or(all.weight_decay),
            max_grad_norm: given.max_grad_norm.or(all.max_grad_norm),
            ..all
        })
    }
}

impl Default for DenseOptimizerConfig {
    /// Returns the values that the hyperparameter search in `docs/src/benchmarks/quality.md` found.
    fn default() -> Self {
        Self { max_grad_norm: Some(0.1), ..Self::new(DenseOptimizerKind::Adagrad, 0.005) }
    }
}

impl DenseOptimizerConfig {
    /// Returns the configuration of an algorithm with defaults for all other settings.
    pub fn new(kind: DenseOptimizerKind, learning_rate: f64) -> Self {
        let (eps, betas) = (1e-8, BETAS);
        Self { kind, learning_rate, eps, momentum: 0.0, betas, weight_decay: 0.0, max_grad_norm: None }
    }

    pub(super) fn check(&self) -> Result<(), (String, &'static str)> {
        let wrong = |key: &str, value: &dyn std::fmt::Debug, hint| {
            Err((format!("`[optimizer.dense].{key}` is {value:?}"), hint))
        };
        let not_negative = |value: f64| value.is_finite() && value >= 0.0;
        let values = [
            ("learning_rate", self.learning_rate),
            ("eps", self.eps),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
        ];
        for (key, value) in values {
            if !not_negative(value) {
                return wrong(key, &value, "it may not be negative or infinite");
            }
        }
        if self.betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
            return wrong("betas", &self.betas, "both must be at least 0 and less than 1");
        }
        if self.momentum > 0.0 && self.kind != DenseOptimizerKind::Sgd {
            return wrong("momentum", &self.momentum, "only `kind = \"sgd\"` has one; leave it out");
        }
        match self.max_grad_norm {
            Some(norm) if !(norm.is_finite() && norm > 0.0) => {
                wrong("max_grad_norm", &norm, "give a positive norm, or leave it out")
            }
            _ => Ok(()),
        }
    }

    /// Returns the properties that determine the layout of the optimizer state: the algorithm, and whether it
    /// keeps momentum.
    pub fn state_kind(&self) -> (DenseOptimizerKind, bool) {
        (self.kind, self.momentum > 0.0)
    }

    /// Returns the number of optimizer-state values per parameter.
    pub fn state_values(&self) -> u64 {
        match self.kind {
            DenseOptimizerKind::Adagrad => 1,
            DenseOptimizerKind::Sgd => u64::from(self.momentum > 0.0),
            DenseOptimizerKind::Adam | DenseOptimizerKind::AdamW => 2,
        }
    }
}

/// The optimization algorithms for the dense part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DenseOptimizerKind {
    /// Adagrad (Duchi et al. 2011).
    Adagrad,
    /// Stochastic gradient descent, optionally with momentum.
    Sgd,
    /// Adam (Kingma and Ba 2015).
    Adam,
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    #[serde(rename = "adamw")]
    AdamW,
}

/// The default decay rates of Adam and AdamW.
const BETAS: [f64; 2] = [0.9, 0.999];

fn is_betas(value: &[f64; 2]) -> bool {
    *value == BETAS
}

/// The `[schedule]` section: learning-rate schedules, evaluated once per step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleConfig {
    /// The schedule of the dense part.
    pub dense: Schedule,
    /// The schedule of the tables.
    pub tables: Schedule,
}

/// A learning-rate schedule: a linear warm-up, then a decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    /// The decay after the warm-up.
    pub kind: ScheduleKind,
    /// The number of warm-up steps, in which the rate grows linearly from `1 / warmup_steps` of its value to
    /// its full value; 0 disables the warm-up.
    pub warmup_steps: u64,
    /// For `linear` and `cosine`: the number of steps after the warm-up in which the rate decays. For `step`:
    /// the number of steps between two decays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// For `linear` and `cosine`: the factor on the rate at the end of the decay and afterwards.
    pub final_factor: f64,
    /// For `step`: the factor of each decay.
    pub gamma: f64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            kind: ScheduleKind::Constant,
            warmup_steps: 0,
            decay_steps: None,
            final_factor: 0.0,
            gamma: 0.1,
        }
    }
}

/// The kinds of decay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// No decay.
    #[default]
    Constant,
    /// Multiplies by `gamma` after every `decay_steps` steps (PyTorch's `StepLR`).
    Step,
    /// Decays linearly to `final_factor` (PyTorch's `LinearLR`).
    Linear,
    /// Decays along half a cosine wave to `final_factor` (Loshchilov and Hutter 2017, without restarts;
    /// PyTorch's `CosineAnnealingLR`).
    Cosine,
}

impl Schedule {
    /// Returns the factor on the learning rate in step `step`, counted from 0.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return (step + 1) as f64 / self.warmup_steps as f64;
        }
        let step = step - self.warmup_steps;
        let decay = self.decay_steps.unwrap_or(u64::MAX).max(1);
        let share = (step as f64 / decay as f64).min(1.0);
        let fallen = |remaining: f64| self.final_factor + (1.0 - self.final_factor) * remaining;
        match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Step => self.gamma.powf((step / decay) as f64),
            ScheduleKind::Linear => fallen(1.0 - share),
            ScheduleKind::Cosine => fallen(f64::midpoint((std::f64::consts::PI * share).cos(), 1.0)),
        }
    }

    pub(super) fn check(&self, part: &str) -> Result<(), (String, &'static str)> {
        let decays = self.kind != ScheduleKind::Constant;
        if decays && self.decay_steps.is_none_or(|steps| steps == 0) {
            let message =
                format!("`[schedule.{part}].kind` is `{:?}`, but `decay_steps` is not given", self.kind);
            return Err((
                message.to_lowercase(),
                "give the steps that the decay takes (for `step`: between two falls)",
            ));
        }
        let factors = [("final_factor", self.final_factor), ("gamma", self.gamma)];
        for (key, factor) in factors {
            if !(0.0..=1.0).contains(&factor) {
                let message = format!("`[schedule.{part}].{key}` is {factor}");
                return Err((message, "give a factor from 0 to 1"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(schedule: &Schedule, steps: u64) -> Vec<f64> {
        (0..steps).map(|step| schedule.factor(step)).collect()
    }

    #[track_caller]
    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        let equal = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(equal, "{found:?} {expected:?}");
    }

    /// The expected values are from torch 2.11: `o = SGD([p], lr=1.)`, the given scheduler, and
    /// `o.param_groups[0]["lr"]` before each `o.step(); s.step()`.
    #[test]
    fn schedules_equal_those_of_pytorch() {
        let schedule = |kind, decay_steps, final_factor| Schedule {
            kind,
            decay_steps: Some(decay_steps),
            final_factor,
            ..Schedule::default()
        };
        // StepLR(o, step_size=2, gamma=0.1)
        let step = factors(&schedule(ScheduleKind::Step, 2, 0.0), 6);
        close(&step, &[1.0, 1.0, 0.1, 0.1, 0.01, 0.01]);
        // LinearLR(o, start_factor=1., end_factor=0.2, total_iters=4)
        let linear = factors(&schedule(ScheduleKind::Linear, 4, 0.2), 6);
        close(&linear, &[1.0, 0.8, 0.6, 0.4, 0.2, 0.2]);
        // CosineAnnealingLR(o, T_max=4, eta_min=0.1)
        let cosine = factors(&schedule(ScheduleKind::Cosine, 4, 0.1), 5);
        close(&cosine, &[1.0, 0.868_198_05, 0.55, 0.231_801_95, 0.1]);
        // LinearLR(o, start_factor=0.25, end_factor=1., total_iters=3)
        let warm = Schedule { warmup_steps: 4, ..Schedule::default() };
        close(&factors(&warm, 6), &[0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn the_decay_begins_after_the_warm_up() {
        let schedule = Schedule {
            warmup_steps: 2,
            decay_steps: Some(2),
            kind: ScheduleKind::Linear,
            ..Schedule::default()
        };
        close(&factors(&schedule, 6), &[0.5, 1.0, 1.0, 0.5, 0.0, 0.0]);
    }
}
